"""Excitation is measured on the reference: caps that act, experts that are hit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from equiport.bench.family_models import FAMILIES
from equiport.fixtures.excitation import ACTIVE, Excitation, excitation, merged
from equiport.fixtures.folder import read_config
from equiport.fixtures.tokens import draw_batch
from equiport.fixtures.weights import WeightKind
from equiport.reference.model import load_reference, materialize
from equiport.trace.excited import measure

_SHARED = {"hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 2, "vocab_size": 503}
GEMMA2 = {
    **FAMILIES["gemma2"], "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **_SHARED,
    "num_hidden_layers": 3,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", **_SHARED, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
    "num_local_experts": 8, "num_experts_per_tok": 2, "swiglu_limit": 7.0, "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 150000.0,
    },
}  # fmt: skip


def fixture_of(config: dict[str, Any], folder: Path, kind: WeightKind) -> dict[str, Excitation]:
    """The items of a tiny fixture, measured on its reference; its seed's batch is that of stage 2."""
    (folder / "source").mkdir(parents=True)
    (folder / "source" / "config.json").write_text(json.dumps(config))
    made = materialize(folder / "source", folder / "model", kind, 42, tiny=True)
    torch.set_num_threads(1)
    model, values = load_reference(made.folder, torch.float32), read_config(made.folder)
    batch = draw_batch(values["vocab_size"], (24, 17), 5, 42)
    found = excitation(values, model.state_dict(), batch, measure(model, values, batch))
    return {item.item: item for item in found}


def test_softcaps_of_a_tiny_fixture_bind(tmp_path: Path) -> None:
    found = fixture_of(GEMMA2, tmp_path, WeightKind.PERTURBED)
    for cap in ("the final logit softcap is active", "the attention softcap is active"):
        assert found[cap].exercised, found[cap]
    assert found["positions run"].detail.startswith("0 to 28 of ") and "2 rows" in found["batch run"].detail


def test_a_cap_that_no_value_reaches_is_not_excited(tmp_path: Path) -> None:
    """The fixture's own config, loosened again: the measurement must tell."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(GEMMA2))
    model = load_reference(
        materialize(tmp_path / "source", tmp_path / "m", WeightKind.PERTURBED, 1, tiny=False).folder, torch.float32
    )
    model.config.attn_logit_softcapping = 5000.0
    for module in model.modules():
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = 5000.0
    config = {**GEMMA2, "attn_logit_softcapping": 5000.0}
    batch = draw_batch(503, (24, 17), 5, 1)
    measured = measure(model, config, batch)
    change = measured.caps["attn_logit_softcapping"]
    assert change is not None and change < ACTIVE / 10
    items = {item.item: item for item in excitation(config, model.state_dict(), batch, measured)}
    assert not items["the attention softcap is active"].exercised


@pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="gpt_oss has its clamp in the code before 5"
)
def test_the_clamp_of_gpt_oss_acts_under_stress_and_experts_are_counted(tmp_path: Path) -> None:
    found = fixture_of(GPT_OSS, tmp_path / "stress", WeightKind.STRESS)
    assert found["the SwiGLU clamp is active"].exercised, found
    assert found["every expert is hit"].exercised, found["every expert is hit"]


def test_experts_that_no_token_reaches_are_named(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2_moe", **_SHARED, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40, "intermediate_size": 64,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    folder = materialize(tmp_path / "source", tmp_path / "m", WeightKind.PERTURBED, 1, tiny=False).folder
    model = load_reference(folder, torch.float32)
    few, many = draw_batch(503, (2,), 0, 1), draw_batch(503, (90, 90), 0, 1)
    items = {item.item: item for item in excitation(config, model.state_dict(), few, measure(model, config, few))}
    assert not items["every expert is hit"].exercised and "of 8" in items["every expert is hit"].detail
    items = {item.item: item for item in excitation(config, model.state_dict(), many, measure(model, config, many))}
    assert items["every expert is hit"].exercised


def test_one_seed_that_excites_is_enough() -> None:
    seen, unseen = Excitation("a", True, "yes"), Excitation("a", False, "no")
    assert merged([("real", unseen), ("real", seen), ("stress", unseen)]) == [("real", seen), ("stress", unseen)]
