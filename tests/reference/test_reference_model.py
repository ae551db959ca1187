"""The source model: strictly loaded, and its logits and greedy tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from equiport.errors import EquiportError
from equiport.reference.logits import greedy, sequence_logits
from equiport.reference.model import load_reference, skeleton


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def rewrite(folder: Path, drop: str = "", **config: object) -> None:
    file = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if k != drop}, file, {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **config}))


def test_greedy_tokens_are_the_argmax_of_the_logits(tiny_model: Path) -> None:
    model = load_reference(tiny_model, torch.float32)
    prompts = [[5, 9, 3, 17], [44, 2], [8, 8, 8, 8, 8, 8, 1]]
    tails = greedy(model, prompts, 6)
    for prompt, tail in zip(prompts, tails, strict=True):
        logits = sequence_logits(model, [*prompt, *tail][:-1], len(prompt) - 1)
        assert logits.shape == (6, 131) and logits.dtype is torch.float32
        assert logits.argmax(-1).tolist() == tail


def test_a_step_is_reported(tiny_model: Path) -> None:
    steps: list[int] = []
    sequence_logits(load_reference(tiny_model, torch.bfloat16), [1, 2, 3], 0, lambda: steps.append(1))
    assert steps == [1]


def test_a_missing_tensor_is_never_random(folder: Path) -> None:
    rewrite(folder, drop="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(EquiportError, match=r"model: weights lack 1 tensors, first model\.layers\.1\.mlp\.up_proj"):
        load_reference(folder, torch.float32)


def test_a_shape_that_does_not_fit(folder: Path) -> None:
    rewrite(folder, intermediate_size=100)
    with pytest.raises(EquiportError, match="model: ") as raised:
        load_reference(folder, torch.float32)
    assert "\n" not in raised.value.line() and raised.value.remedy


@pytest.mark.parametrize("changes", [{"model_type": "lhama"}, {"model_type": ""}, {"hidden_act": "siluu"}])
def test_a_config_that_transformers_does_not_know(folder: Path, changes: dict[str, str]) -> None:
    rewrite(folder, **changes)
    for load in (skeleton, lambda path: load_reference(path, torch.float32)):
        with pytest.raises(EquiportError) as raised:
            load(folder)
        assert "\n" not in raised.value.line() and str(folder) in raised.value.line()


def test_a_model_whose_constructor_reads_a_tensor_has_a_skeleton_too(tmp_path: Path) -> None:
    config = {
        "model_type": "apertus", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 61,
        "num_attention_heads": 2, "num_key_value_heads": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = skeleton(tmp_path)
    assert {parameter.device.type for parameter in found.parameters()} == {"meta"}
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"
