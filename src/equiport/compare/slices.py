"""Errors per slice along each axis (channel, head, position, expert), summed while streaming."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf

import torch
from torch import Tensor

from equiport.compare.numbers import Frozen, Number
from equiport.compare.streams import Index

#: Longest table of sums per axis. A longer axis is summed in groups of neighbours, so memory stays bounded.
MAX_SLICES = 1 << 18


class WorstSlice(Frozen):
    """The worst slice of one axis: `ratio` of indices `start:stop` on `axis`; `elements` compared in it.

    `floored` says that the slice's own baseline error was below the floor (see `slice_ratios`).
    """

    axis: int
    start: int
    stop: int
    ratio: Number
    elements: int
    floored: bool

    @property
    def label(self) -> str:
        """For people: `axis 2, index 7`."""
        where = f"index {self.start}" if self.stop == self.start + 1 else f"indices {self.start}:{self.stop}"
        return f"axis {self.axis}, {where}"


@dataclass
class AxisSums:
    """Sums along one axis, one entry for each slice (or group of neighbouring slices)."""

    axis: int
    length: int
    group: int
    per_slice: int
    sums: dict[str, Tensor]
    set_aside: Tensor

    @property
    def counts(self) -> Tensor:
        """Elements compared in each slice."""
        whole = torch.full_like(self.set_aside, float(self.per_slice * self.group))
        whole[-1] = self.per_slice * (self.length - self.group * (len(whole) - 1))
        return whole - self.set_aside


class SliceSums:
    """Sums of squares per slice for every axis longer than one; memory bounded by MAX_SLICES per axis."""

    def __init__(self, shape: tuple[int, ...], quantities: tuple[str, ...], max_slices: int = MAX_SLICES) -> None:
        numel = torch.Size(shape).numel()
        self.axes: list[AxisSums] = []
        for axis, length in enumerate(shape):
            if length < 2 or numel == 0:
                continue
            group = ceil(length / max_slices)
            size = ceil(length / group)
            sums = {name: torch.zeros(size, dtype=torch.float64) for name in quantities}
            zeros = torch.zeros(size, dtype=torch.float64)
            self.axes.append(AxisSums(axis, length, group, numel // length, sums, zeros))

    def add(self, index: Index, squares: Mapping[str, Tensor], set_aside: Tensor | None) -> None:
        """Add one block: `squares` by quantity, `set_aside` a boolean mask of elements that do not count."""
        for table in self.axes:
            others = tuple(axis for axis in range(len(index)) if axis != table.axis)
            where = torch.arange(index[table.axis].start, index[table.axis].stop) // table.group
            for name, values in squares.items():
                table.sums[name].index_add_(0, where, values.sum(dim=others) if others else values)
            if set_aside is not None:
                gone = set_aside.to(torch.float64)
                table.set_aside.index_add_(0, where, gone.sum(dim=others) if others else gone)

    def worst(self, numerator: str, baseline: str, rms: float) -> tuple[WorstSlice, ...]:
        """The worst slice of each axis; `rms` is the pooled per-element root mean square of the baseline."""
        found = []
        for table in self.axes:
            ratios, floored = slice_ratios(table.sums[numerator], table.sums[baseline], table.counts, rms)
            if not len(ratios):
                continue
            at = int(ratios.argmax())  # a NaN counts as the largest, so it is seen
            start = at * table.group
            found.append(
                WorstSlice(
                    axis=table.axis,
                    start=start,
                    stop=min(start + table.group, table.length),
                    ratio=float(ratios[at]),
                    elements=int(table.counts[at]),
                    floored=bool(floored[at]),
                )
            )
        return tuple(found)


def slice_ratios(errors: Tensor, baselines: Tensor, counts: Tensor, rms: float) -> tuple[Tensor, Tensor]:
    """Ratio of norms for each slice, with a floor under the denominator; and where the floor was used.

    `errors`, `baselines`: sums of squares [slices]; `counts`: elements [slices]. The denominator is
    `max(‖baseline of the slice‖, f(n) · rms · √n)` with `f(n) = clamp(4/√n, 0.1, 1)`: a slice of few elements can have
    a tiny baseline error by luck (one element: always; 64 elements: hardly ever), and any slice can have an exact
    baseline (position 0 of a rotation). Such a slice is measured against the error that is usual in the tensor, so it
    does not cry wolf; a fault in it is still seen when it is as large as that gate's share of the usual error.
    """
    n = counts.clamp(min=1.0)
    own = baselines.sqrt()
    floor = (4.0 / n.sqrt()).clamp(0.1, 1.0) * rms * n.sqrt()
    below = own < floor
    ratios = safe_ratios(errors.sqrt(), torch.where(below, floor, own))
    return torch.where(counts > 0, ratios, torch.zeros_like(ratios)), below


def safe_ratios(numerators: Tensor, denominators: Tensor) -> Tensor:
    """Ratios where 0/0 is 0, x/0 is infinite and NaN stays NaN."""
    ratios = numerators / denominators
    return torch.where((numerators == 0) & (denominators == 0), torch.zeros_like(ratios), ratios)


def safe_ratio(numerator: float, denominator: float) -> float:
    """`safe_ratios` for two numbers; infinite over infinite is NaN."""
    if denominator == 0:
        return numerator if numerator != numerator else inf if numerator else 0.0
    return numerator / denominator
