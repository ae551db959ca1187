"""Where each target tensor came from, found by value through the conversion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_stack import State, provenance_of

from equiport.structure.provenance import Origin

SHAPES = {"q": (8, 6), "k": (4, 6), "v": (4, 6), "o": (6, 8), "norm": (6,), "emb": (10, 6), "square": (6, 6)}


def fused(s: State) -> State:
    return {"qkv.w": torch.cat([s["q"], s["k"], s["v"]])}


def interleaved(s: State) -> State:
    rows = [part for kv in range(2) for part in (s["q"][4 * kv : 4 * kv + 4], s["k"][2 * kv : 2 * kv + 2])]
    return {"qk.w": torch.cat(rows)}


CASES: dict[str, tuple[Callable[[State], State], str, Origin, tuple[str, ...]]] = {
    "copied": (lambda s: {"a.w": s["q"].clone()}, "a.w", Origin.COPIED, ("q",)),
    "copied vector": (lambda s: {"a.w": s["norm"].clone()}, "a.w", Origin.COPIED, ("norm",)),
    "transposed": (lambda s: {"a.w": s["o"].t().contiguous()}, "a.w", Origin.TRANSPOSED, ("o",)),
    "transposed square": (lambda s: {"a.w": s["square"].t().contiguous()}, "a.w", Origin.TRANSPOSED, ("square",)),
    "fused": (fused, "qkv.w", Origin.FUSED, ("q", "k", "v")),
    "fused by groups": (interleaved, "qk.w", Origin.FUSED, ("q", "k")),
    "split": (lambda s: {"a.w": s["q"][4:].clone()}, "a.w", Origin.ROWS, ("q",)),
    "replicated": (
        lambda s: {"a.w": s["k"].view(2, 2, 6).repeat_interleave(2, dim=0).reshape(8, 6)}, "a.w", Origin.ROWS, ("k",)
    ),
    "columns reversed": (lambda s: {"a.w": s["q"].flip(1).contiguous()}, "a.w", Origin.ELEMENTS, ("q",)),
    "tied": (lambda s: {"e.w": s["emb"], "head.w": s["emb"].clone()}, "head.w", Origin.COPIED, ("emb",)),
    "not from the weights": (lambda s: {"a.w": torch.arange(4.0)}, "a.w", Origin.CONSTANT, ()),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_origins(tmp_path: Path, name: str) -> None:
    convert, target, origin, sources = CASES[name]
    found = provenance_of(tmp_path / "m", SHAPES, convert).of(target)
    assert found is not None
    assert (found.origin, found.sources) == (origin, sources)
    assert all(source in found.describe() for source in sources)


def test_rows_are_followed(tmp_path: Path) -> None:
    found = provenance_of(tmp_path / "m", SHAPES, fused).of("qkv.w")
    assert found is not None and found.shape == (16, 6)
    expected = [(0, row) for row in range(8)] + [(1, row) for row in range(4)] + [(2, row) for row in range(4)]
    assert found.row_map == tuple(expected)
    split = provenance_of(tmp_path / "n", SHAPES, lambda s: {"a.w": s["q"][4:].clone()}).of("a.w")
    assert split is not None and split.row_map == tuple((0, row) for row in range(4, 8))


def test_what_arrives_nowhere_and_what_is_not_there(tmp_path: Path) -> None:
    found = provenance_of(tmp_path / "m", SHAPES, fused)
    assert found.unconsumed == tuple(sorted(set(SHAPES) - {"q", "k", "v"}))
    assert found.of("nothing.w") is None
    assert found.load.loaded == ("qkv.w",)


def test_a_value_computed_from_weights_is_not_called_copied(tmp_path: Path) -> None:
    found = provenance_of(tmp_path / "m", SHAPES, lambda s: {"a.w": s["q"] @ s["square"], "b.w": s["norm"].exp()})
    for name in ("a.w", "b.w"):
        tensor = found.of(name)
        assert tensor is not None and tensor.origin is Origin.COMPUTED


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    (tmp_path / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    provenance_of(tmp_path / "m", SHAPES, fused)
    with pytest.raises(KeyError):
        provenance_of(tmp_path / "m", SHAPES, lambda s: {"a.w": s["gone"]})
    assert list((tmp_path / "t").iterdir()) == []


def test_folded_norm_offset_is_seen(tmp_path: Path) -> None:
    found = provenance_of(tmp_path / "m", SHAPES, lambda s: {"a.w": s["norm"] + 1, "b.w": s["norm"] * 1.5})
    for name in ("a.w", "b.w"):
        tensor = found.of(name)
        assert tensor is not None and tensor.origin is not Origin.COPIED and tensor.origin is not Origin.CONSTANT


def test_parts_of_a_transposed_tensor_tell_their_columns(tmp_path: Path) -> None:
    def convert(s: State) -> State:
        return {
            "part.w": s["o"].t()[2:5].contiguous(),
            "whole.w": s["o"].t().contiguous(),
            "rows.w": s["o"][2:4].clone(),
            "mixed.w": torch.cat([s["o"].t()[:4, :3], s["o"].t()[4:, 3:]]),
        }

    found = provenance_of(tmp_path / "m", SHAPES, convert)
    columns = {tensor.target: tensor.column_map for tensor in found.tensors}
    assert columns == {"part.w": (2, 3, 4), "whole.w": tuple(range(8)), "rows.w": None, "mixed.w": None}


ROUNDED: dict[str, tuple[Callable[[State], State], Origin, tuple[str, ...]]] = {
    "copied": (lambda s: {"a.w": s["q"].bfloat16().float()}, Origin.COPIED, ("q",)),
    "one of many": (lambda s: {"a.w": s["w99"].bfloat16().float()}, Origin.COPIED, ("w99",)),
    "fused": (lambda s: {"a.w": torch.cat([s["q"], s["k"]]).bfloat16().float()}, Origin.FUSED, ("q", "k")),
    "transposed": (lambda s: {"a.w": s["o"].t().bfloat16().float().contiguous()}, Origin.TRANSPOSED, ("o",)),
    "long": (lambda s: {"a.w": s["long"].flip(0).bfloat16().float()}, Origin.ROWS, ("long",)),
    "times three": (lambda s: {"a.w": (3 * s["norm"]).bfloat16().float()}, Origin.COMPUTED, ()),
    "plus one": (lambda s: {"a.w": (s["norm"] + 1).bfloat16().float()}, Origin.COMPUTED, ()),
    "a product": (lambda s: {"a.w": (s["q"] @ s["square"]).bfloat16().float()}, Origin.COMPUTED, ()),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_a_cast_to_bf16_is_seen_through_and_arithmetic_is_not(tmp_path: Path, name: str) -> None:
    convert, origin, sources = ROUNDED[name]
    shapes = {**SHAPES, "long": (300, 2), **{f"w{number}": (2, 2) for number in range(100)}}
    found = provenance_of(tmp_path / "m", shapes, convert).of("a.w")
    assert found is not None and (found.origin, found.sources) == (origin, sources)
    assert ("rounded to bf16" in found.note) == bool(sources)
    if name == "long":
        assert found.row_map == tuple((0, row) for row in reversed(range(300)))
