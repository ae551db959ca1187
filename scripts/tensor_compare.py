#!/usr/bin/env python3
"""Three-tensor comparison for component tests. Copy it beside the tests; equiport must be installed."""

from equiport.compare import (
    Comparison,
    Labels,
    check_3tensor_result,
    compare_2tensors,
    compare_3tensors,
    compare_logits,
    epsilon_draws,
    split_linear,
    split_reduction,
)

__all__ = [
    "Comparison",
    "Labels",
    "check_3tensor_result",
    "compare_2tensors",
    "compare_3tensors",
    "compare_logits",
    "epsilon_draws",
    "split_linear",
    "split_reduction",
]
