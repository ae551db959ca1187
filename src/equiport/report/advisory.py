"""An advisory review beside the report: what a reader without part in the port found. It changes no verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from equiport.errors import EquiportError
from equiport.experiment import Experiment
from equiport.experiment.atomic import read_json, write_json

ADVISORY_NAME = "advisory_review.json"


class AdvisoryFinding(BaseModel):
    """One finding of a review."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    severity: Literal["high", "medium", "low"]
    file: str
    line: int = 0
    finding: str
    why: str


class AdvisoryReview(BaseModel):
    """A review: who read it, and what was found."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reviewer: str
    findings: tuple[AdvisoryFinding, ...]


def write_advisory(experiment: Experiment, review: AdvisoryReview) -> Path:
    """Store a review with the results."""
    return write_json(experiment.results / ADVISORY_NAME, review)


def read_advisory(experiment: Experiment) -> AdvisoryReview | None:
    """The stored review; None without one.

    Raises:
        EquiportError: the file is damaged.
    """
    path = experiment.results / ADVISORY_NAME
    if not path.is_file():
        return None
    try:
        return AdvisoryReview.model_validate(read_json(path))
    except ValidationError as error:
        raise EquiportError(error.errors()[0]["msg"], where=path, remedy="Delete it.") from None
