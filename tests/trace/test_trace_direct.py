"""Modules called directly: rotary tables out to the last position, embeddings of every id."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equiport.compare.gates import judge
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Verdict
from equiport.fixtures.weights import WeightKind
from equiport.reference.model import Fixture
from equiport.stages.component_check import compare_sample
from equiport.structure.mapping import MappingEntry
from equiport.trace.direct import DirectCalls, DirectPair
from equiport.trace.rotary import far_positions
from equiport.trace.sample import ComponentSample

CONFIG: dict[str, Any] = {"max_position_embeddings": 131072, "rope_theta": 500000.0}


class Rotary(nn.Module):
    """cos and sin of positions x frequencies; `way` is how the frequencies are computed."""

    def __init__(self, way: Callable[[Tensor], Tensor], limit: int | None = None) -> None:
        super().__init__()
        self.frequencies = way(torch.arange(0, 32, 2, dtype=torch.float32) / 32)
        self.limit = limit

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        places = positions if self.limit is None else positions.clamp(max=self.limit)
        angles = places[..., None].float() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Embedding(nn.Module):
    """A lookup; `move` changes the ids first."""

    def __init__(self, weight: Tensor, move: Callable[[Tensor], Tensor] = lambda ids: ids) -> None:
        super().__init__()
        self.weight, self.move, self.num_embeddings = weight, move, len(weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[self.move(ids)]


def plain(exponent: Tensor) -> Tensor:
    return 1.0 / (500000.0**exponent)


def otherwise(exponent: Tensor) -> Tensor:
    """The same in another order: the last bits differ."""
    return torch.exp(-exponent * torch.log(torch.tensor(500000.0)))


def llama3(low: float) -> Callable[[Tensor], Tensor]:
    def scaled(exponent: Tensor) -> Tensor:
        whole = plain(exponent)
        blend = ((8192 * whole / 6.2831853 - low) / (4.0 - low)).clamp(0, 1)
        return blend * whole + (1 - blend) * whole / 8

    return scaled


def sampled(
    tmp_path: Path, source: nn.Module, target: nn.Module, kind: str, config: dict[str, Any] = CONFIG
) -> tuple[list[ComponentSample], list[str]]:
    """The samples of one module `m` on both sides."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    pair = DirectPair(MappingEntry(("m",), ("m",), component_type=kind), "m", "m", ())
    fixture = Fixture(tmp_path, WeightKind.REAL, 0, tiny=False)
    rotary = kind == "rotary"
    calls = DirectCalls(fixture, [pair] if rotary else [], [] if rotary else [pair])
    for run, dtype in (
        ("ref_fp32", torch.float32), ("ref_bf16", torch.bfloat16), ("target", torch.bfloat16),
        ("target_fp32", torch.float32),
    ):  # fmt: skip
        side = source if run.startswith("ref") else target
        if isinstance(side, Embedding):
            side = Embedding(side.weight.to(dtype), side.move)
        calls.take(run, nn.ModuleDict({"m": side}), dtype)
    return calls.samples()


def verdicts(samples: list[ComponentSample]) -> dict[str, Verdict]:
    assert [sample.problem for sample in samples if sample.problem] == []
    return {sample.phase: judge(compare_sample(sample), Thresholds(), 1.2).verdict for sample in samples}


def test_far_positions_reach_the_last_one() -> None:
    far = far_positions(CONFIG)
    assert far is not None and (int(far[0]), int(far[-1])) == (128, 131071) and len(far) == len(far.unique()) > 40
    assert far_positions({"max_position_embeddings": 128}) is None and far_positions({}) is None
    # a switch by length: only what lies in the original range
    scaled = {**CONFIG, "rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}
    inside = far_positions(scaled)
    assert inside is not None and int(inside[-1]) == 4095
    scaled["rope_scaling"] = {"type": "longrope"}
    assert far_positions({**scaled, "original_max_position_embeddings": 64}) is None


@pytest.mark.parametrize("target", [plain, otherwise], ids=["alike", "another order"])
def test_correct_tables_pass_at_all_positions(tmp_path: Path, target: Callable[[Tensor], Tensor]) -> None:
    samples, notes = sampled(tmp_path, Rotary(plain), Rotary(target), "rotary")
    assert verdicts(samples) == {"tables": Verdict.PASS, "far tables": Verdict.PASS} and notes == []
    assert not torch.equal(plain(torch.arange(0, 32, 2) / 32), otherwise(torch.arange(0, 32, 2) / 32))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Rotary(plain), Rotary(plain, limit=8191)),
        (Rotary(plain), Rotary(plain, limit=100000)),
        (Rotary(llama3(1.0)), Rotary(llama3(1.02))),
        (Rotary(plain), Rotary(lambda e: plain(e) * (1 + 3e-6))),
    ],
    ids=["clipped", "clipped late", "another blend", "a frequency off by 3e-6"],
)
def test_wrong_tables_far_out_fail(tmp_path: Path, source: Rotary, target: Rotary) -> None:
    samples, _ = sampled(tmp_path, source, target, "rotary")
    assert verdicts(samples)["far tables"] is Verdict.FAIL


def test_tables_that_cannot_be_had_far_out_are_a_blind_spot(tmp_path: Path) -> None:
    class Short(Rotary):
        def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            table = torch.arange(200)[positions]
            return super().forward(x, table)

    samples, notes = sampled(tmp_path, Rotary(plain), Short(plain), "rotary")
    assert verdicts(samples) == {"tables": Verdict.PASS}
    assert len(notes) == 1 and notes[0].startswith("m: positions from 128 on are not compared: cannot be called")


def test_every_id_is_embedded(tmp_path: Path) -> None:
    weight = torch.randn(5000, 24, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    samples, notes = sampled(tmp_path, Embedding(weight), Embedding(weight), "embedding")
    assert verdicts(samples) == {"vocabulary": Verdict.PASS} and notes == []
    found = compare_sample(samples[0])
    assert found.mode == "exact" and found.shape == (5000, 8)
    for move in (lambda ids: torch.where(ids == 4321, 0, ids), lambda ids: ids.clamp(max=4990)):
        samples, _ = sampled(tmp_path, Embedding(weight), Embedding(weight, move), "embedding")
        assert verdicts(samples) == {"vocabulary": Verdict.FAIL}
    # weights that are no bf16 values: the baseline has an error of its own, one row with a sign turned is seen
    exact = torch.randn(5000, 24, generator=torch.Generator().manual_seed(2))
    turned = exact.clone()
    turned[777] *= -1
    assert verdicts(sampled(tmp_path, Embedding(exact), Embedding(exact), "embedding")[0]) == {
        "vocabulary": Verdict.PASS
    }
    assert verdicts(sampled(tmp_path, Embedding(exact), Embedding(turned), "embedding")[0]) == {
        "vocabulary": Verdict.FAIL
    }


def test_an_embedding_that_refuses_ids_fails_and_one_that_cannot_be_called_is_a_blind_spot(tmp_path: Path) -> None:
    weight = torch.randn(5000, 24)
    samples, _ = sampled(tmp_path, Embedding(weight), Embedding(weight[:4900]), "embedding")
    assert verdicts(samples) == {"vocabulary": Verdict.FAIL}

    class Strange(Embedding):
        def forward(self, ids: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(ids)

    strange = Strange(weight)
    calls = nn.ModuleDict({"m": strange})
    assert calls is not None
    pair = DirectPair(MappingEntry(("m",), ("m",), component_type="embedding"), "m", "m", ())
    (tmp_path / "config.json").write_text("{}")
    direct = DirectCalls(Fixture(tmp_path, WeightKind.REAL, 0, tiny=False), [], [pair])
    direct.take("ref_fp32", nn.ModuleDict({"m": Embedding(weight)}), torch.float32)
    direct.take("target", calls, torch.bfloat16)
    samples, notes = direct.samples()
    assert samples == [] and notes[0].startswith("m: ids that no fixture draws are not compared: cannot be called")
