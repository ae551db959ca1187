"""What is proposed for fused projections that a port takes apart, for rotary modules, and for tensors of no module."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from fake_stack import FakeStack, State, provenance_of
from torch import nn

from equiport.structure.mapping import ComponentMapping
from equiport.structure.propose import propose_mapping


class Fused(nn.Module):
    """Rows of each head: query, key, value of 2 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 18, bias=False)


def proposed(folder: Path, source: nn.Module, convert: object) -> ComponentMapping:
    shapes = {name: tuple(value.shape) for name, value in source.state_dict().items()}
    provenance = provenance_of(folder, shapes, convert)  # type: ignore[arg-type]
    stack = FakeStack(convert)  # type: ignore[arg-type]
    target = stack.create_model(None, "", "", folder)
    return propose_mapping(source, target, provenance)


def test_parts_of_a_fused_projection_are_compared_with_their_rows(tmp_path: Path) -> None:
    def convert(state: State) -> State:
        heads = state["qkv.weight"].unflatten(0, (3, 3, 2))
        return {f"{name}_proj.weight": heads[:, place].flatten(0, 1) for place, name in enumerate("qkv")}

    mapping = proposed(tmp_path, Fused(), convert)
    aligns = {entry.name: entry.align for entry in mapping.components}
    assert aligns == {"q_proj": "take:0:2:6:3", "k_proj": "take:2:2:6:3", "v_proj": "take:4:2:6:3"}
    rows = torch.arange(18.0)[None]
    key = next(entry for entry in mapping.components if entry.name == "k_proj")
    assert key.aligned((rows, rows, rows))[0].tolist() == [[2.0, 3.0, 8.0, 9.0, 14.0, 15.0]]


def test_blocks_and_the_whole(tmp_path: Path) -> None:
    mapping = proposed(tmp_path, Fused(), lambda state: {"k_proj.weight": state["qkv.weight"][6:12]})
    assert [entry.align for entry in mapping.components] == ["take:6:6:6:1"]
    # all rows in another order are a fault until something around them proves otherwise
    mapping = proposed(tmp_path, Fused(), lambda state: {"qkv.weight": state["qkv.weight"].flip(0)})
    assert [entry.align for entry in mapping.components] == [""]


def test_a_tensor_that_the_source_has_no_module_for_maps_nothing(tmp_path: Path) -> None:
    source = Fused()
    shapes = {"qkv.weight": (18, 4), "other.weight": (5, 4)}

    def convert(state: State) -> State:
        return {"qkv.weight": state["qkv.weight"], "more.weight": state["other.weight"]}

    provenance = provenance_of(tmp_path, shapes, convert)
    target = FakeStack(convert).create_model(None, "", "", tmp_path)
    mapping = propose_mapping(source, target, provenance)
    assert [entry.name for entry in mapping.components] == ["qkv"]
    renamed = provenance.loaded({"other.weight": "qkv.weight"})
    assert [one.sources for one in renamed.tensors if one.target == "more.weight"] == [("qkv.weight",)]


class RotaryEmbedding(nn.Module):
    """Tables without weights."""


def model_of(layers: int, *, own: bool = True, shared: tuple[str, ...] = ()) -> nn.Module:
    made = nn.Module()
    made.layers = nn.ModuleList(nn.Module() for _ in range(layers))
    for layer in made.layers:
        if own:
            layer.rotary_emb = RotaryEmbedding()
    for name in shared:
        made.add_module(name, RotaryEmbedding())
    return made


def rotary(source: nn.Module, tmp_path: Path) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    (tmp_path / "config.json").write_text(json.dumps({}))
    source.proj, target = nn.Linear(3, 5, bias=False), model_of(2)
    target.proj = nn.Linear(3, 5, bias=False)
    provenance = provenance_of(tmp_path, {"proj.weight": (5, 3)}, dict)
    entries = propose_mapping(source, target, provenance).entries
    found = [(entry.source, entry.target) for entry in entries]
    return [pair for pair in found if any("rotary" in path for side in pair for path in side)]


def test_rotary_modules(tmp_path: Path) -> None:
    layer = ("layers.{i}.rotary_emb",)
    assert rotary(model_of(2, own=False, shared=("rotary_emb",)), tmp_path) == [(("rotary_emb",), layer)]
    assert rotary(model_of(2), tmp_path) == [(layer, layer)]
    both = rotary(model_of(2, shared=("rotary_emb",)), tmp_path)
    assert both == [(layer, layer), (("rotary_emb",), ())]
    several = rotary(model_of(2, own=False, shared=("rotary_emb", "rotary_emb_local")), tmp_path)
    assert several == [(("rotary_emb",), ()), (("rotary_emb_local",), ()), ((), layer)]
