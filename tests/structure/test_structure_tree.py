"""Module trees as stage 0 writes them."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn
from worlds import World

from equiport.structure.tree import build_tree, compress, flat_paths, pretty, write_trees


def model() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]
    return nn.ModuleDict({"layers": nn.ModuleList([*layers, nn.Sequential(nn.Linear(4, 8))]), "norm": nn.LayerNorm(4)})


def test_equal_siblings_are_folded_and_others_are_not() -> None:
    tree = build_tree(model())
    names = [child.name for child in compress(tree).children[0].children]
    assert names == ["[0-2]", "3"]
    assert list(flat_paths(tree)) == [name for name, _ in model().named_modules() if name]
    drawn = pretty(compress(tree))
    assert drawn.splitlines()[0] == "(root): ModuleDict"
    assert "[0-2]: Sequential" in drawn and "norm: LayerNorm (weight [4], bias [4])" in drawn


def test_the_four_files_of_a_side(tmp_path: Path) -> None:
    files = write_trees(tmp_path / "model_tree", "source", build_tree(model()))
    assert [file.name for file in files] == [
        "model_tree_source.json", "model_tree_source_full.json", "model_tree_source_pretty.txt",
        "model_tree_source_flat_paths.txt",
    ]  # fmt: skip
    full = json.loads(files[1].read_text())
    assert len(full["children"][0]["children"]) == 4 and len(json.loads(files[0].read_text())["children"]) == 2
    assert full["children"][1] == {"name": "norm", "class": "LayerNorm", "parameters": {"weight": [4], "bias": [4]}}


def test_trees_of_a_real_run(done: World) -> None:
    folder = done.exp / "model_tree"
    assert len(list(folder.iterdir())) == 8
    source = (folder / "model_tree_source_flat_paths.txt").read_text().split()
    target = (folder / "model_tree_target_flat_paths.txt").read_text().split()
    assert "model.layers.1.self_attn.q_proj" in source and "layers.1.self_attn.qkv_proj.q_proj" in target
    assert "[0-1]: LlamaDecoderLayer" in (folder / "model_tree_source_pretty.txt").read_text()
