"""Tensors in, verdicts out: the comparison core. It knows nothing of models.

Names are loaded on first use, so importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equiport.compare.baseline import split_label, split_linear, split_matmul, split_reduction
    from equiport.compare.check import check_3tensor_result
    from equiport.compare.comparison import Comparison, Labels
    from equiport.compare.gates import (
        Figure,
        GateResult,
        exact_gate,
        fp32_gate,
        integrity_gate,
        judge,
        single_gate,
        three_way_gate,
    )
    from equiport.compare.gates_components import component_gate
    from equiport.compare.gates_end_to_end import PromptTokens, end_to_end_gate, smoke_gate
    from equiport.compare.logits import LogitComparison, compare_logits
    from equiport.compare.reasons import ReasonCode
    from equiport.compare.records import RECORDS_ENV, Record, append_record, read_records
    from equiport.compare.streams import ComparisonError
    from equiport.compare.threeway import compare_3tensors
    from equiport.compare.thresholds import SEED_THRESHOLDS, SHIPPED_THRESHOLDS, Thresholds, load_thresholds
    from equiport.compare.twoway import compare_2tensors, epsilon_draws
    from equiport.compare.verdict import Reason, Verdict, combine

_HOME = {
    "baseline": ("split_label", "split_linear", "split_matmul", "split_reduction"),
    "check": ("check_3tensor_result",),
    "comparison": ("Comparison", "Labels"),
    "gates": (
        "Figure",
        "GateResult",
        "exact_gate",
        "fp32_gate",
        "integrity_gate",
        "judge",
        "single_gate",
        "three_way_gate",
    ),
    "gates_components": ("component_gate",),
    "gates_end_to_end": ("PromptTokens", "end_to_end_gate", "smoke_gate"),
    "logits": ("LogitComparison", "compare_logits"),
    "reasons": ("ReasonCode",),
    "records": ("RECORDS_ENV", "Record", "append_record", "read_records"),
    "streams": ("ComparisonError",),
    "thresholds": ("SEED_THRESHOLDS", "SHIPPED_THRESHOLDS", "Thresholds", "load_thresholds"),
    "threeway": ("compare_3tensors",),
    "twoway": ("compare_2tensors", "epsilon_draws"),
    "verdict": ("Reason", "Verdict", "combine"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "RECORDS_ENV",
    "SEED_THRESHOLDS",
    "SHIPPED_THRESHOLDS",
    "Comparison",
    "ComparisonError",
    "Figure",
    "GateResult",
    "Labels",
    "LogitComparison",
    "PromptTokens",
    "Reason",
    "ReasonCode",
    "Record",
    "Thresholds",
    "Verdict",
    "append_record",
    "check_3tensor_result",
    "combine",
    "compare_2tensors",
    "compare_3tensors",
    "compare_logits",
    "component_gate",
    "end_to_end_gate",
    "epsilon_draws",
    "exact_gate",
    "fp32_gate",
    "integrity_gate",
    "judge",
    "load_thresholds",
    "read_records",
    "single_gate",
    "smoke_gate",
    "split_label",
    "split_linear",
    "split_matmul",
    "split_reduction",
    "three_way_gate",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
