"""Scores of experts that are rounded to bf16 before the choice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from equiport.bench.portbugs.configs import CONFIGS
from equiport.bench.portbugs.operator import edit_output, wrap_forward
from equiport.localize.search import Explanation, explain_precision
from tests.localize.defects import low_cases, model_folder

PATH = "model.layers.1.mlp"
WORDS = "rounded to bf16 before the choice"


class _Rounded(TorchFunctionMode):
    """Sigmoids and softmaxes over experts give bf16."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.bfloat16() if func.__name__ in ("sigmoid", "softmax") and out.shape[-1] == 8 else out


def rounded_scores(model: nn.Module) -> None:
    """In one layer."""

    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _Rounded():
            return original(*args, **kwargs)

    wrap_forward(model.get_submodule(PATH), run)


def explained(root: Path, inject: Callable[[nn.Module], None]) -> Explanation:
    torch.set_num_threads(1)
    pairs = [low_cases(model_folder(root, CONFIGS["deepseek_v3"], seed), PATH, inject, seed) for seed in (11, 12)]
    return explain_precision([low for low, _ in pairs], [exact for _, exact in pairs], 1.1)


def test_scores_rounded_before_the_choice_are_proven(tmp_path: Path) -> None:
    found = explained(tmp_path, rounded_scores)
    assert found.before > 0.1 and found.proven and WORDS in found.ranked[0].says


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_right_mixture_and_another_defect_are_not_explained_by_them(tmp_path: Path, factor: float) -> None:
    found = explained(tmp_path, lambda model: edit_output(model.get_submodule(PATH), lambda out: out * factor))
    assert not (found.proven and WORDS in found.ranked[0].says)
