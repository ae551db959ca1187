"""The streaming pass over the tensors: sums, extremes, slices and error histograms, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor

from equiport.compare.comparison import Exactness
from equiport.compare.slices import SliceSums
from equiport.compare.streams import CHUNK_ELEMENTS, Index, blocks, classes, load, other_fills

#: Bins of the two error histograms behind the Bhattacharyya coefficient.
BINS = 100
FP32_EPS = 2.0**-23
#: RMS of bf16's rounding error relative to the value: half an ulp, uniform.
NOMINAL_BF16 = 2.0**-9 / sqrt(3.0)
#: A baseline whose relative error is below this is exact up to fp32 rounding.
EXACT_RELATIVE = 4 * FP32_EPS
#: An error this large relative to its element is visible in bf16: no fp32 rounding.
_VISIBLE = 2.0**-14
#: Share of elements with visible errors (cancellation near zero) that an exact baseline may have.
_VISIBLE_SHARE = 0.01
#: Elements this large are mask fills; they would make an absolute rounding slack meaningless.
_SLACK_MAX = 1e4

BlockReader = Callable[[Index, Tensor], Tensor]


class Baseline(Protocol):
    """One draw of the baseline; `open` gives a reader that is called with (index, ref block) in row-major order."""

    def open(self) -> BlockReader: ...


@dataclass(frozen=True)
class TensorBaseline:
    """A baseline that is a tensor."""

    tensor: Tensor

    def open(self) -> BlockReader:
        return lambda index, _ref: load(self.tensor, index)


@dataclass
class Sources:
    """The tensors of one comparison, all of one shape. `anchor` is what an exact target has to equal."""

    ref: Tensor
    baselines: Sequence[Baseline]
    target: Tensor
    target_fp32: Tensor | None
    anchor: Tensor
    integers: bool


@dataclass
class Block:
    """One float64 block; elements in `aside` are 0 in every tensor."""

    index: Index
    ref: Tensor
    bases: list[Tensor]
    target: Tensor
    fp32: Tensor | None
    aside: Tensor | None
    codes: dict[str, Tensor] = field(default_factory=dict)


def walk(sources: Sources, chunk: int) -> Iterator[Block]:
    """The aligned blocks, with elements that are NaN, Inf or fill anywhere set aside."""
    readers = [baseline.open() for baseline in sources.baselines]
    for index in blocks(tuple(sources.ref.shape), chunk):
        ref = load(sources.ref, index)
        bases = [read(index, ref) for read in readers]
        target = load(sources.target, index)
        fp32 = None if sources.target_fp32 is None else load(sources.target_fp32, index)
        named = {"ref": ref, "target": target, **{f"base{i}": base for i, base in enumerate(bases)}}
        if fp32 is not None:
            named["fp32"] = fp32
        # integers have no fills: every one of them is a number
        read = {} if sources.integers else {role: classes(values) for role, values in named.items()}
        codes = {role: other_fills(code, named[role], ref) for role, code in read.items() if code is not None}
        if not codes:
            yield Block(index, ref, bases, target, fp32, None)
            continue
        zeros = torch.zeros(ref.shape, dtype=torch.uint8)
        aside = torch.zeros(ref.shape, dtype=torch.bool)
        for code in codes.values():
            aside |= code != 0
        yield Block(
            index,
            ref.masked_fill(aside, 0.0),
            [base.masked_fill(aside, 0.0) for base in bases],
            target.masked_fill(aside, 0.0),
            None if fp32 is None else fp32.masked_fill(aside, 0.0),
            aside,
            {role: codes.get(role, zeros) for role in named},
        )


@dataclass
class _Range:
    """Extremes of the kept values and the classes met: does a tensor vary at all?"""

    low: float = torch.inf
    high: float = -torch.inf
    classes: set[int] = field(default_factory=set)

    def add(self, values: Tensor, aside: Tensor | None, codes: Tensor | None) -> None:
        kept = values if aside is None else values[~aside]
        if kept.numel():
            low, high = kept.aminmax()
            self.low, self.high = min(self.low, float(low)), max(self.high, float(high))
        self.classes |= {0} if codes is None else set(codes.unique().tolist())

    @property
    def varies(self) -> bool:
        return self.low < self.high or len(self.classes) > 1


class Measured:
    """Everything one streaming pass knows; scalars are Python floats."""

    def __init__(self, sources: Sources, chunk: int = CHUNK_ELEMENTS) -> None:
        self.sources, self.chunk = sources, chunk
        self.draws = len(sources.baselines)
        self.elements = 0
        self.ref_sq = self.target_sq = self.dot = self.ref_sum = self.target_sum = 0.0
        self.base_sq = self.err_sq = self.err32_sq = self.err_sum = 0.0
        self.base_max = self.err_max = self.ref_max = 0.0
        self.error_low, self.error_high = torch.inf, 0.0
        self.visible = 0
        self.class_counts = torch.zeros(7, dtype=torch.int64)
        self.mismatched = {"target": 0, "base": 0, "fp32": 0}
        self.beyond_bf16 = {"ref": 0, "base": 0, "target": 0}
        self.ref_range, self.target_range = _Range(), _Range()
        quantities = ("ref", "base", "err") + (("err32",) if sources.target_fp32 is not None else ())
        self.slices = SliceSums(tuple(sources.ref.shape), quantities)
        for block in walk(sources, chunk):
            self._add(block)

    def _add(self, block: Block) -> None:
        ref, target, aside = block.ref, block.target, block.aside
        kept = ref.numel() - (0 if aside is None else int(aside.sum()))
        self.elements += kept
        self._count_classes(block)
        error = target - ref
        squares = {"ref": ref.square(), "err": error.square(), "base": torch.zeros_like(ref)}
        for base in block.bases:
            gap = base - ref
            squares["base"] += gap.square() / self.draws
            self.base_max = _nan_max(self.base_max, gap.abs().amax())
            self._bounds(gap, aside)
            self.visible += int((gap.abs() > _VISIBLE * ref.abs()).sum())
        if block.fp32 is not None:
            squares["err32"] = (block.fp32 - ref).square()
            self.err32_sq += float(squares["err32"].sum())
        self._bounds(error, aside)
        self.err_max = _nan_max(self.err_max, error.abs().amax())
        self.ref_max = _nan_max(self.ref_max, ref.abs().amax())
        self.ref_sq += float(squares["ref"].sum())
        self.err_sq += float(squares["err"].sum())
        self.base_sq += float(squares["base"].sum())
        self.target_sq += float(target.square().sum())
        self.dot += float((target * ref).sum())
        self.ref_sum += float(ref.sum())
        self.target_sum += float(target.sum())
        self.err_sum += float(error.sum())
        for role, values in (("ref", ref), ("base", block.bases[0]), ("target", target)):
            self.beyond_bf16[role] += int((values.to(torch.bfloat16).to(torch.float64) != values).sum())
        self.ref_range.add(ref, aside, block.codes.get("ref"))
        self.target_range.add(target, aside, block.codes.get("target"))
        self.slices.add(block.index, squares, aside)

    def _bounds(self, error: Tensor, aside: Tensor | None) -> None:
        values = error.abs() if aside is None else error.abs()[~aside]
        if values.numel():
            low, high = values.aminmax()
            self.error_low = _nan_min(self.error_low, low)
            self.error_high = _nan_max(self.error_high, high)

    def _count_classes(self, block: Block) -> None:
        if block.aside is None:
            return
        ref = block.codes["ref"]
        self.class_counts += torch.bincount(ref.flatten().to(torch.int64), minlength=7)
        self.mismatched["target"] += int((block.codes["target"] != ref).sum())
        for draw in range(self.draws):
            self.mismatched["base"] += int((block.codes[f"base{draw}"] != ref).sum())
        if "fp32" in block.codes:
            self.mismatched["fp32"] += int((block.codes["fp32"] != ref).sum())

    @property
    def exact(self) -> bool:
        """True when the baseline error is 0 up to fp32 rounding, or the tensors hold integers."""
        if self.sources.integers:
            return True
        if not self.elements:
            return self.base_sq == 0
        small = sqrt(self.base_sq) <= EXACT_RELATIVE * sqrt(self.ref_sq)
        return small and self.visible <= _VISIBLE_SHARE * self.elements * self.draws

    def second_pass(self) -> tuple[float, Exactness | None]:
        """The Bhattacharyya coefficient of |target error| and |baseline error|, and exactness where the mode asks."""
        histograms = torch.zeros(2, BINS, dtype=torch.float64)
        spread = self.error_high > self.error_low and self.error_high < torch.inf
        exact, counts = self.exact, _ExactCounts(self)
        if not (spread or exact):
            return (1.0 if self.elements and self.error_high == self.error_low else torch.nan), None
        for block in walk(self.sources, self.chunk):
            if spread:
                for row, other in [(0, block.target), *((1, base) for base in block.bases)]:
                    error = (other - block.ref).abs()
                    kept = error if block.aside is None else error[~block.aside]
                    histograms[row] += torch.histc(kept, BINS, self.error_low, self.error_high)
            if exact:
                counts.add(block)
        coefficient = 1.0
        if spread:
            shares = histograms / (histograms.sum(dim=1, keepdim=True) + 1e-10)
            coefficient = float((shares[0] * shares[1]).sqrt().sum().clamp(0.0, 1.0))
        return coefficient, counts.result() if exact else None


class _ExactCounts:
    """Counts how far an exact target is from its anchor (ref_bf16)."""

    def __init__(self, measured: Measured) -> None:
        self.sources = measured.sources
        self.unequal = self.beyond_rounding = self.beyond_ulp = 0
        self.max_ulps = 0.0
        self.full_precision = measured.beyond_bf16["base"] > 0
        self.computed = measured.base_sq > 0
        rms = sqrt(measured.ref_sq / measured.elements) if measured.elements else 0.0
        # Sums of fp32 products cancel: near zero the rounding is that of the terms, not of the result. A value that
        # bf16 can hold was not computed in fp32, and next to mask fills no absolute slack makes sense.
        computed_in_fp32 = self.full_precision and measured.ref_max < _SLACK_MAX
        self.slack = 2 * EXACT_RELATIVE * rms if computed_in_fp32 else 0.0

    def add(self, block: Block) -> None:
        anchor = load(self.sources.anchor, block.index)
        target = block.target
        if block.aside is not None:
            anchor = anchor.masked_fill(block.aside, 0.0)
        if self.sources.integers:  # int64 beyond 2**53 is not exact in float64
            differs = self.sources.anchor[block.index].to("cpu", torch.int64) != self.sources.target[block.index].to(
                "cpu", torch.int64
            )
        else:
            differs = anchor != target
        gap = (target - anchor).abs()
        ulp = bf16_ulp(anchor)
        self.unequal += int(differs.sum())
        self.beyond_rounding += int((differs & ~(gap <= EXACT_RELATIVE * anchor.abs() + self.slack)).sum())
        self.beyond_ulp += int((differs & ~(gap <= ulp)).sum())
        self.max_ulps = _nan_max(self.max_ulps, (gap / ulp).amax())

    def result(self) -> Exactness:
        if self.sources.integers:
            self.beyond_rounding = self.beyond_ulp = self.unequal
        return Exactness(
            unequal=self.unequal,
            beyond_rounding=self.beyond_rounding,
            beyond_ulp=self.beyond_ulp,
            max_ulps=self.max_ulps,
            reorder=self.computed and not self.full_precision and not self.sources.integers,
        )


def bf16_ulp(values: Tensor) -> Tensor:
    """The distance between neighbouring bf16 numbers at `values` (float64)."""
    _, exponent = torch.frexp(values)
    exponent = torch.where(values == 0, torch.full_like(exponent, -125), exponent).clamp(min=-125)
    return torch.ldexp(torch.ones_like(values), exponent - 8)


def _nan_max(current: float, value: Tensor) -> float:
    number = float(value)
    return number if number != number or number > current else current


def _nan_min(current: float, value: Tensor) -> float:
    number = float(value)
    return number if number != number or number < current else current
