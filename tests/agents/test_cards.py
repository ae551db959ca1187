"""Cards of units: weight rules on tensors and as statements, places against the block's text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equiport.errors import EquiportError
from equiport.port.unit_card import UnitCard, WeightRule, place_faults, read_card, write_card
from equiport.port.unit_weights import apply_rule, rule_faults, rules_by_name, statements, synchronise


def test_rules_on_tensors() -> None:
    class Config:
        heads = 2

    source = {"a": torch.arange(12.0).reshape(6, 2), "b": torch.ones(2, 2), "qkv": torch.arange(12.0).reshape(12, 1)}

    def made(**given: Any) -> torch.Tensor:
        return apply_rule(WeightRule(target="t", **given), source, Config())

    assert torch.equal(made(sources=("a",)), source["a"])
    assert torch.equal(made(op="transpose", sources=("a",)), source["a"].t())
    assert made(op="concat", sources=("b", "a")).shape == (8, 2)
    assert torch.equal(made(op="split", sources=("a",), parts=3, part=1), source["a"][2:4])
    # two heads of [q q | k k | v v]
    assert made(op="split_heads", sources=("qkv",), parts=3, part=1, heads="heads").flatten().tolist() == [2, 3, 8, 9]
    with pytest.raises(EquiportError, match="6 rows are not 4 equal parts"):
        made(op="split", sources=("a",), parts=4)
    with pytest.raises(EquiportError, match="has no c"):
        made(sources=("c",))
    with pytest.raises(EquiportError, match="no number 'width'"):
        made(op="split_heads", sources=("qkv",), parts=3, heads="width")


def test_rules_set_parameters_and_nothing_else() -> None:
    block, source = nn.Linear(2, 3), nn.Linear(2, 3)
    rules = [WeightRule(target=name, sources=(name,)) for name in ("weight", "bias")]
    synchronise(block, source, rules, None)
    assert torch.equal(block.weight, source.weight)
    with pytest.raises(EquiportError, match="the block has no such parameter"):
        synchronise(block, source, [WeightRule(target="other", sources=("bias",))], None)
    with pytest.raises(EquiportError, match=r"the rule makes \[3\], the block has \[3, 2\]"):
        synchronise(block, source, [WeightRule(target="weight", sources=("bias",))], None)


def test_what_rules_leave_out_is_said() -> None:
    target, source = {"x": (1,), "y": (1,), "self.rank_util.rank": (1,)}, {"x": (1,), "z": (1,)}
    faults = rule_faults(
        [WeightRule(target="x", sources=("w",)), WeightRule(target="v", sources=("x",))], target, source
    )
    assert faults == ["y: no rule", "v: the block has no such parameter", "w: the source block has no such tensor",
                      "z: no rule uses it"]  # fmt: skip
    assert rules_by_name(target, source) is None
    assert rules_by_name({"x": (1,)}, {"x": (2,)}) is None
    assert rules_by_name({"x": (1,)}, {"x": (1,)}) == (WeightRule(target="x", sources=("x",)),)


def test_rules_as_statements_do_what_they_do_on_tensors() -> None:
    rules = [
        WeightRule(target="fused.weight", op="concat", sources=("gate.weight", "up.weight")),
        WeightRule(target="down.weight", op="transpose", sources=("out.weight",)),
        WeightRule(target="first.weight", op="split", sources=("pair.weight",), parts=2, part=1),
        WeightRule(target="k.weight", op="split_heads", sources=("qkv.weight",), parts=3, part=1, heads="heads"),
    ]
    shapes = {"gate": (4, 2), "up": (4, 2), "out": (3, 2), "pair": (4, 2), "qkv": (12, 2)}
    given = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}

    class Config:
        heads = 2

    converted = {f"layers.0.ffn.{name}": value for name, value in given.items()}
    names = {"converted": converted, "prefix": "layers.0.", "torch": torch, "config": Config()}
    exec("\n".join(statements(rules, "ffn.", "mlp.")), names)
    assert set(converted) == {f"layers.0.mlp.{rule.target}" for rule in rules}
    for rule in rules:
        assert torch.equal(converted[f"layers.0.mlp.{rule.target}"], apply_rule(rule, given, Config()))
    same = [WeightRule(target="qkv_proj.q_proj.weight", sources=("q_proj.weight",))]
    assert statements(same, "self_attn.", "self_attn.") == []


def test_a_card_is_read_strictly(tmp_path: Path) -> None:
    write_card(tmp_path, UnitCard(unit="mlp", places={"mlp": "X"}))
    assert read_card(tmp_path, "mlp").places == {"mlp": "X"}
    cases = {
        '{"unit": "mlp", "places": {"hat": "X"}}': "places.hat",
        '{"unit": "mlp", "places": {}, "more": 1}': "more",
        '{"unit": "moe", "places": {}}': "is of unit 'moe'",
        '{"unit": "mlp", "places": {}, "weights": [{"target": "a", "op": "melt", "sources": ["b"]}]}': "op",
        '{"unit": "mlp", "places": {}, "weights": [{"target": "a", "op": "concat", "sources": ["b"]}]}': "several",
        '{"unit": ': "is no JSON",
    }
    for text, said in cases.items():
        (tmp_path / "unit.json").write_text(text)
        with pytest.raises(EquiportError, match=said):
            read_card(tmp_path, "mlp")


@pytest.mark.parametrize(
    ("block", "fault"),
    [
        ("class A:\n    def __init__(self, config): ...\n", ""),
        ("class A:\n    def __init__(self, config, more=1): ...\n", ""),
        ("class A(Base):\n    pass\n", ""),
        ("def A(config): ...\n", ""),
        ("class A:\n    def __init__(self): ...\n", "cannot be called as"),
        ("class A:\n    def __init__(self, config, layer): ...\n", "cannot be called as"),
        ("class A:\n    def __init__(self, config, *, layer): ...\n", "cannot be called as"),
        ("class B:\n    pass\n", "is not defined"),
    ],
)
def test_places_are_checked_against_the_text(block: str, fault: str) -> None:
    faults = place_faults(block, {"mlp": "A"}, {"mlp": ("config",)})
    assert (faults == []) if not fault else (len(faults) == 1 and fault in faults[0]), faults


def test_norms_are_called_with_eps_by_name() -> None:
    wanted = {"norm": ("width", "eps")}
    assert place_faults("class N:\n    def __init__(self, width, eps): ...\n", {"norm": "N"}, wanted) == []
    assert place_faults("class N:\n    def __init__(self, width, *, eps=1): ...\n", {"norm": "N"}, wanted) == []
    assert place_faults("class N:\n    def __init__(self, width): ...\n", {"norm": "N"}, wanted)
