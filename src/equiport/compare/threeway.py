"""compare_3tensors: the port's error against the error that bf16 makes anyway."""

from __future__ import annotations

import re
from math import sqrt
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from equiport.compare.check import recording_refusals
from equiport.compare.comparison import Comparison, Labels, SetAside
from equiport.compare.measure import NOMINAL_BF16, Measured, Sources, TensorBaseline
from equiport.compare.slices import safe_ratio
from equiport.compare.streams import CHUNK_ELEMENTS, accept, require_same_shape, share_memory
from equiport.errors import EquiportError

#: ε of the R-ratio relative to ‖ref_fp32‖; never an absolute constant.
EPSILON = 1e-12
_SPLIT = re.compile(r"split:([1-9]\d*)")


def split_degree(baseline: str) -> int:
    """k of a baseline label `split:k`; 1 for `plain`.

    Raises:
        EquiportError: another label.
    """
    if baseline == "plain":
        return 1
    match = _SPLIT.fullmatch(baseline)
    if match is None or int(match[1]) < 2:
        raise EquiportError(
            f"unknown baseline {baseline!r}", field="baseline", remedy="Use 'plain' or 'split:K' with K >= 2."
        )
    return int(match[1])


@recording_refusals
def compare_3tensors(
    ref_fp32: Tensor,
    ref_bf16: Tensor,
    target: Tensor,
    *,
    target_fp32: Tensor | None = None,
    name: str = "",
    baseline: str = "plain",
    plots_dir: str | Path | None = None,
    labels: Labels | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Comparison:
    """Measure a port's output against the source's, relative to the source's own bf16 error.

    All tensors have one shape and any real dtype; they are read in float64 blocks of `chunk_elements`.
    With e = target − ref_fp32, b = ref_bf16 − ref_fp32, e32 = target_fp32 − ref_fp32:

    - `r_ratio` = ‖e‖ / (‖b‖ + ε), ε = 1e-12·‖ref_fp32‖; `r32` = ‖e32‖ / (‖b‖ + ε);
    - `sigma_ratio` = RMS(e)/RMS(b); `linf_ratio` = max|e|/max|b|; `l2_ratio` = ‖e‖/‖b‖; 0/0 is 0, x/0 infinite;
    - `bc` = Bhattacharyya coefficient of the distributions of |e| and |b| (100 equal bins over their common range);
    - `mean_shift` = mean(e)/RMS(b): signs, which R and BC ignore; `nmse` = ‖e‖²/‖ref_fp32‖²;
    - `cosine`, `cosine_centred` of target and ref_fp32, the second without their means;
    - `r_slices`, `r32_slices`: the worst slice of each axis longer than 1 (`slices.slice_ratios` has the floor).

    NaN, Inf and mask fills (|x| ≥ 1e8, floating point) at the same places everywhere are set aside and counted. When
    ‖b‖ is 0 up to fp32 rounding, or all tensors hold integers, the mode is `exact`: `exactness` says how the target
    differs from ref_bf16, and `r32` and the slices are relative to the nominal bf16 rounding error, 2^-9/√3 of the
    reference.

    `baseline`: `plain`, or `split:K` when ref_bf16 was computed with its reduction split in K (see `baseline`).
    `plots_dir`: where to write PNGs. `labels`: carried into records.

    Source: seed 003 (R-ratio, three tensors).

    Raises:
        ComparisonError: shapes differ, or a tensor cannot be compared (complex, sparse, quantised, meta).
        EquiportError: an unknown baseline label.
    """
    split_degree(baseline)
    tensors = {
        "ref_fp32": accept(ref_fp32, "ref_fp32", name),
        "ref_bf16": accept(ref_bf16, "ref_bf16", name),
        "target": accept(target, "target", name),
    }
    if target_fp32 is not None:
        tensors["target_fp32"] = accept(target_fp32, "target_fp32", name)
    require_same_shape(tensors, name)
    sources = Sources(
        ref=tensors["ref_fp32"],
        baselines=[TensorBaseline(tensors["ref_bf16"])],
        target=tensors["target"],
        target_fp32=tensors.get("target_fp32"),
        anchor=tensors["ref_bf16"],
        integers=holds_integers(*tensors.values()),
    )
    return build_comparison(
        sources,
        tensors,
        name=name,
        baseline=baseline,
        method="3-tensor",
        labels=labels or Labels(),
        plots_dir=plots_dir,
        chunk_elements=chunk_elements,
    )


def holds_integers(*tensors: Tensor) -> bool:
    """True when no tensor is floating point."""
    return not any(tensor.is_floating_point() for tensor in tensors)


def shared_memory(tensors: dict[str, Tensor]) -> tuple[str, ...]:
    """Pairs of roles that are the same memory, as `a=b`."""
    roles = list(tensors)
    return tuple(
        f"{first}={second}"
        for at, first in enumerate(roles)
        for second in roles[at + 1 :]
        if share_memory(tensors[first], tensors[second])
    )


def build_comparison(
    sources: Sources,
    tensors: dict[str, Tensor],
    *,
    name: str,
    baseline: str,
    method: Literal["3-tensor", "2-tensor"],
    labels: Labels,
    plots_dir: str | Path | None,
    chunk_elements: int,
) -> Comparison:
    """Run the passes over `sources` and assemble the record; `tensors` by role name dtypes and shared memory."""
    if chunk_elements < 1:
        raise EquiportError(f"must be at least 1, got {chunk_elements}", field="chunk_elements")
    with torch.no_grad():
        seen = Measured(sources, chunk_elements)
        coefficient, exactness = seen.second_pass()
    ref_norm, base, error = sqrt(seen.ref_sq), sqrt(seen.base_sq), sqrt(seen.err_sq)
    count = max(seen.elements, 1)
    exact = seen.exact
    if exact:
        quantity, rms, scale = "ref", ref_norm / sqrt(count), NOMINAL_BF16
    else:
        quantity, rms, scale = "base", base / sqrt(count), 1.0
    has_fp32 = sources.target_fp32 is not None
    error32 = sqrt(seen.err32_sq) if has_fp32 else None
    if exactness is not None and split_degree(baseline if method == "3-tensor" else "plain") > 1:
        exactness = exactness.model_copy(update={"reorder": not seen.beyond_bf16["base"] and not sources.integers})

    def slices(numerator: str) -> Any:
        found = seen.slices.worst(numerator, quantity, rms)
        return tuple(item.model_copy(update={"ratio": safe_ratio(item.ratio, scale)}) for item in found)

    def over_baseline(value: float) -> float:
        return safe_ratio(value, base + EPSILON * ref_norm)

    def r32(value: float) -> float:
        return safe_ratio(value, NOMINAL_BF16 * ref_norm) if exact else over_baseline(value)

    counts = seen.class_counts.tolist()
    centred = _cosine(
        seen.dot - seen.ref_sum * seen.target_sum / count,
        seen.ref_sq - seen.ref_sum**2 / count,
        seen.target_sq - seen.target_sum**2 / count,
    )
    comparison = Comparison(
        name=name,
        method=method,
        baseline=baseline,
        labels=labels,
        shape=tuple(sources.ref.shape),
        dtypes={role: str(tensor.dtype).removeprefix("torch.") for role, tensor in tensors.items()},
        mode="exact" if exact else "ratio",
        draws=seen.draws,
        elements=seen.elements,
        set_aside=SetAside(
            nan=counts[1],
            pos_inf=counts[2],
            neg_inf=counts[3],
            fill=counts[4] + counts[5],
            mismatched_target=seen.mismatched["target"],
            mismatched_baseline=seen.mismatched["base"],
            mismatched_fp32=seen.mismatched["fp32"],
        ),
        ref_norm=ref_norm,
        baseline_error=base,
        target_error=error,
        target_fp32_error=error32,
        r_ratio=over_baseline(error),
        r32=None if error32 is None else r32(error32),
        sigma_ratio=safe_ratio(error, base),
        mean_shift=safe_ratio(seen.err_sum / count, base / sqrt(count)),
        bc=coefficient,
        baseline_linf=seen.base_max,
        target_linf=seen.err_max,
        linf_ratio=safe_ratio(seen.err_max, seen.base_max),
        l2_ratio=safe_ratio(error, base),
        cosine=_cosine(seen.dot, seen.ref_sq, seen.target_sq),
        cosine_centred=centred,
        nmse=safe_ratio(seen.err_sq, seen.ref_sq),
        r_slices=slices("err"),
        r32_slices=slices("err32") if has_fp32 else (),
        exactness=exactness,
        integers=sources.integers,
        reference_varies=seen.ref_range.varies,
        target_varies=seen.target_range.varies,
        ref_fp32_beyond_bf16=seen.beyond_bf16["ref"],
        ref_bf16_beyond_bf16=seen.beyond_bf16["base"],
        target_beyond_bf16=seen.beyond_bf16["target"],
        same_memory=shared_memory(tensors),
    )
    if plots_dir is not None and seen.elements:
        from equiport.compare.plots import plot_comparison

        paths = plot_comparison(seen, comparison, Path(plots_dir))
        comparison = comparison.model_copy(update={"plots": tuple(str(path) for path in paths)})
    return comparison


def _cosine(dot: float, first_sq: float, second_sq: float) -> float:
    # Two zero vectors, or a zero and another one, have no angle: NaN, which no gate passes.
    scale = sqrt(max(first_sq, 0.0)) * sqrt(max(second_sq, 0.0))
    return max(-1.0, min(1.0, dot / scale)) if scale > 0 else float("nan")
