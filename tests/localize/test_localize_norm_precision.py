"""Norms that round too early: which of their two steps does so is told apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equiport.bench.portbugs.configs import CONFIGS
from equiport.bench.portbugs.operator import wrap_forward
from equiport.localize.search import explain_precision
from tests.localize.defects import low_cases, model_folder

PATH = "model.layers.1.input_layernorm"


def low_variance(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weight.float())


def all_low(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weight)


def low_weight(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * (1.0 + weight)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (low_variance, "taken in bf16, its weight is not"),
        (all_low, f"variance of {PATH} is taken in bf16"),
        (low_weight, "multiplied in bf16, after the cast"),
    ],
)
def test_the_step_that_rounds_is_named(tmp_path: Path, form: Callable[[Tensor, Tensor], Tensor], words: str) -> None:
    torch.set_num_threads(1)

    def inject(model: nn.Module) -> None:
        norm = model.get_submodule(PATH)

        def run(original: Callable[..., Any], x: Tensor) -> Tensor:
            return form(x, norm.weight).to(x.dtype)

        wrap_forward(norm, run)

    pairs = [low_cases(model_folder(tmp_path, CONFIGS["gemma2"], seed), PATH, inject, seed) for seed in (11, 12)]
    found = explain_precision([low for low, _ in pairs], [exact for _, exact in pairs], 1.1)
    assert found.before > 0.1 and found.proven and words in found.ranked[0].says
    assert ("is not" in found.ranked[0].says) == (form is low_variance)
