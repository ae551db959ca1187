"""Try every hypothesis on a suspect: put the defect into the source and see whether the target comes out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equiport.compare.thresholds import Thresholds
from equiport.localize.case import Case
from equiport.localize.causes import precision
from equiport.localize.combined import MISFITS, extended, nearest
from equiport.localize.hypothesis import Candidate, Explained, Hypothesis
from equiport.localize.registry import hypotheses
from equiport.localize.surgery import Surgery

_KEPT = 5
_TOGETHER = 3
_PLACE_MARGIN = 20.0
_NEARER = 0.5


@dataclass(frozen=True)
class Explanation:
    """What was found for one suspect.

    `before`: R32 of the target against the untouched source. `ranked`: the best candidates, nearest first.
    `proven`: the first of them holds on every case, with the source's own figures; else nothing is proven.
    """

    before: float
    ranked: tuple[Explained, ...]
    proven: bool
    tried: int


def explain(cases: Sequence[Case], thresholds: Thresholds) -> Explanation:
    """Rank the hypotheses on the first case and prove the winner on all of them.

    The cases are one suspect under several seeds or fixtures, in fp32. A candidate is proven when the source with the
    defect in it gives the target: R32 at most the fp32 gate's, pooled, on every case. Where no single one is, the
    nearest are tried together, up to three.
    """
    first = cases[0]
    with torch.no_grad():
        plain = first.outputs()
        before = first.distance(plain)
        found = [item for item in _tried(first, plain, hypotheses()) if item.r32 < before]
        ranked = _distinct(sorted(found, key=lambda item: _order(item, thresholds)))
        winner = _first_proven(cases, ranked, thresholds)
        tried = len(found)
        for _ in range(_TOGETHER - 1):
            if winner is not None:
                break
            joined = [item for item in _joined(first, plain, found, before) if item.r32 < before]
            tried += len(joined)
            if not joined:
                break
            found = joined
            ranked = _distinct(sorted((*ranked, *joined), key=lambda item: item.r32))
            winner = _first_proven(cases, ranked, thresholds)
    if winner is not None:
        ranked = [winner, *(other for other in ranked if other is not winner)]
    return Explanation(before, tuple(ranked[:_KEPT]), winner is not None, tried)


def _first_proven(cases: Sequence[Case], ranked: Sequence[Explained], thresholds: Thresholds) -> Explained | None:
    for item in ranked[: _KEPT + 1]:
        if item.r32 > thresholds.r32_pooled or item.worst > _PLACE_MARGIN * thresholds.r32_slice:
            return None
        if all(_holds(case, item.candidate, thresholds) for case in cases[1:]):
            return item
    return None


def _joined(case: Case, plain: Mapping[str, Tensor], found: Sequence[Explained], before: float) -> Iterable[Explained]:
    for start, kind, both, outputs in extended(case, nearest(found, before), hypotheses()):
        growth = _growth(outputs, plain)
        r32 = case.distance(outputs) / growth
        worst = case.worst_place(outputs) / growth if r32 < float("inf") else r32
        yield Explained(f"{start.kind} + {kind.kind}", both.says, both.repair, r32, worst, both)


def explain_precision(cases: Sequence[Case], plain: Sequence[Case], limit: float) -> Explanation:
    """Rank the precision defects: fp32 agrees, bf16 does not.

    `cases` hold the bf16 source and the bf16 target; `plain` the same places with ref_fp32 as their target; `limit` is
    the gate of the component's type. Proven: with the defect in the baseline the mean R falls below it, and the target
    is nearer to that baseline than half the way.
    """
    with torch.no_grad():
        own = [case.outputs() for case in cases]
        before = _mean([case.distance(out) for case, out in zip(cases, own, strict=True)])
        found: list[Explained] = []
        for candidate in precision.candidates(cases[0]):
            outputs = [_with_defect(case, candidate) for case in cases]
            if any(out is None for out in outputs):
                continue
            near = _mean([case.distance(out or {}) for case, out in zip(cases, outputs, strict=True)])
            ratio = _mean(
                [_ratio(case, base, out or {}) for case, base, out in zip(cases, plain, outputs, strict=True)]
            )
            found.append(Explained(precision.KIND, candidate.says, candidate.repair, near, ratio, candidate))
    found.sort(key=lambda item: item.r32)
    best = found[0] if found else None
    proven = best is not None and best.r32 < _NEARER * before and best.worst < limit
    return Explanation(before, tuple(found[:_KEPT]), proven, len(found))


def _tried(case: Case, plain: Mapping[str, Tensor], kinds: Iterable[Hypothesis]) -> Iterable[Explained]:
    for kind in kinds:
        for candidate in kind.candidates(case, plain):
            outputs = _with_defect(case, candidate)
            if outputs is None:
                continue
            growth = _growth(outputs, plain)
            r32 = case.distance(outputs) / growth
            worst = case.worst_place(outputs) / growth if r32 < float("inf") else r32
            yield Explained(kind.kind, candidate.says, candidate.repair, r32, worst, candidate)


def _with_defect(case: Case, candidate: Candidate) -> dict[str, Tensor] | None:
    """The source's outputs with the defect in it; None where it cannot be put in."""
    try:
        with Surgery() as surgery:
            candidate.edit(case, surgery)
            return case.outputs()
    except MISFITS:
        # a defect of another architecture: shapes or names do not fit
        return None


def _holds(case: Case, candidate: Candidate, thresholds: Thresholds) -> bool:
    outputs = _with_defect(case, candidate)
    if outputs is None:
        return False
    return case.distance(outputs) / _growth(outputs, case.outputs()) <= thresholds.r32_pooled


def _growth(outputs: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> float:
    """How much larger a defect makes the output: its rounding, and with it the unit of R32, grows alike; at least 1."""
    sizes = [sum(float(value.double().pow(2).sum()) for value in side.values()) ** 0.5 for side in (outputs, plain)]
    return max(1.0, sizes[0] / sizes[1]) if sizes[1] and sizes[0] < float("inf") else 1.0


def _order(item: Explained, thresholds: Thresholds) -> tuple[bool, int, float]:
    """Candidates below the gate first, and of those the simplest; the others by distance."""
    good = item.r32 <= thresholds.r32_pooled
    cost = next(kind.cost for kind in hypotheses() if kind.kind == item.kind)
    return (not good, cost if good else 0, item.r32)


def _distinct(items: Sequence[Explained]) -> list[Explained]:
    seen: dict[str, Explained] = {}
    for item in items:
        seen.setdefault(item.says, item)
    return list(seen.values())


def _ratio(case: Case, plain: Case, outputs: Mapping[str, Tensor]) -> float:
    """R of the bf16 target with the defective source as baseline."""
    error = sum(
        float((item.target.double() - exact.target.double()).pow(2).sum())
        for item, exact in zip(case.observations, plain.observations, strict=True)
    )
    base = sum(float((outputs[item.phase].double() - item.target.double()).pow(2).sum()) for item in plain.observations)
    return (error / base) ** 0.5 if base else float("inf")


def _mean(values: Sequence[float]) -> float:
    """Geometric, as the gate's."""
    if not values or any(value != value or value == float("inf") for value in values):
        return float("inf")
    product = 1.0
    for value in values:
        product *= max(value, 1e-9)
    return float(product ** (1 / len(values)))
