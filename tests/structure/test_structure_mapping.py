"""component_mapping.json: read, expanded, checked, aligned; and what stage 0 proposes for the example port."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from worlds import World

from equiport.errors import EquiportError, ExitCode
from equiport.structure.mapping import (
    ComponentMapping,
    MappingEntry,
    check_mapping,
    fill,
    load_mapping,
    save_mapping,
)
from equiport.structure.tree import with_index

SOURCE = ["model", "model.layers", *(f"model.layers.{i}{part}" for i in range(3) for part in ("", ".mlp", ".norm"))]
TARGET = ["layers", *(f"layers.{i}{part}" for i in range(3) for part in ("", ".mlp", ".norm"))]


def read(tmp_path: Path, value: object) -> ComponentMapping:
    file = tmp_path / "component_mapping.json"
    file.write_text(value if isinstance(value, str) else json.dumps(value))
    return load_mapping(file, SOURCE, TARGET)


@pytest.mark.parametrize(
    "entry",
    [
        [["model.layers.{i}.mlp"], ["layers.{i}.mlp"]],
        ["model.layers.{i}.mlp", "layers.{i}.mlp", "why"],
        {"source": "model.layers.{i}.mlp", "target": ["layers.{i}.mlp"], "reasoning": "why"},
        [["model.layers.{i}.mlp"], ["layers.{i}.mlp"], {"indices": [0, 1, 2]}],
    ],
)
def test_placeholders_expand_over_the_tree(tmp_path: Path, entry: object) -> None:
    mapping = read(tmp_path, [entry])
    assert mapping.entries[0].instances() == [
        ((f"model.layers.{i}.mlp",), (f"layers.{i}.mlp",), (i,)) for i in range(3)
    ]
    assert mapping.components == mapping.entries and mapping.entries[0].name == "layers.{i}.mlp"


def test_goes_round(tmp_path: Path) -> None:
    mapping = ComponentMapping(
        (
            MappingEntry(("a", "b"), ("ab",), "fused", (), 4, "linear", "repeat:2:3"),
            MappingEntry(("model.layers.{i}.mlp",), ("layers.{i}.mlp",), "r", ((0,), (2,))),
            MappingEntry(("qkv",), ("k",), "rows", (), None, "linear", "take:16:16:48:6"),
            MappingEntry((), ("rank",), "the stack's own"),
            MappingEntry(("x.{i}.{j}",), ("y.{i}.{j}",), "", ((0, 1), (1, 0))),
        )
    )
    save_mapping(tmp_path / "m.json", mapping)
    assert load_mapping(tmp_path / "m.json", [], []) == mapping
    assert [entry.is_component for entry in mapping.entries] == [True, True, True, False, True]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "non-empty JSON array"),
        ({"a": "b"}, "non-empty JSON array"),
        ([["a"]], "entry 0: is no"),
        ([["a", "b"], 3], "entry 1: is no"),
        ([[[1], ["b"]]], "entry 0: module lists must hold strings"),
        ([[[], []]], "entry 0: names no module"),
        ([["a", "b", {"reason": "x"}]], r"entry 0: unknown notes \['reason'\]; known are"),
        ([["a", "b", 7]], "entry 0: unknown notes"),
        ([["a", "b", {"reduction_split": 0}]], "entry 0: reduction_split must be a positive integer"),
        ([["a", "b", {"align": "repeat:2"}]], "entry 0: align 'repeat:2' is unknown"),
    ],
)
def test_a_bad_file(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(EquiportError, match=rf"component_mapping\.json: .*{message}") as raised:
        read(tmp_path, value)
    assert raised.value.exit_code is ExitCode.BAD_INPUT
    assert raised.value.remedy and "\n" not in raised.value.line()


def test_unknown_and_unmapped_modules_are_named(tmp_path: Path) -> None:
    mapping = read(
        tmp_path,
        [
            [["model.layers.{i}.mlp"], ["layers.{i}.mlp"]],
            [["model.layers.{i}.nowhere"], ["layers.{i}.norm"]],
            [["model.layers.{i}"], ["layers.{i}"]],
            [["model", "model.layers"], [], "containers"],
        ],
    )
    check = check_mapping(mapping, SOURCE, TARGET)
    assert not check.complete
    assert [(item.entry, item.problem) for item in check.problems] == [
        ("layers.{i}.norm", f"the source has no module 'model.layers.{i}.nowhere'") for i in range(3)
    ]
    assert check.unmapped_target == ("layers",)


def test_an_explained_module_explains_what_is_in_it() -> None:
    mapping = ComponentMapping((MappingEntry((), ("layers",), "all of it"),))
    assert check_mapping(mapping, [], TARGET).complete
    assert not check_mapping(mapping, [], [*TARGET, "layersmith"]).complete


def test_alignment_takes_a_part_of_the_reference_sides() -> None:
    channels = torch.arange(12.0)[None]
    entry = MappingEntry(("qkv",), ("k_proj",), align="take:2:2:6:2,11:1:1:1")
    taken = entry.aligned((channels, channels, torch.zeros(1, 5)))
    assert taken[0].tolist() == taken[1].tolist() == [[2.0, 3.0, 8.0, 9.0, 11.0]]
    assert taken[2].shape == (1, 5)


def test_alignment_repeats_the_reference_sides_alone() -> None:
    entry = MappingEntry(("k",), ("k",), align="repeat:2:3")
    reference, target = torch.arange(12.0).reshape(2, 6), torch.zeros(2, 12)
    first, second, third, fourth = entry.aligned((reference, reference + 1, target, target))
    assert first[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]
    assert torch.equal(second, first + 1) and third is target and fourth is target
    plain = MappingEntry(("k",), ("k",))
    assert plain.aligned((reference, reference, target)) == (reference, reference, target)


@pytest.mark.parametrize(
    ("path", "name", "index"),
    [
        ("layers.7.mlp", "layers.{i}.mlp", (7,)),
        ("layers.7", "layers.{i}", (7,)),
        ("a.3.b.11.c", "a.{i}.b.{j}.c", (3, 11)),
        ("layer2.norm", "layer2.norm", ()),
        ("norm", "norm", ()),
    ],
)
def test_indexed_names(path: str, name: str, index: tuple[int, ...]) -> None:
    assert with_index(path) == (name, index)
    assert fill(name, index) == path


def test_the_proposal_for_the_example_port(done: World) -> None:
    entries = {
        tuple(target): (source, notes)
        for source, target, notes in json.loads((done.exp / "component_mapping.json").read_text())
    }
    for target, source in {
        "layers.{i}.self_attn.qkv_proj.q_proj": "model.layers.{i}.self_attn.q_proj",
        "layers.{i}.self_attn.o_proj.o_proj": "model.layers.{i}.self_attn.o_proj",
        "layers.{i}.mlp.gate_proj": "model.layers.{i}.mlp.gate_proj",
        "layers.{i}.mlp.up_proj": "model.layers.{i}.mlp.up_proj",
        "layers.{i}": "model.layers.{i}",
        "norm": "model.norm",
        "embed_tokens": "model.embed_tokens",
        "lm_head": "lm_head",  # tied: the head maps to the head, not to the embedding
        "layers.{i}.self_attn.rotary_emb": "model.rotary_emb",
    }.items():
        assert entries[(target,)][0] == [source], target
        assert entries[(target,)][1]["reasoning"] and entries[(target,)][1]["component_type"]
    explained = [target for target, (source, _) in entries.items() if not source]
    assert explained and all(entries[target][1]["reasoning"] for target in explained)
    assert entries[("layers.{i}.mlp",)][1]["indices"] == [0, 1]
    metrics = done.result(0)["metrics"]
    assert metrics["unconsumed"] == [] and metrics["computed"] == []
