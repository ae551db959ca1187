"""Teacher forcing against one plain forward of the same model, through an adapter that serves a HuggingFace model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from equiport.errors import EquiportError
from equiport.stacks.contract import ModelLimits, StackAdapter
from equiport.stacks.teacher_forcing import decode_logits, prefill_logits

LENGTHS = (5, 11, 3, 8, 1)


class Recomputing(StackAdapter):
    """Serves a HuggingFace model: keeps each row's tokens and runs the whole row again for each step."""

    name = "recomputing"

    def __init__(self, batch_size: int, seq_len: int) -> None:
        self.shape = ModelLimits(batch_size, seq_len)
        self.rows: list[list[int]] = []
        self.calls: list[tuple[int, ...]] = []

    def check_environment(self, *, compiled: bool = False) -> Any:
        raise NotImplementedError

    def init_distributed(self, tp_degree: int = 1) -> None:
        raise NotImplementedError

    def create_model(self, *args: Any, **kw: Any) -> nn.Module:
        raise NotImplementedError

    def load_weights(self, *args: Any, **kw: Any) -> Any:
        raise NotImplementedError

    def device_inference(self, *args: Any, **kw: Any) -> Any:
        raise NotImplementedError

    def inner_model(self, model: nn.Module) -> nn.Module:
        return model

    def limits(self, model: nn.Module) -> ModelLimits:
        return self.shape

    def forward(
        self,
        model: nn.Module,
        input_ids: Tensor,
        *,
        lengths: Tensor | None = None,
        positions: Tensor | None = None,
        **kw: Any,
    ) -> Tensor:
        assert input_ids.shape[0] == self.shape.batch_size
        self.calls.append(tuple(input_ids.shape))
        if lengths is not None:
            self.rows = [row[:length].tolist() for row, length in zip(input_ids, lengths, strict=True)]
        else:
            assert positions is not None
            assert positions.tolist() == [len(row) for row in self.rows]
            self.rows = [row + ids.tolist() for row, ids in zip(self.rows, input_ids, strict=True)]
        with torch.no_grad():
            return torch.stack([model(torch.tensor([row])).logits[0, -1] for row in self.rows])


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 61, (length + 6,), generator=generator).tolist() for length in LENGTHS]


def whole(model: nn.Module, row: Sequence[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([list(row)])).logits[0]


@pytest.mark.parametrize("batch_size", [1, 2, 5, 8])
@pytest.mark.parametrize("steps", [None, 1, 7])
def test_decode_equals_one_forward(
    model: nn.Module, sequences: list[list[int]], batch_size: int, steps: int | None
) -> None:
    adapter = Recomputing(batch_size, 18)
    got = decode_logits(adapter, model, sequences, LENGTHS, steps)
    count = steps or 6
    assert got.shape == (5, count, 61)
    for row, (tokens, length) in enumerate(zip(sequences, LENGTHS, strict=True)):
        torch.testing.assert_close(got[row], whole(model, tokens)[length - 1 : length - 1 + count], rtol=0, atol=1e-5)
    assert len(adapter.calls) == -(-5 // batch_size) * count


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_prefill_equals_one_forward(model: nn.Module, sequences: list[list[int]], batch_size: int) -> None:
    prefixes = [7, 2, 9, 14, 1]
    got = prefill_logits(Recomputing(batch_size, 14), model, sequences, prefixes)
    wanted = torch.stack([whole(model, row)[end - 1] for row, end in zip(sequences, prefixes, strict=True)])
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


def test_a_row_does_not_see_its_neighbours(model: nn.Module, sequences: list[list[int]]) -> None:
    together = decode_logits(Recomputing(5, 18), model, sequences, LENGTHS)
    alone = decode_logits(Recomputing(1, 18), model, [sequences[2]], [LENGTHS[2]])
    torch.testing.assert_close(together[2], alone[0], rtol=0, atol=1e-5)


def test_bad_input(model: nn.Module, sequences: list[list[int]]) -> None:
    adapter = Recomputing(2, 18)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("4 lengths", {"prompt_lengths": LENGTHS[:-1]}),
        ("length 0 of row 0", {"prompt_lengths": (0, *LENGTHS[1:])}),
        ("length 12 of row 0", {"prompt_lengths": (12, *LENGTHS[1:])}),
        ("8 steps need 7 forced tokens", {"steps": 8}),
        ("steps: 0 steps", {"steps": 0}),
        (r"forced tokens\. Give steps", {"prompt_lengths": (4, *LENGTHS[1:])}),
    ]
    for message, change in cases:
        with pytest.raises(EquiportError, match=message):
            decode_logits(adapter, model, sequences, **{"prompt_lengths": LENGTHS, **change})
    with pytest.raises(EquiportError, match="needs 16 positions, the model was made for 15"):
        decode_logits(Recomputing(2, 15), model, sequences, LENGTHS)
    with pytest.raises(EquiportError, match="needs 14 positions"):
        prefill_logits(Recomputing(2, 13), model, sequences, [1, 1, 1, 14, 1])
    with pytest.raises(EquiportError, match="0 sequences"):
        prefill_logits(adapter, model, [], [])
    assert adapter.calls == []
