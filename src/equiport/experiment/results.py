"""results/stageN.json: one schema for all stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from equiport.compare.verdict import Reason, Verdict
from equiport.errors import EquiportError
from equiport.experiment.atomic import read_json, write_json

SCHEMA_VERSION = 1


class BackendStamp(BaseModel):
    """What ran the port: `kind` is real or stand-in, `device` where."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: str
    kind: str
    device: str
    headline: str

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """What must be unchanged for a result to stay fresh."""
        return (self.name, self.version, self.kind, self.device)


class ReasonRecord(BaseModel):
    """A `Reason`, as stored."""

    code: str
    message: str
    subject: str = ""

    @classmethod
    def of(cls, reason: Reason) -> ReasonRecord:
        """From the comparator's reason."""
        return cls(code=reason.code, message=reason.message, subject=reason.subject)


class StageResult(BaseModel):
    """One stage's verdict with its evidence. `inputs` maps a path to its sha256; `metrics` is the stage's own model."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA_VERSION
    stage: int
    verdict: Verdict
    reasons: list[ReasonRecord] = Field(default_factory=list)
    metrics: dict[str, Any] = Field(default_factory=dict)
    blind_spots: list[str] = Field(default_factory=list)
    inputs: dict[str, str] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    backend: BackendStamp | None = None
    seeds: list[int] = Field(default_factory=list)
    forced: bool = False
    command: list[str] = Field(default_factory=list)
    started: str = ""
    seconds: float = 0.0
    tool_version: str = ""

    def save(self, path: Path) -> Path:
        """Write the result atomically."""
        return write_json(path, self)


def load_result(path: Path) -> StageResult:
    """Read a stage result.

    Raises:
        EquiportError: missing, no JSON, or not of this schema (the field is named).
    """
    raw = read_json(path, remedy="Run the stage again.")
    try:
        return StageResult.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        raise EquiportError(
            f"is no stage result: {first['msg']}",
            where=path,
            field=".".join(str(part) for part in first["loc"]),
            remedy="Run the stage again.",
        ) from None
