"""Stored names as transformers renames them on load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from equiport.bench.family_models import FAMILIES, write_model
from equiport.errors import EquiportError
from equiport.fixtures.folder import tensor_headers
from equiport.reference.model import skeleton
from equiport.reference.stored_names import check_stored, loaded_names


def test_names_that_are_renamed_on_load_are_the_model_s(tmp_path: Path) -> None:
    folder = write_model("gpt_neox", tmp_path / "model")
    stored = [header.name for header in tensor_headers(folder)]
    model = skeleton(folder)
    names = loaded_names(model, stored)
    assert "embed_out.weight" in stored
    assert set(names) == set(stored) and set(names.values()) <= set(model.state_dict())
    assert names["embed_out.weight"] in ("embed_out.weight", "lm_head.weight")
    check_stored(model, folder)


def test_a_base_model_s_checkpoint_gets_the_prefix(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"]))
    names = loaded_names(skeleton(tmp_path), ["layers.0.mlp.up_proj.weight", "model.norm.weight", "nowhere.weight"])
    assert names == {
        "layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight": "model.norm.weight",
        "nowhere.weight": "nowhere.weight",
    }


def test_older_versions_rename_by_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(nn.Module):
        base_model_prefix = "model"
        _checkpoint_conversion_mapping = {r"^language_model\.": "model."}

        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 2, bias=False)

    monkeypatch.setitem(__import__("sys").modules, "transformers.conversion_mapping", None)
    assert loaded_names(Old(), ["language_model.weight"]) == {"language_model.weight": "model.weight"}


def test_experts_that_are_merged_on_load_get_one_name(tmp_path: Path) -> None:
    pytest.importorskip("transformers.conversion_mapping")
    config = {
        "model_type": "mixtral", "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 1,
        "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 131, "num_local_experts": 4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = skeleton(tmp_path)
    stored = [f"model.layers.0.block_sparse_moe.experts.{i}.w{j}.weight" for i in range(4) for j in (1, 2, 3)]
    names = loaded_names(model, stored)
    assert len(set(names.values())) == 2 and set(names.values()) <= set(model.state_dict())


def test_a_tensor_that_one_layer_lacks_is_named(tmp_path: Path) -> None:
    from equiport.fixtures.folder import read_config, write_folder

    folder = write_model("llama", tmp_path / "model")
    model, tensors = skeleton(folder), {h.name: torch.zeros(h.shape) for h in tensor_headers(folder)}
    lost = tensors.pop("model.layers.2.self_attn.k_proj.weight")
    write_folder(folder, read_config(folder), tensors)
    with pytest.raises(EquiportError, match=r"weights lack model\.layers\.2\.self_attn\.k_proj\.weight, which other"):
        check_stored(model, folder)
    tensors["model.layers.2.self_attn.k_proj.weight"] = lost[:3].contiguous()
    write_folder(folder, read_config(folder), tensors)
    with pytest.raises(EquiportError, match=r"k_proj\.weight has shape \[3, 48\], config\.json asks for \[16, 48\]"):
        check_stored(model, folder)
