"""Change points along a series of excesses: spikes that return to the baseline, steps that persist (seed 003)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Pattern(str, Enum):
    """How divergence runs along the layers."""

    STEP = "step"
    SPIKE = "spike"


@dataclass(frozen=True)
class ChangePoint:
    """A run of bad values from `start` to `end` (inclusive), and its largest value."""

    start: int
    end: int
    pattern: Pattern
    peak: float


def change_points(values: Sequence[float], limit: float = 1.0) -> list[ChangePoint]:
    """Runs of values above `limit`, steps first and earliest first.

    A run that lasts to the end of the series is a step (in a series of one value too); any other is a spike. NaN counts
    as bad.
    """
    runs: list[tuple[int, int]] = []
    for index, value in enumerate(values):
        if value <= limit:
            continue
        if runs and runs[-1][1] == index - 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    points = [
        ChangePoint(
            start,
            end,
            Pattern.STEP if end == len(values) - 1 else Pattern.SPIKE,
            _peak(values[start : end + 1]),
        )
        for start, end in runs
    ]
    return sorted(points, key=lambda point: (point.pattern is not Pattern.STEP, point.start))


def _peak(values: Sequence[float]) -> float:
    return float("nan") if any(value != value for value in values) else max(values)
