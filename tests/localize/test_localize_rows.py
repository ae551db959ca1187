"""Rows of a batch that are rotated by the positions of the run's first row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equiport.bench.portbugs.operator import wrap_forward
from equiport.compare.thresholds import Thresholds
from equiport.localize.search import explain
from tests.localize.defects import SHARED, case_of, model_folder

LLAMA: dict[str, Any] = {
    **SHARED, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
PATH, FIRST = "model.layers.0.self_attn", 16


def first_rows(model: nn.Module) -> None:
    """Tables of decode are those of a row whose prompt has FIRST tokens."""
    prompt = [0]

    def tables(original: Any, x: torch.Tensor, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        if position_ids.shape[-1] > 1:
            prompt[0] = position_ids.shape[-1]
            return original(x, position_ids=position_ids, **kwargs)
        return original(x, position_ids=position_ids - prompt[0] + FIRST, **kwargs)

    wrap_forward(model.model.rotary_emb, tables)  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize("lengths", [(12, 5), (9, 9)])
def test_the_first_row_may_be_outside_the_case(tmp_path: Path, lengths: tuple[int, int]) -> None:
    torch.set_num_threads(1)
    cases = [
        replace(case_of(model_folder(tmp_path, LLAMA, seed), PATH, first_rows, seed, lengths), first_length=FIRST)
        for seed in (11, 12)
    ]
    found = explain(cases, Thresholds())
    assert found.proven and "first row's positions" in found.ranked[0].says and found.ranked[0].r32 < 1e-3
    if lengths[0] == lengths[1]:
        return
    own = explain([replace(case, first_length=None) for case in cases[:1]], Thresholds())
    assert not (own.proven and "first row's positions" in own.ranked[0].says)
