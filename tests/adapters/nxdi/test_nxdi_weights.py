"""What the load report tells: nothing of a right port; what is missing, unexpected or mis-shaped of a wrong one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from nxdi_llama_cases import CAUSAL, CONFIG, INNER, PORT
from safetensors.torch import load_file, save_file
from torch import Tensor

from equiport.errors import EquiportError
from equiport.stacks.contract import LoadReport, StackAdapter


@pytest.fixture
def folder(plain_folder: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "hf"
    shutil.copytree(plain_folder, copy)
    return copy


def edited_port(tmp_path: Path, stem: str, old: str, new: str) -> Path:
    text = PORT.read_text()
    assert text.count(old) == 1
    path = tmp_path / f"modeling_{stem}.py"
    path.write_text(text.replace(old, new))
    return path


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load(adapter: StackAdapter, folder: Path, port: Path = PORT, name: str = CAUSAL) -> LoadReport:
    model = adapter.create_model(port, name, CONFIG, folder, dtype=torch.float32, batch_size=1, seq_len=16)
    return adapter.load_weights(model, folder, torch.float32)


@pytest.mark.parametrize("name", [CAUSAL, INNER])
def test_a_right_port_is_clean_and_everything_arrives(adapter: StackAdapter, folder: Path, name: str) -> None:
    report = load(adapter, folder, name=name)
    assert report.clean
    assert {"embed_tokens.weight", "norm.weight", "lm_head.weight", "layers.2.mlp.up_proj.weight"} <= set(report.loaded)
    assert any("kv_mgr" in key for key in report.benign)
    assert not any("proj" in key or "norm" in key for key in report.benign)


@pytest.mark.parametrize("name", [CAUSAL, INNER])
@pytest.mark.parametrize("key", ["norm.weight", "layers.1.mlp.gate_proj.weight", "layers.0.input_layernorm.weight"])
def test_a_weight_that_is_not_there_is_missing(adapter: StackAdapter, folder: Path, key: str, name: str) -> None:
    edit(folder, lambda weights: weights.pop(f"model.{key}"))
    report = load(adapter, folder, name=name)
    assert (report.missing, report.unexpected, report.mis_shaped) == ((key,), (), ())
    assert not report.clean


def test_a_missing_attention_weight_stops_the_conversion(adapter: StackAdapter, folder: Path) -> None:
    edit(folder, lambda weights: weights.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(EquiportError, match=r"conversion fails: lacks .*layers\.1\.self_attn.*k_proj\.weight"):
        load(adapter, folder)


def test_a_weight_nobody_wants_is_unexpected(adapter: StackAdapter, folder: Path) -> None:
    edit(folder, lambda weights: weights.update({"model.layers.0.mlp.extra.weight": torch.ones(4)}))
    assert load(adapter, folder).unexpected == ("layers.0.mlp.extra.weight",)


def test_old_checkpoints_constants_are_no_finding(adapter: StackAdapter, folder: Path) -> None:
    edit(folder, lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert load(adapter, folder).clean


@pytest.mark.parametrize("name", [CAUSAL, INNER])
def test_biases_that_a_port_drops_are_unexpected(
    adapter: StackAdapter, make_folder: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    folder = make_folder(attention_bias=True, mlp_bias=True)
    assert load(adapter, folder).clean
    no_qkv = edited_port(tmp_path, "drops_qkv", "qkv_bias=config.attention_bias", "qkv_bias=False")
    dropped = {f"layers.{layer}.self_attn.{part}_proj.bias" for layer in range(3) for part in "qkv"}
    assert set(load(adapter, folder, no_qkv, name).unexpected) == dropped
    no_mlp = edited_port(tmp_path, "drops_mlp", '"bias": config.mlp_bias', '"bias": False')
    dropped = {f"layers.{layer}.mlp.{part}_proj.bias" for layer in range(3) for part in ("gate", "up", "down")}
    assert set(load(adapter, folder, no_mlp, name).unexpected) == dropped


@pytest.mark.parametrize("key", ["norm.weight", "layers.1.mlp.down_proj.weight"])
def test_a_wrong_shape_is_mis_shaped(adapter: StackAdapter, folder: Path, key: str) -> None:
    def halve(weights: dict[str, Tensor]) -> None:
        weights[f"model.{key}"] = weights[f"model.{key}"][: len(weights[f"model.{key}"]) // 2].clone()

    edit(folder, halve)
    report = load(adapter, folder)
    assert report.mis_shaped == (key,)
    assert not report.clean


def test_a_tied_head_that_is_not_restored_is_missing(
    adapter: StackAdapter, make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    port = edited_port(
        tmp_path, "forgets_head", 'state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()', "pass"
    )
    assert load(adapter, make_folder(tie_word_embeddings=True), port).missing == ("lm_head.weight",)


def test_bad_weight_files(adapter: StackAdapter, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(EquiportError, match=r"model\.safetensors: damaged or truncated"):
        load(adapter, folder)
    file.unlink()
    with pytest.raises(EquiportError, match="holds no weights"):
        load(adapter, folder)


def test_another_dtype_than_the_models(adapter: StackAdapter, folder: Path) -> None:
    model = adapter.create_model(PORT, CAUSAL, CONFIG, folder, dtype=torch.float32, batch_size=1, seq_len=16)
    with pytest.raises(EquiportError, match="dtype: .*bfloat16 weights are asked for"):
        adapter.load_weights(model, folder, torch.bfloat16)


def test_weights_come_from_the_folder_that_is_named(adapter: StackAdapter, folder: Path, plain_folder: Path) -> None:
    edit(folder, lambda weights: weights.update({"model.norm.weight": torch.full((64,), 5.0)}))
    model = adapter.create_model(PORT, CAUSAL, CONFIG, plain_folder, dtype=torch.float32, batch_size=1, seq_len=16)
    assert adapter.load_weights(model, folder, torch.float32).clean
    norm = adapter.inner_model(model).norm.weight
    assert isinstance(norm, Tensor)
    assert torch.equal(norm, torch.full((64,), 5.0))
