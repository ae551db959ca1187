"""Floats that survive JSON: NaN and infinity as strings, which strict readers accept and pydantic reads back."""

from __future__ import annotations

from math import isfinite
from typing import Annotated

from pydantic import BaseModel, ConfigDict, PlainSerializer


def _json_value(value: float) -> float | str:
    if isfinite(value):
        return value
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


#: A float field of a record.
Number = Annotated[float, PlainSerializer(_json_value, return_type=float | str, when_used="json")]


class Frozen(BaseModel):
    """Base of this package's records: frozen and closed. Their float fields are `Number`s."""

    model_config = ConfigDict(frozen=True, extra="forbid")
