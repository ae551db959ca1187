"""Thresholds of the gates on embeddings, and their file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from equiport.compare.thresholds import read_limits

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


class EmbeddingThresholds(BaseModel):
    """Limits of the gates on embeddings. A distance is 1 - cosine; `<`, `>` as named in each comment.

    Source: seed 003 for 0.999, "far lower" and 1.000000; the others say when those figures can mean something.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    min_prompts: _Count = 8
    # a prompt against the reference
    cosine: _Share = 0.999  # a bf16 target: cosine with ref_bf16 >
    distance_fp32: _Positive = 1e-6  # an fp32 target: distance from ref_fp32 <=
    r_pooled: _Positive = 2.0  # a bf16 target: its error / that of ref_bf16, both from ref_fp32 <=, else inconclusive
    r32_pooled: _Positive = 1e-3  # an fp32 target: the same ratio <=, else inconclusive
    noise_factor: _Positive = 4.0  # what is within this many times the reference's own noise may be rounding
    norm: _Positive = 0.01  # |norm / reference's norm - 1| <=, or noise_factor times the reference's own, up to
    norm_most: _Positive = 0.05
    # prompts against one another
    cross: _Positive = 0.02  # |cosine of two prompts - the reference's| <=, or noise_factor times the reference's own
    spread: _Positive = 0.1  # |spread / reference's spread - 1| <=, or noise_factor times the reference's own
    error_share: _Share = 0.25  # error energy / the reference's spread <=
    noise_share: _Share = 0.05  # bf16 error energy / the reference's spread <=, else the reference shows nothing
    reference_cross: _Share = 0.999  # mean cosine of the reference's unrelated prompts <, else it shows nothing
    # a prompt alone against the same one in a batch
    batch: _Positive = 1e-6  # bf16: distance <=, or noise_factor times the reference's own batch noise, up to
    batch_most: _Positive = 1e-4
    batch_fp32: _Positive = 1e-9  # fp32: distance <=, or as above, up to
    batch_fp32_most: _Positive = 1e-6

    def save(self, path: str | Path) -> None:
        """Write the thresholds as JSON."""
        Path(path).write_text(json.dumps(self.model_dump(), indent=2) + "\n", encoding="utf-8")


def load_embedding_thresholds(path: str | Path) -> EmbeddingThresholds:
    """Read a thresholds file; keys left out have their shipped value.

    Raises:
        EquiportError: the file is missing, no JSON object, or has an unknown key or a bad value (named).
    """
    return read_limits(path, EmbeddingThresholds, 'Write {"cosine": 0.9995}, say; keys left out keep their value.')
