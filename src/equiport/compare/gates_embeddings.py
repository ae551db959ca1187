"""The gates on embeddings: same direction, told apart alike, the same alone and in a batch."""

from __future__ import annotations

from equiport.compare.embedding_thresholds import EmbeddingThresholds
from equiport.compare.embeddings import EmbeddingComparison
from equiport.compare.gates import Figure, GateResult, join
from equiport.compare.reasons import ReasonCode, reason
from equiport.compare.verdict import Reason, Verdict

_FAULTS = {
    "shape": ReasonCode.SHAPE_MISMATCH,
    "finite": ReasonCode.NON_FINITE_METRIC,
    "zero": ReasonCode.DEGENERATE_TARGET,
}


def embedding_gate(found: EmbeddingComparison, limits: EmbeddingThresholds) -> GateResult:
    """All gates on one target. Vectors that cannot be compared FAIL, and nothing else is said."""
    if found.faults:
        said = tuple(reason(_FAULTS[kind], what, prompt) for kind, prompt, what in found.faults)
        return GateResult("embeddings", Verdict.FAIL, said)
    if not found.prompts:
        return join("embeddings", [])
    gates = [same_prompt_gate(found, limits), norm_gate(found, limits), cross_prompt_gate(found, limits)]
    gates.append(batch_gate(found, limits))
    return join("embeddings", gates)


def same_prompt_gate(found: EmbeddingComparison, limits: EmbeddingThresholds) -> GateResult:
    """Each prompt's cosine with the reference of the target's precision.

    A cosine that fails within `noise_factor` times the reference's own distance from fp32 is INCONCLUSIVE, and so is a
    target whose cosines hold while its pooled error is more than `r_pooled` (fp32: `r32_pooled`) times that of bf16.
    """
    fp32 = found.precision == "fp32"
    limit = limits.distance_fp32 if fp32 else 1.0 - limits.cosine
    failed, unclear = [], []
    for row in found.prompts:
        if row.distance < limit or (fp32 and row.distance <= limit):
            continue
        wanted = f"{1 - limit:.6f}" if fp32 else f"{limits.cosine:g}"
        message = f"cosine {row.cosine:.6f} with the reference, > {wanted} is needed"
        if not fp32 and row.distance <= limits.noise_factor * row.baseline:
            message += f"; the source's own bf16 reaches only {1 - row.baseline:.6f} with its fp32"
            unclear.append(reason(ReasonCode.BASELINE_NOISE, message, row.prompt))
        else:
            message += f"; the source's own bf16 and fp32: {1 - row.baseline:.6f}"
            failed.append(reason(ReasonCode.EMBEDDING_COSINE, message, row.prompt))
    ratio = found.r_pooled
    most = limits.r32_pooled if fp32 else limits.r_pooled
    if not failed and not unclear and ratio is not None and not ratio <= most:
        message = (
            f"cosines hold, but the error is {ratio:.3g} times that of the source's bf16 (> {most:g}): "
            f"rounding {'in fp32 ' if fp32 else ''}does not explain it"
        )
        unclear.append(reason(ReasonCode.EMBEDDING_NOISE, message))
    if len(found.prompts) < limits.min_prompts:
        message = f"{len(found.prompts)} prompts, {limits.min_prompts} are needed"
        unclear.append(reason(ReasonCode.TOO_FEW_PROMPTS, message))
    figures = [
        Figure("lowest cosine", min(row.cosine for row in found.prompts), 1 - limit),
        Figure("lowest cosine of ref_bf16 and ref_fp32", min(1 - row.baseline for row in found.prompts)),
    ]
    if ratio is not None:
        figures.append(Figure("pooled R32" if fp32 else "pooled R", ratio, most))
    return _result("same prompt", failed, unclear, tuple(figures))


def norm_gate(found: EmbeddingComparison, limits: EmbeddingThresholds) -> GateResult:
    """Lengths: a cosine does not see them, a dot product and a Euclidean distance do."""
    noise = limits.noise_factor * max(row.norm_baseline for row in found.prompts)
    limit = max(limits.norm, min(limits.norm_most, noise))
    ratios = [row.norm / row.norm_reference for row in found.prompts]
    worst = max(range(len(ratios)), key=lambda row: abs(ratios[row] - 1))
    failed = []
    if not abs(ratios[worst] - 1) <= limit:
        row = found.prompts[worst]
        lengths = [item.norm for item in found.prompts]
        theirs = [item.norm_reference for item in found.prompts]
        message = f"norm {row.norm:.4g}, the reference's is {row.norm_reference:.4g} (limit ±{100 * limit:.2g} %)"
        if _all_one(theirs) and not _all_one(lengths):
            message += ": it is not normalised, the reference is"
        elif _all_one(lengths) and not _all_one(theirs):
            message += ": it is normalised, the reference is not"
        failed.append(reason(ReasonCode.EMBEDDING_NORM, message, row.prompt))
    return _result("norms", failed, [], (Figure("norm ratio farthest from 1", ratios[worst], limit),))


def cross_prompt_gate(found: EmbeddingComparison, limits: EmbeddingThresholds) -> GateResult:
    """Unrelated prompts are as far apart as the reference has them: a target that says one vector for all is not.

    Judged against the reference's own spread, so that a model whose vectors all point one way does not fail. Where the
    reference itself does not tell its prompts apart, nothing can be shown: INCONCLUSIVE.
    """
    cross, factor = found.cross, limits.noise_factor
    if cross is None:
        few = reason(ReasonCode.TOO_FEW_PROMPTS, "one prompt cannot be told apart from others")
        return GateResult("cross prompt", Verdict.INCONCLUSIVE, (few,))
    failed, unclear = [], []
    own = f"{cross.reference_mean:.4f} on average"
    if not cross.reference_mean < limits.reference_cross:
        message = f"unrelated prompts have cosines of {own} in the reference: any vector passes for any other"
        unclear.append(reason(ReasonCode.REFERENCE_COLLAPSED, message))
    elif not cross.noise_share <= limits.noise_share or cross.confused_baseline:
        message = (
            f"the reference's bf16 error is {100 * cross.noise_share:.2g} % of its prompts' spread (cosines {own})"
        )
        unclear.append(reason(ReasonCode.REFERENCE_COLLAPSED, message))
    within = max(limits.spread, factor * abs(cross.spread_ratio_baseline - 1))
    confused = [row.prompt for number, row in enumerate(found.prompts) if row.nearest != number]
    means = f"cosines of unrelated prompts: {cross.target_mean:.4f} on average, the reference's {own}"
    spread = f"prompts are spread {cross.spread_ratio:.3g} times as wide as in the reference; {means}"
    if not cross.spread_ratio >= 1 / (1 + within):
        failed.append(reason(ReasonCode.COLLAPSED, spread))
    elif not cross.spread_ratio <= 1 + within:
        failed.append(reason(ReasonCode.CROSS_COSINE, spread))
    if confused and not cross.confused_baseline:
        message = f"is nearer to another prompt's reference than to its own ({len(confused)} prompts are)"
        failed.append(reason(ReasonCode.CONFUSED, message, confused[0]))
    elif not cross.error_share <= limits.error_share:
        message = f"the error is {100 * cross.error_share:.3g} % of the spread that tells the reference's prompts apart"
        failed.append(reason(ReasonCode.CONFUSED, message))
    limit = max(limits.cross, factor * cross.difference_baseline)
    if not cross.difference <= limit:
        message = f"a cosine of two prompts is off by {cross.difference:.3g} > {limit:.3g}; {means}"
        failed.append(reason(ReasonCode.CROSS_COSINE, message))
    figures = (
        Figure("mean cosine of unrelated prompts", cross.target_mean),
        Figure("mean cosine of unrelated prompts, reference", cross.reference_mean, limits.reference_cross),
        Figure("largest cosine of unrelated prompts", cross.target_max),
        Figure("largest cosine of unrelated prompts, reference", cross.reference_max),
        Figure("largest difference of such cosines", cross.difference, limit),
        Figure("spread / reference's spread", cross.spread_ratio, within),
        Figure("error energy / reference's spread", cross.error_share, limits.error_share),
        Figure("bf16 error energy / reference's spread", cross.noise_share, limits.noise_share),
    )
    return _result("cross prompt", failed, unclear, figures)


def batch_gate(found: EmbeddingComparison, limits: EmbeddingThresholds) -> GateResult:
    """Alone against batched, and one set of neighbours against another of the same lengths.

    Allowed is 1e-6 (bf16), or `noise_factor` times what the reference's own batches move it by, never above
    `batch_most`. What bf16 rounding could explain beyond that, by the mean distance of ref_bf16 from ref_fp32, is
    INCONCLUSIVE; the rest FAIL.
    """
    if not found.batched:
        lacking = reason(ReasonCode.NOT_BATCHED, "no vectors of batches are given: leakage was not looked for")
        return GateResult("batch", Verdict.INCONCLUSIVE, (lacking,))
    fp32 = found.precision == "fp32"
    tight, most = (limits.batch_fp32, limits.batch_fp32_most) if fp32 else (limits.batch, limits.batch_most)
    allowed = max(tight, min(most, limits.noise_factor * found.batch_noise))
    baseline = sum(row.baseline for row in found.prompts) / len(found.prompts)
    doubtful = max(allowed, most if fp32 else limits.noise_factor * baseline)
    failed: list[Reason] = []
    unclear: list[Reason] = []
    for row in found.prompts:
        for value, code, what in (
            (row.batched, ReasonCode.BATCH_DEPENDENT, "alone and in a batch differ: cosine"),
            (row.swapped, ReasonCode.NEIGHBOUR_LEAK, "other neighbours of the same lengths change it: cosine"),
        ):
            if value is None or value <= allowed:
                continue
            message = f"{what} {1 - value:.7f} (1 - {value:.3g}), 1 - {allowed:.3g} is allowed"
            (unclear if value <= doubtful else failed).append(reason(code, message, row.prompt))
    if not found.padded:
        message = "no batch held prompts of unequal lengths: padding was not there"
        unclear.append(reason(ReasonCode.NOT_BATCHED, message))
    notes, blind = [], []
    swapped = [row.swapped for row in found.prompts if row.swapped is not None]
    if not swapped:
        message = "neighbours of the same length were not swapped: leakage shows in alone against batched only"
        blind.append(reason(ReasonCode.NOT_BATCHED, message))
    if found.identical_batch:
        message = "alone and batched are equal bit for bit: make sure that the batches ran as batches"
        notes.append(reason(ReasonCode.EXACT_EQUAL, message))
    figures = [
        Figure("largest 1 - cosine, alone against batched", max(row.batched or 0.0 for row in found.prompts), allowed),
        Figure("the same, reference in bf16" if not fp32 else "the same, reference in fp32", found.batch_noise),
    ]
    if swapped:
        figures.append(Figure("largest 1 - cosine, neighbours swapped", max(swapped), allowed))
    done = _result("batch", failed, unclear, tuple(figures))
    return GateResult(done.gate, done.verdict, done.reasons, done.figures, tuple(notes), tuple(blind))


def _result(gate: str, failed: list[Reason], unclear: list[Reason], figures: tuple[Figure, ...]) -> GateResult:
    verdict = Verdict.FAIL if failed else Verdict.INCONCLUSIVE if unclear else Verdict.PASS
    return GateResult(gate, verdict, (*failed, *unclear), figures)


def _all_one(norms: list[float]) -> bool:
    return all(abs(norm - 1) < 0.01 for norm in norms)
