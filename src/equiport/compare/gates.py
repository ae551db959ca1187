"""Gates on single comparisons: integrity, exact mode, fp32, one bf16 draw, the three-way gate of vLLM-Neuron."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, sqrt

from equiport.compare.comparison import Comparison
from equiport.compare.measure import NOMINAL_BF16
from equiport.compare.reasons import ReasonCode, reason
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Reason, Verdict, combine

#: Elements below which the baseline's norm may be near 0 by chance.
_FEW = 64


@dataclass(frozen=True)
class Figure:
    """One number behind a verdict and the limit it was held against (None: shown only)."""

    name: str
    value: float
    limit: float | None = None


@dataclass(frozen=True)
class GateResult:
    """What one gate says. `reasons` explain anything but PASS; `notes` and `blind_spots` leave the verdict."""

    gate: str
    verdict: Verdict
    reasons: tuple[Reason, ...] = ()
    figures: tuple[Figure, ...] = ()
    notes: tuple[Reason, ...] = ()
    blind_spots: tuple[Reason, ...] = ()


def join(gate: str, results: Iterable[GateResult]) -> GateResult:
    """One result out of several: the worst verdict, everything they say. No results are NOT RUN."""
    parts = list(results)
    verdict = combine(part.verdict for part in parts)
    reasons = tuple(item for part in parts for item in part.reasons)
    if not parts:
        reasons = (reason(ReasonCode.NO_COMPARISON, "nothing was compared"),)
    return GateResult(
        gate,
        verdict,
        reasons,
        tuple(item for part in parts for item in part.figures),
        tuple(dict.fromkeys(item for part in parts for item in part.notes)),
        tuple(dict.fromkeys(item for part in parts for item in part.blind_spots)),
    )


def integrity_gate(comparison: Comparison, thresholds: Thresholds) -> GateResult:
    """Whether the comparison can stand for anything at all."""
    c, name = comparison, comparison.name
    failed: list[Reason] = []
    unclear: list[Reason] = []
    if c.same_memory:
        pairs = ", ".join(c.same_memory)
        failed.append(reason(ReasonCode.SAME_TENSOR, f"one and the same memory was passed twice: {pairs}", name))
    if c.set_aside.mismatched:
        s = c.set_aside
        message = (
            f"NaN, Inf or mask fills differ from ref_fp32 at {s.mismatched_target} places of the target, "
            f"{s.mismatched_baseline} of the baseline, {s.mismatched_fp32} of target_fp32"
        )
        failed.append(reason(ReasonCode.NAN_MASK, message, name))
    if c.elements < 1:
        failed.append(reason(ReasonCode.EMPTY, f"no finite element in shape {list(c.shape)}", name))
    elif c.reference_varies and not c.target_varies:
        failed.append(reason(ReasonCode.DEGENERATE_TARGET, "the target is constant, the reference is not", name))
    elif not c.reference_varies and c.elements > 1:
        unclear.append(reason(ReasonCode.DEGENERATE_REFERENCE, "a constant reference cannot show a fault", name))
    if c.elements and c.mode == "ratio":
        if c.method == "3-tensor" and not c.ref_fp32_beyond_bf16 and c.ref_bf16_beyond_bf16:
            failed.append(
                reason(
                    ReasonCode.REFERENCES_SWAPPED,
                    "ref_fp32 holds bf16 values only and ref_bf16 does not: they are swapped",
                    name,
                )
            )
        if not c.noise <= thresholds.baseline_noise:
            unclear.append(
                reason(
                    ReasonCode.BASELINE_NOISE,
                    f"the baseline is {c.noise:.2g} of ‖ref_fp32‖ away: its own error hides any fault",
                    name,
                )
            )
    verdict = Verdict.FAIL if failed else Verdict.INCONCLUSIVE if unclear else Verdict.PASS
    return GateResult("integrity", verdict, tuple(failed + unclear))


def exact_gate(comparison: Comparison) -> GateResult:
    """Exact mode: the target equals ref_bf16 bit for bit, or as closely as the reduction order allows."""
    found, name = comparison.exactness, comparison.name
    if comparison.mode != "exact" or found is None:
        return GateResult(
            "exact", Verdict.NOT_RUN, (reason(ReasonCode.NO_COMPARISON, "the baseline is not exact", name),)
        )
    figures = (Figure("unequal", found.unequal, 0), Figure("max_ulps", found.max_ulps))
    if comparison.elements < 1:
        return GateResult("exact", Verdict.FAIL, (reason(ReasonCode.EMPTY, "nothing was compared", name),), figures)
    if found.unequal == 0:
        note = reason(ReasonCode.EXACT_EQUAL, "exact baseline, equal to it bit for bit", name)
    elif found.beyond_rounding == 0:
        note = reason(ReasonCode.EXACT_ROUNDING, "exact baseline, equal to it up to fp32 rounding", name)
    elif found.beyond_ulp == 0 and found.reorder:
        note = reason(ReasonCode.EXACT_ULP, "exact baseline, equal to it within one bf16 ulp", name)
    elif comparison.integers and comparison.baseline_error > 0:
        message = f"{found.unequal} integers differ from ref_bf16, which differs from ref_fp32 itself"
        return GateResult("exact", Verdict.INCONCLUSIVE, (reason(ReasonCode.INTEGER_NOISE, message, name),), figures)
    else:
        message = (
            f"the baseline is exact, but {found.unequal} of {comparison.elements} elements of the target differ "
            f"(by up to {found.max_ulps:.3g} bf16 ulps)"
        )
        return GateResult("exact", Verdict.FAIL, (reason(ReasonCode.EXACT_MISMATCH, message, name),), figures)
    return GateResult("exact", Verdict.PASS, (), figures, (note,))


def fp32_gate(comparison: Comparison, thresholds: Thresholds) -> GateResult:
    """R32 pooled and on the worst slice; NOT RUN without target_fp32, which is a blind spot."""
    c = comparison
    if c.r32 is None:
        missing = reason(ReasonCode.NO_FP32_EVIDENCE, "no fp32 evidence", c.name)
        return GateResult("fp32", Verdict.NOT_RUN, (missing,), blind_spots=(missing,))
    failed: list[Reason] = []
    figures = [Figure("r32", c.r32, thresholds.r32_pooled)]
    if not c.r32 <= thresholds.r32_pooled:
        message = f"R32 = {c.r32:.3g} > {thresholds.r32_pooled:g}"
        failed.append(reason(ReasonCode.R32_POOLED, message, c.name))
    worst = c.r32_slice
    if worst is not None:
        figures.append(Figure("r32_slice", worst.ratio, thresholds.r32_slice))
        if not worst.ratio <= thresholds.r32_slice:
            message = f"R32 of {worst.label} = {worst.ratio:.3g} > {thresholds.r32_slice:g}"
            failed.append(reason(ReasonCode.R32_SLICE, message, c.name))
    if c.elements < 1:
        failed.append(reason(ReasonCode.EMPTY, "nothing was compared", c.name))
    # A few elements may have a baseline near 0 by chance; fp32 rounding over it is no fault, and no evidence either.
    small = 4 * thresholds.r32_pooled * NOMINAL_BF16 * c.ref_norm
    if failed and 0 < c.elements < _FEW and c.target_fp32_error is not None and c.target_fp32_error <= small:
        message = f"R32 = {c.r32:.3g}, over the baseline of {c.elements} elements only"
        unclear = reason(ReasonCode.TOO_FEW_ELEMENTS, message, c.name)
        return GateResult("fp32", Verdict.INCONCLUSIVE, (unclear,), tuple(figures))
    return GateResult("fp32", Verdict.FAIL if failed else Verdict.PASS, tuple(failed), tuple(figures))


def outlier_reasons(comparison: Comparison, thresholds: Thresholds) -> tuple[Reason, ...]:
    """Single elements or bf16 slices far outside what correct code reaches."""
    c, found = comparison, []
    if not c.linf_ratio <= thresholds.linf_ratio and not tiny_and_within_noise(c):
        found.append(
            reason(ReasonCode.LINF, f"L∞ ratio {c.linf_ratio:.3g} > {thresholds.linf_ratio:g}: one element off", c.name)
        )
    worst = c.r_slice
    if worst is not None and not worst.ratio <= thresholds.r_slice:
        found.append(
            reason(ReasonCode.R_SLICE, f"R of {worst.label} = {worst.ratio:.3g} > {thresholds.r_slice:g}", c.name)
        )
    return tuple(found)


def precision_notes(comparison: Comparison, thresholds: Thresholds) -> tuple[Reason, ...]:
    """Over-precision (R clearly below 1) and R = 0, and where the upcast shows. Notes, never failures."""
    c = comparison
    if c.method != "3-tensor" or c.mode != "ratio" or not c.r_ratio < thresholds.over_precision:
        return ()
    where = c.labels.component or c.name or "the component"
    if c.target_beyond_bf16:
        how = f"the output of {where} is kept in fp32"
    else:
        how = f"{where} computes in more than bf16 inside"
    if c.r_ratio == 0:
        message = f"the target equals ref_fp32: {how}, or it is the reference itself (provenance decides)"
        return (reason(ReasonCode.R_ZERO, message, c.name),)
    return (reason(ReasonCode.OVER_PRECISION, f"R = {c.r_ratio:.3g}: {how}", c.name),)


def luck_limit(elements: int, limit: float) -> float:
    """R below which a tensor of so few elements may be correct by chance: the ratio of two errors of n elements."""
    return max(limit, exp(min(4.0 / sqrt(max(elements, 1)), 50.0)))


def tiny_and_within_noise(comparison: Comparison) -> bool:
    """True for a few elements whose error is what bf16 makes: a baseline near 0 by chance makes any ratio large.

    It turns a FAIL into INCONCLUSIVE, never into a PASS.
    """
    return comparison.elements < _FEW and comparison.target_error <= 4 * NOMINAL_BF16 * comparison.ref_norm


def single_gate(comparison: Comparison, thresholds: Thresholds, tolerance_ratio: float | None = None) -> GateResult:
    """One bf16 draw against the documented 1.2 (`tolerance_ratio`), its outliers, and nothing else."""
    c = comparison
    limit = thresholds.r_single if tolerance_ratio is None else tolerance_ratio
    figures = [Figure("r_ratio", c.r_ratio, limit), Figure("linf_ratio", c.linf_ratio, thresholds.linf_ratio)]
    if c.r_slice is not None:
        figures.append(Figure("r_slice", c.r_slice.ratio, thresholds.r_slice))
    reasons = list(outlier_reasons(c, thresholds))
    verdict = Verdict.FAIL if reasons else Verdict.PASS
    if not c.r_ratio < limit:
        lucky = c.r_ratio < luck_limit(c.elements, limit) or tiny_and_within_noise(c)
        code = ReasonCode.TOO_FEW_ELEMENTS if lucky else ReasonCode.R_SINGLE
        tail = f", on {c.elements} elements only" if lucky else ""
        reasons.append(reason(code, f"R = {c.r_ratio:.4g} >= {limit:g}{tail}", c.name))
        verdict = combine([verdict, Verdict.INCONCLUSIVE if lucky else Verdict.FAIL])
    return GateResult("bf16", verdict, tuple(reasons), tuple(figures), precision_notes(c, thresholds))


def judge(comparison: Comparison, thresholds: Thresholds, tolerance_ratio: float | None = None) -> GateResult:
    """The whole verdict on one comparison: integrity, exact mode or one bf16 draw, and the fp32 gate where it has it.

    Without target_fp32 it passes by its own gates, with the blind spot NO_FP32_EVIDENCE.
    """
    integrity = integrity_gate(comparison, thresholds)
    own = exact_gate(comparison) if comparison.mode == "exact" else single_gate(comparison, thresholds, tolerance_ratio)
    fp32 = fp32_gate(comparison, thresholds)
    parts = [integrity, own] + ([fp32] if fp32.verdict is not Verdict.NOT_RUN else [])
    joined = join("comparison", parts)
    return GateResult(
        joined.gate, joined.verdict, joined.reasons, joined.figures, joined.notes, joined.blind_spots + fp32.blind_spots
    )


def three_way_gate(comparison: Comparison, thresholds: Thresholds) -> GateResult:
    """vLLM-Neuron's gate on one comparison of pooled prompts: (BC or σ) and L∞ ratio and L2 ratio."""
    c = comparison
    integrity = integrity_gate(c, thresholds)
    failed: list[Reason] = []
    if not (c.bc >= thresholds.bc or c.sigma_ratio <= thresholds.sigma):
        message = f"BC = {c.bc:.4f} < {thresholds.bc:g} and σ ratio = {c.sigma_ratio:.3g} > {thresholds.sigma:g}"
        failed.append(reason(ReasonCode.BC_SIGMA, message, c.name))
    if not c.linf_ratio < thresholds.stack_linf_ratio:
        message = f"L∞ ratio {c.linf_ratio:.3g} >= {thresholds.stack_linf_ratio:g}"
        failed.append(reason(ReasonCode.LINF_RATIO, message, c.name))
    if not c.l2_ratio < thresholds.stack_l2_ratio:
        message = f"L2 ratio {c.l2_ratio:.3g} >= {thresholds.stack_l2_ratio:g}"
        failed.append(reason(ReasonCode.L2_RATIO, message, c.name))
    figures = (
        Figure("bc", c.bc, thresholds.bc),
        Figure("sigma_ratio", c.sigma_ratio, thresholds.sigma),
        Figure("linf_ratio", c.linf_ratio, thresholds.stack_linf_ratio),
        Figure("l2_ratio", c.l2_ratio, thresholds.stack_l2_ratio),
    )
    own = GateResult("three-way", Verdict.FAIL if failed else Verdict.PASS, tuple(failed), figures)
    return join("three-way", [integrity, own])
