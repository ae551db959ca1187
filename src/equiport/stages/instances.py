"""Figures of each component at each layer, over seeds: what localisation reads along the layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from equiport.compare.comparison import Comparison
from equiport.compare.gates_components import geometric_mean
from equiport.compare.records import Record
from equiport.compare.thresholds import Thresholds


class InstanceRow(BaseModel):
    """One component at one layer, in one phase, under one fixture; R is the geometric mean over seeds.

    `excess`: the largest of R, R32 and the R32 slice, each over its limit; above 1 the instance is bad.
    """

    component: str
    component_type: str
    layer: int | None
    fixture: str
    phase: str
    r_ratio: float | None
    r32: float | None
    r32_slice: float | None
    excess: float


def instance_rows(records: Iterable[Record], thresholds: Thresholds) -> list[InstanceRow]:
    """Rows in the records' order. A record whose tensors could not be compared has an infinite excess."""
    groups: dict[tuple[str, str, int | None, str, str], list[Record]] = defaultdict(list)
    for record in records:
        labels = record.labels
        component = labels.component or record.name
        groups[(component, labels.component_type, labels.layer, labels.fixture, labels.phase)].append(record)
    return [_row(key, group, thresholds) for key, group in groups.items()]


def _row(key: tuple[str, str, int | None, str, str], records: Sequence[Record], thresholds: Thresholds) -> InstanceRow:
    found = [record.comparison for record in records if record.comparison is not None]
    component, kind, layer, fixture, phase = key
    ratios = [item.r_ratio for item in found if item.mode == "ratio"]
    r_ratio = geometric_mean(ratios, thresholds.r_floor) if ratios else None
    r32 = max((item.r32 for item in found if item.r32 is not None), default=None)
    r32_slice = max((item.r32_slice.ratio for item in found if item.r32_slice), default=None)
    limits = ((r_ratio, thresholds.r_single), (r32, thresholds.r32_pooled), (r32_slice, thresholds.r32_slice))
    excess = max((value / limit for value, limit in limits if value is not None), default=0.0)
    if len(found) < len(records) or any(not _exact(item) for item in found):
        excess = float("inf")
    return InstanceRow(
        component=component,
        component_type=kind,
        layer=layer,
        fixture=fixture,
        phase=phase,
        r_ratio=r_ratio,
        r32=r32,
        r32_slice=r32_slice,
        excess=excess,
    )


def _exact(comparison: Comparison) -> bool:
    """In exact mode: equal up to rounding."""
    return comparison.mode != "exact" or comparison.exactness is None or not comparison.exactness.beyond_ulp
