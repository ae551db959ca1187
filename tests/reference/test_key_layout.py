"""Under which names weights are stored: found from a folder, followed by what is drawn for it, loaded as one model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equiport.errors import EquiportError
from equiport.fixtures.folder import read_config, tensor_headers
from equiport.fixtures.weights import WeightKind
from equiport.reference.key_layout import LAYOUT_FILE, KeyLayout, declare_layout, layout_of
from equiport.reference.model import load_reference, materialize, skeleton
from equiport.reference.stored_names import loaded_names

SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 61}
GPT1: dict[str, Any] = {"model_type": "openai-gpt", "architectures": ["OpenAIGPTLMHeadModel"], **SIZES}
LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61,
    "tie_word_embeddings": False,
}  # fmt: skip
LAYOUTS = [(GPT1, KeyLayout(dropped="transformer.")), (LLAMA, KeyLayout(dropped="model.")), (LLAMA, KeyLayout()),
           (LLAMA, KeyLayout(added="language_model."))]  # fmt: skip


def source(root: Path, config: dict[str, Any], layout: KeyLayout) -> Path:
    root.mkdir()
    (root / "config.json").write_text(json.dumps(config))
    declare_layout(root, layout)
    return root


def names(folder: Path) -> list[str]:
    return [header.name for header in tensor_headers(folder)]


def same(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize(("config", "layout"), LAYOUTS)
def test_every_layout_is_the_same_model(tmp_path: Path, config: dict[str, Any], layout: KeyLayout) -> None:
    if config is LLAMA and layout.dropped:
        # tied, so that nothing beside the backbone is stored
        config = {**config, "tie_word_embeddings": True}
    plain = materialize(
        source(tmp_path / "s", config, KeyLayout()), tmp_path / "plain", WeightKind.PERTURBED, 3, tiny=False
    )
    drawn = materialize(source(tmp_path / "t", config, layout), tmp_path / "drawn", WeightKind.PERTURBED, 3, tiny=False)
    assert names(drawn.folder) == sorted(layout.stored(name) for name in names(plain.folder))
    assert same(load_reference(plain.folder, torch.float32), load_reference(drawn.folder, torch.float32))
    model = skeleton(drawn.folder)
    assert layout_of(names(drawn.folder), model) == layout
    assert set(loaded_names(model, names(drawn.folder)).values()) <= set(model.state_dict())
    assert bool(layout.words()) is not layout.is_plain


@pytest.mark.parametrize(("config", "layout"), LAYOUTS)
def test_what_is_drawn_for_a_folder_is_stored_as_its_weights_are(
    tmp_path: Path, config: dict[str, Any], layout: KeyLayout
) -> None:
    config = {**config, "tie_word_embeddings": True} if layout.dropped else config
    real = materialize(source(tmp_path / "s", config, layout), tmp_path / "real", WeightKind.PERTURBED, 3, tiny=False)
    assert not (real.folder / LAYOUT_FILE).exists()
    drawn = materialize(real.folder, tmp_path / "drawn", WeightKind.STRESS, 5, tiny=True)
    assert names(drawn.folder) == names(real.folder)
    assert read_config(drawn.folder)["model_type"] == config["model_type"]


def test_a_layout_that_transformers_does_not_load_is_refused(tmp_path: Path) -> None:
    wrong = source(tmp_path / "s", LLAMA, KeyLayout(dropped="model.layers."))
    with pytest.raises(EquiportError):
        materialize(wrong, tmp_path / "drawn", WeightKind.PERTURBED, 3, tiny=False)
    assert not (tmp_path / "drawn").exists()
    (wrong / LAYOUT_FILE).write_text("{]")
    with pytest.raises(EquiportError, match=LAYOUT_FILE):
        materialize(wrong, tmp_path / "drawn", WeightKind.PERTURBED, 3, tiny=False)
