"""compare_logits: next-token distributions of a port against the source's, pooled over prompts."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from equiport.compare.check import recording_refusals
from equiport.compare.numbers import Frozen, Number
from equiport.compare.reasons import ReasonCode
from equiport.compare.slices import safe_ratio, slice_ratios
from equiport.compare.streams import CHUNK_ELEMENTS, FILL, ComparisonError, accept, require_same_shape
from equiport.compare.threeway import EPSILON, shared_memory
from equiport.errors import EquiportError

#: Keys of the tolerance map and how many of the reference's highest logits each looks at (None: all).
TOP_K: dict[str, int | None] = {"k5": 5, "k50": 50, "k1000": 1000, "all": None}
_AGREEMENT_K = 5
_COLUMNS = (
    *("ref", "raw_err", "raw_base", "raw_err32", "centred_ref", "centred_err", "centred_base", "centred_err32"),
    *("count", "cosine_raw", "cosine_centred", "cosine_base", "kl", "kl_base", "top1", "top1_base", "top5", "jaccard"),
)


class MaxObserved(Frozen):
    """One entry of the tolerance map."""

    max_observed: Number


class Spread(Frozen):
    """A per-position quantity over all positions."""

    mean: Number
    p5: Number
    p95: Number
    p999: Number
    low: Number
    high: Number


class PositionColumns(Frozen):
    """Per-position figures, one entry for each of the N rows: columns of one table."""

    position: tuple[int, ...]
    prompt: tuple[int, ...]
    r_raw: tuple[Number, ...]
    r_centred: tuple[Number, ...]
    r32: tuple[Number, ...]
    cosine_centred: tuple[Number, ...]
    kl: tuple[Number, ...]
    top1: tuple[bool, ...]


class LogitComparison(Frozen):
    """Raw metrics of logits [N, V]. KL is D_KL(ref_fp32 ‖ target) in nats; `centred` rows have their mean removed.

    `r_raw`, `r_centred`: ratios of pooled norms. `p95_ratio`: p95 over positions of the centred error norm over the
    p95 of the baseline's. `r32`: pooled, raw; `r32_worst` its worst position (denominator floored as for slices).
    `cosine_baseline`, `kl_baseline`, `top1_baseline`: ref_bf16 against ref_fp32, centred as the target's.
    `mask_mismatches`: places where -inf (or a fill) sits in one tensor only; `not_finite`: NaN or +Inf anywhere.
    """

    positions: int
    vocabulary: int
    prompts: int
    dtypes: dict[str, str]
    r_raw: Number
    r_centred: Number
    r_raw_positions: Spread
    r_centred_positions: Spread
    r_centred_worst_prompt: Number
    p95_ratio: Number
    cosine_raw: Spread
    cosine_centred: Spread
    cosine_baseline: Spread
    kl: Spread
    kl_baseline: Spread
    top1: Number
    top1_baseline: Number
    top5: Number
    jaccard5: Number
    tolerance_map: dict[str, MaxObserved]
    r32: Number | None
    r32_centred: Number | None
    r32_worst: Number | None
    r32_worst_position: int | None
    baseline_noise: Number
    masked: int
    mask_mismatches: int
    not_finite: int
    reference_varies: bool
    same_memory: tuple[str, ...]
    columns: PositionColumns


@recording_refusals
def compare_logits(
    ref_fp32: Tensor,
    ref_bf16: Tensor,
    target: Tensor,
    *,
    target_fp32: Tensor | None = None,
    positions: Sequence[int] | Tensor | None = None,
    prompt_index: Sequence[int] | Tensor | None = None,
    name: str = "",
    chunk_elements: int = CHUNK_ELEMENTS // 2,
) -> LogitComparison:
    """Compare logits [N, V] of N positions, pooled over prompts; rows are read in float64, few at a time.

    `positions` [N]: each row's place in its prompt (default 0..N-1); `prompt_index` [N]: its prompt (default: all rows
    are one prompt). A common offset is most of a raw-logit error and makes raw cosines of unrelated logits exceed
    0.95: gates use the centred figures. -inf at the same places everywhere (suppressed or padded tokens) is set aside.
    NaN or +Inf anywhere makes that row's figures NaN, and with them the pooled ones: never 0, never dropped.
    The tolerance map has, over positions, the largest |Δ| among the reference's top K logits after removing Δ's mean,
    relative to the largest |logit| among them.

    Source: seeds 000 (tolerance map) and 003 (R, cosine, KL, top-1).

    Raises:
        ComparisonError: shapes differ, are not [N, V], are empty, or a tensor cannot be compared.
        EquiportError: `positions` or `prompt_index` are not N long.
    """
    given = {"ref_fp32": ref_fp32, "ref_bf16": ref_bf16, "target": target}
    if target_fp32 is not None:
        given["target_fp32"] = target_fp32
    tensors = {role: accept(value, role, name) for role, value in given.items()}
    require_same_shape(tensors, name)
    shape = tensors["target"].shape
    if len(shape) != 2:
        raise ComparisonError(ReasonCode.SHAPE_MISMATCH, f"logits are [N, V], got {list(shape)}", where=name)
    if not shape.numel():
        raise ComparisonError(ReasonCode.EMPTY, f"no logits in shape {list(shape)}", where=name)
    rows = int(shape[0])
    where = _labels(positions, rows, "positions") or list(range(rows))
    prompts = _labels(prompt_index, rows, "prompt_index") or [0] * rows
    table = _Table(rows, "target_fp32" in tensors)
    step = max(1, chunk_elements // int(shape[1]))
    with torch.no_grad():
        for start in range(0, rows, step):
            part = {role: _rows(tensor, start, start + step) for role, tensor in tensors.items()}
            table.add(slice(start, min(start + step, rows)), part)
    return table.result(tensors, where, prompts)


def _rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    return tensor[start:stop].to(device="cpu", dtype=torch.float64)


def _labels(given: Sequence[int] | Tensor | None, rows: int, field: str) -> list[int]:
    if given is None:
        return []
    labels = [int(item) for item in given]
    if len(labels) != rows:
        raise EquiportError(f"{len(labels)} entries for {rows} rows of logits", field=field)
    return labels


class _Table:
    """Per-position sums; N numbers a column, so memory grows with positions but not with the vocabulary."""

    def __init__(self, rows: int, has_fp32: bool) -> None:
        self.columns = {name: torch.full((rows,), torch.nan, dtype=torch.float64) for name in _COLUMNS}
        self.tolerances = {key: 0.0 for key in TOP_K}
        self.has_fp32 = has_fp32
        self.masked = self.mask_mismatches = self.not_finite = 0

    def add(self, rows: slice, part: dict[str, Tensor]) -> None:
        hidden = {role: values <= -FILL for role, values in part.items()}
        ref_hidden = hidden["ref_fp32"]
        aside = torch.zeros_like(ref_hidden)
        for role, values in part.items():
            self.mask_mismatches += int((hidden[role] != ref_hidden).sum())
            self.not_finite += int((values.isnan() | (values >= FILL)).sum())
            aside |= hidden[role]
        self.masked += int(aside.sum())
        kept = (~aside).sum(dim=1).to(torch.float64)
        raw = {role: values.masked_fill(aside, 0.0) for role, values in part.items()}
        centred = {
            role: (values - values.sum(dim=1, keepdim=True) / kept[:, None]).masked_fill(aside, 0.0)
            for role, values in raw.items()
        }
        put = self.columns
        put["count"][rows] = kept
        put["ref"][rows] = raw["ref_fp32"].square().sum(dim=1)
        put["centred_ref"][rows] = centred["ref_fp32"].square().sum(dim=1)
        for prefix, logits in (("raw", raw), ("centred", centred)):
            put[f"{prefix}_err"][rows] = (logits["target"] - logits["ref_fp32"]).square().sum(dim=1)
            put[f"{prefix}_base"][rows] = (logits["ref_bf16"] - logits["ref_fp32"]).square().sum(dim=1)
            put[f"cosine_{prefix}"][rows] = _cosines(logits["target"], logits["ref_fp32"])
            if self.has_fp32:
                put[f"{prefix}_err32"][rows] = (logits["target_fp32"] - logits["ref_fp32"]).square().sum(dim=1)
        put["cosine_base"][rows] = _cosines(centred["ref_bf16"], centred["ref_fp32"])
        logs = {role: values.masked_fill(hidden[role], -torch.inf).log_softmax(dim=1) for role, values in part.items()}
        put["kl"][rows] = _divergence(logs["ref_fp32"], logs["target"])
        put["kl_base"][rows] = _divergence(logs["ref_fp32"], logs["ref_bf16"])
        ranks = {role: logs[role] for role in ("ref_fp32", "ref_bf16", "target")}
        best = {role: values.argmax(dim=1) for role, values in ranks.items()}
        put["top1"][rows] = (best["target"] == best["ref_fp32"]).to(torch.float64)
        put["top1_base"][rows] = (best["ref_bf16"] == best["ref_fp32"]).to(torch.float64)
        size = min(_AGREEMENT_K, part["target"].shape[1])
        first = ranks["ref_fp32"].topk(size, dim=1).indices
        second = ranks["target"].topk(size, dim=1).indices
        shared = (first[:, :, None] == second[:, None, :]).any(dim=2).sum(dim=1).to(torch.float64)
        put["top5"][rows] = shared / size
        put["jaccard"][rows] = shared / (2 * size - shared)
        self._tolerances(centred, raw["ref_fp32"], ranks["ref_fp32"], aside)
        broken = torch.zeros_like(kept, dtype=torch.bool)
        for values in part.values():
            broken |= (values.isnan() | (values >= FILL)).any(dim=1)
        for name in ("kl", "kl_base", "cosine_raw", "cosine_centred", "cosine_base"):
            put[name][rows] = put[name][rows].masked_fill(broken, torch.nan)
        for name in ("top1", "top5", "jaccard"):
            put[name][rows] = put[name][rows].masked_fill(broken, 0.0)

    def _tolerances(self, centred: dict[str, Tensor], ref: Tensor, ranks: Tensor, aside: Tensor) -> None:
        gap = (centred["target"] - centred["ref_fp32"]).abs()
        order = ranks.masked_fill(aside, -torch.inf)
        for key, k in TOP_K.items():
            if k is None or k >= ref.shape[1]:
                top_gap, top_ref = gap.amax(dim=1), ref.abs().amax(dim=1)
            else:
                indices = order.topk(k, dim=1).indices
                top_gap, top_ref = gap.gather(1, indices).amax(dim=1), ref.abs().gather(1, indices).amax(dim=1)
            worst = float(torch.where((top_gap == 0) & (top_ref == 0), top_gap, top_gap / top_ref).amax())
            if worst != worst or worst > self.tolerances[key]:
                self.tolerances[key] = worst

    def result(self, tensors: dict[str, Tensor], positions: list[int], prompts: list[int]) -> LogitComparison:
        c = self.columns
        total = {name: float(values.sum()) for name, values in c.items()}
        ref_norm = sqrt(total["ref"])
        rows_raw = _ratios(c["raw_err"], c["raw_base"], c["ref"])
        rows_centred = _ratios(c["centred_err"], c["centred_base"], c["ref"])
        worst_prompt = 0.0
        for prompt in set(prompts):
            at = torch.tensor([item == prompt for item in prompts])
            ratio = _pooled(float(c["centred_err"][at].sum()), float(c["centred_base"][at].sum()), ref_norm)
            worst_prompt = ratio if ratio != ratio or ratio > worst_prompt else worst_prompt
        elements = max(total["count"], 1.0)
        rms = (total["raw_base"] / elements) ** 0.5
        rows32, worst32, worst_at = [], None, None
        if self.has_fp32:
            ratios, _ = slice_ratios(c["raw_err32"], c["raw_base"], c["count"], rms)
            at32 = int(ratios.argmax())
            rows32, worst32, worst_at = ratios.tolist(), float(ratios[at32]), positions[at32]
        return LogitComparison(
            positions=len(positions),
            vocabulary=int(tensors["target"].shape[1]),
            prompts=len(set(prompts)),
            dtypes={role: str(tensor.dtype).removeprefix("torch.") for role, tensor in tensors.items()},
            r_raw=_pooled(total["raw_err"], total["raw_base"], ref_norm),
            r_centred=_pooled(total["centred_err"], total["centred_base"], ref_norm),
            r_raw_positions=_spread(rows_raw),
            r_centred_positions=_spread(rows_centred),
            r_centred_worst_prompt=worst_prompt,
            p95_ratio=safe_ratio(
                _spread(c["centred_err"].sqrt()).p95, _spread(c["centred_base"].sqrt()).p95 + EPSILON * ref_norm
            ),
            cosine_raw=_spread(c["cosine_raw"]),
            cosine_centred=_spread(c["cosine_centred"]),
            cosine_baseline=_spread(c["cosine_base"]),
            kl=_spread(c["kl"]),
            kl_baseline=_spread(c["kl_base"]),
            top1=float(c["top1"].mean()),
            top1_baseline=float(c["top1_base"].mean()),
            top5=float(c["top5"].mean()),
            jaccard5=float(c["jaccard"].mean()),
            tolerance_map={key: MaxObserved(max_observed=value) for key, value in self.tolerances.items()},
            r32=_pooled(total["raw_err32"], total["raw_base"], ref_norm) if self.has_fp32 else None,
            r32_centred=_pooled(total["centred_err32"], total["centred_base"], ref_norm) if self.has_fp32 else None,
            r32_worst=worst32,
            r32_worst_position=worst_at,
            baseline_noise=safe_ratio(total["centred_base"], total["centred_ref"]) ** 0.5,
            masked=self.masked,
            mask_mismatches=self.mask_mismatches,
            not_finite=self.not_finite,
            reference_varies=bool((c["centred_ref"] > 0).any()),
            same_memory=shared_memory(tensors),
            columns=PositionColumns(
                position=tuple(positions),
                prompt=tuple(prompts),
                r_raw=tuple(rows_raw.tolist()),
                r_centred=tuple(rows_centred.tolist()),
                r32=tuple(rows32),
                cosine_centred=tuple(c["cosine_centred"].tolist()),
                kl=tuple(c["kl"].tolist()),
                top1=tuple(bool(item) for item in c["top1"].tolist()),
            ),
        )


def _cosines(first: Tensor, second: Tensor) -> Tensor:
    # A constant row has no direction: NaN, which no gate passes.
    scale = first.square().sum(dim=1).sqrt() * second.square().sum(dim=1).sqrt()
    return (first * second).sum(dim=1) / torch.where(scale > 0, scale, torch.full_like(scale, torch.nan))


def _divergence(p_log: Tensor, q_log: Tensor) -> Tensor:
    # 0 · log 0 is 0 by definition; everything else, NaN too, goes through.
    p = p_log.exp()
    terms = torch.where(p == 0, torch.zeros_like(p), p * (p_log - q_log))
    return terms.sum(dim=1).clamp(min=0.0)


def _ratios(errors: Tensor, baselines: Tensor, refs: Tensor) -> Tensor:
    return torch.tensor(
        [
            safe_ratio(error**0.5, base**0.5 + EPSILON * ref**0.5)
            for error, base, ref in zip(errors.tolist(), baselines.tolist(), refs.tolist(), strict=True)
        ],
        dtype=torch.float64,
    )


def _pooled(error: float, base: float, ref_norm: float) -> float:
    return safe_ratio(error**0.5, base**0.5 + EPSILON * ref_norm)


def _spread(values: Tensor) -> Spread:
    # numpy's quantiles pass NaN on: one broken position breaks the figure, it does not vanish
    data = values.numpy()
    with np.errstate(invalid="ignore"):  # between infinite values: NaN, and meant to be
        p5, p95, p999 = (float(item) for item in np.quantile(data, (0.05, 0.95, 0.999)))
    return Spread(mean=float(data.mean()), p5=p5, p95=p95, p999=p999, low=float(data.min()), high=float(data.max()))
