"""A choice of experts of the source's own, and a port that chooses as usual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equiport.bench.portbugs.operator import edit_output, while_running
from tests.localize.defects import SHARED, case_of, explained, model_folder

PHIMOE: dict[str, Any] = {
    **SHARED, "model_type": "phimoe", "architectures": ["PhimoeForCausalLM"], "num_local_experts": 6,
    "num_experts_per_tok": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4, "sliding_window": None,
    "router_jitter_noise": 0.01, "input_jitter_noise": 0.0, "attention_bias": False,
}  # fmt: skip


def block_of(model: nn.Module) -> tuple[str, nn.Module]:
    """The first layer's mixture, whatever this version of transformers calls it."""
    return next((path, one) for path, one in model.named_modules() if type(one).__name__.endswith("SparseMoeBlock"))


def path_in(folder: Path) -> str:
    found: list[str] = []
    case_of(folder, "model.layers.0.self_attn", lambda model: found.append(block_of(model)[0]), 11)
    return found[0]


def usual(model: nn.Module) -> None:
    """Softmax over the two largest."""

    def choice(original: Any, scores: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        best, chosen = scores.topk(2, dim=-1)
        return best.softmax(dim=-1), chosen

    while_running(block_of(model)[1], "sparsemixer", choice)


def test_a_usual_choice_in_place_of_the_sources_own_is_proven(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    path = path_in(model_folder(tmp_path, PHIMOE, 1))
    found = explained(tmp_path, PHIMOE, path, usual)
    assert found.proven and found.ranked[0].kind == "router order or renormalisation"
    assert "a softmax over the chosen ones" in found.ranked[0].says and found.ranked[0].r32 < 1e-3 < found.before


def test_another_defect_of_the_mixture_is_not_its_choice(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    path = path_in(model_folder(tmp_path, PHIMOE, 1))
    found = explained(tmp_path, PHIMOE, path, lambda model: edit_output(block_of(model)[1], lambda out: out * 0.7))
    assert found.proven and found.ranked[0].kind != "router order or renormalisation"
