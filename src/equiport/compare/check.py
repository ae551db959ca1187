"""check_3tensor_result: the door through which component tests judge and record a comparison."""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import isfinite
from typing import Any, TypeVar

from equiport.compare.comparison import Comparison
from equiport.compare.gates import GateResult, judge
from equiport.compare.reasons import reason
from equiport.compare.records import append_record, make_record
from equiport.compare.streams import ComparisonError
from equiport.compare.thresholds import SHIPPED_THRESHOLDS
from equiport.compare.verdict import Verdict
from equiport.errors import EquiportError

_Result = TypeVar("_Result")


def check_3tensor_result(comparison: Comparison, name: str, tolerance_ratio: float = 1.2) -> bool:
    """Judge a comparison, print one line, append a record where EQUIPORT_RECORDS names a file.

    True only on PASS: INCONCLUSIVE is False. `tolerance_ratio` limits R and is part of the record.

    Raises:
        EquiportError: no `Comparison`, or a tolerance that is not a positive finite number.
    """
    if not isinstance(comparison, Comparison):
        raise EquiportError(
            f"expected a Comparison, got {type(comparison).__name__}",
            where=name,
            field="comparison",
            remedy="Pass what compare_3tensors returned.",
        )
    if isinstance(tolerance_ratio, bool) or not (isfinite(tolerance_ratio) and tolerance_ratio > 0):
        raise EquiportError(f"must be positive and finite, got {tolerance_ratio}", where=name, field="tolerance_ratio")
    result = judge(comparison, SHIPPED_THRESHOLDS, float(tolerance_ratio))
    record = make_record(name, comparison=comparison, result=result, tolerance_ratio=float(tolerance_ratio))
    append_record(record)
    print(one_line(comparison, name, result, tolerance_ratio))
    return result.verdict is Verdict.PASS


def one_line(comparison: Comparison, name: str, result: GateResult, tolerance_ratio: float) -> str:
    """The verdict and the figures that matter, on one line."""
    c = comparison
    parts = [f"{result.verdict.value} {name}:"]
    if c.mode == "exact":
        unequal = c.exactness.unequal if c.exactness else c.elements
        parts.append(f"exact baseline, {unequal} of {c.elements} differ")
    else:
        parts.append(f"R={c.r_ratio:.4g} (limit {tolerance_ratio:g})")
    if c.r32 is not None:
        parts.append(f"R32={c.r32:.3g}")
    if c.mode == "ratio":
        parts.append(f"L∞×{c.linf_ratio:.3g} cos={c.cosine:.6f}")
    if c.baseline != "plain":
        parts.append(f"baseline={c.baseline}")
    said = [f"{item.code}: {item.message}" for item in (*result.reasons, *result.notes)]
    blind = [item.message for item in result.blind_spots]
    tail = "; ".join(said + [f"blind spot: {message}" for message in blind])
    return " ".join(" ".join(parts).split()) + (f" | {tail}" if tail else "")


def recording_refusals(compare: Callable[..., _Result]) -> Callable[..., _Result]:
    """Make a comparison function record a FAIL before it raises: tensors that do not fit are evidence too."""

    @functools.wraps(compare)
    def wrapper(*args: Any, **kwargs: Any) -> _Result:
        try:
            return compare(*args, **kwargs)
        except ComparisonError as error:
            found = (reason(error.code, error.what, kwargs.get("name", "")),)
            append_record(make_record(kwargs.get("name", ""), reasons=found, labels=kwargs.get("labels")))
            raise

    return wrapper
