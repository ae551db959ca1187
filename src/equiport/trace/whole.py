"""Logits of whole models in fp32 under batches of many shapes: alone, in a batch, far out, in a cache used before."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equiport.fixtures.tokens import TokenBatch
from equiport.reference.model import quiet_transformers
from equiport.stacks.contract import StackAdapter
from equiport.stacks.port_classes import PortClasses
from equiport.stacks.teacher_forcing import decode_logits, prefill_logits


@dataclass(frozen=True)
class ShapeRun:
    """One batch shape: its name, tokens, and the length that the port is made for."""

    name: str
    batch: TokenBatch
    seq_len: int


@dataclass(frozen=True)
class PortLogits:
    """fp32 logits of a port for one shape.

    `decode` [B, steps + 1, V] predict from the prompt's last token on; `again` are the same from the same model after
    it served another batch; `prefill` [B, V] come from the whole rows in one prefill.
    """

    decode: Tensor
    again: Tensor
    prefill: Tensor


def make_model(
    adapter: StackAdapter,
    classes: PortClasses,
    folder: Path,
    batch_size: int,
    seq_len: int,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """The port's causal-LM in this dtype with the folder's weights."""
    adapter.init_distributed(1)
    model = adapter.create_model(
        classes.modeling_file,
        classes.causal or classes.inner,
        classes.config,
        folder,
        dtype=dtype,
        batch_size=batch_size,
        seq_len=seq_len,
    )
    adapter.load_weights(model, folder, dtype)
    return model


def port_logits(adapter: StackAdapter, classes: PortClasses, folder: Path, shape: ShapeRun) -> PortLogits:
    """Run one shape: prefill and decode, then another batch, then the same again, then whole rows by prefill."""
    batch = shape.batch
    model = make_model(adapter, classes, folder, batch.batch_size, shape.seq_len)

    def run(rows: Sequence[Sequence[int]]) -> Tensor:
        return decode_logits(adapter, model, rows, batch.prompt_lengths, batch.decode_steps + 1)

    first = run(batch.rows)
    run([list(reversed(row)) for row in batch.rows])
    again = run(batch.rows)
    whole = prefill_logits(adapter, model, batch.rows, [len(row) for row in batch.rows])
    return PortLogits(first, again, whole)


def port_logits_bf16(adapter: StackAdapter, classes: PortClasses, folder: Path, shape: ShapeRun) -> Tensor:
    """[B, steps + 1, V] float32 of the port in bf16: prefill and decode, once."""
    batch = shape.batch
    model = make_model(adapter, classes, folder, batch.batch_size, shape.seq_len, torch.bfloat16)
    return decode_logits(adapter, model, batch.rows, batch.prompt_lengths, batch.decode_steps + 1).float()


def reference_logits(model: nn.Module, batch: TokenBatch) -> Tensor:
    """[B, steps + 1, V] float32, each row alone in one forward: what the port's decode predicts."""
    rows = []
    with torch.no_grad():
        for row, length in zip(batch.rows, batch.prompt_lengths, strict=True):
            logits = model(input_ids=torch.tensor([list(row)]), use_cache=False).logits
            rows.append(logits[0, length - 1 :].float())
    return torch.stack(rows)


def reference_batch(model: nn.Module, batch: TokenBatch) -> Tensor:
    """The same from all rows in one right-padded batch: [B, steps + 1, V] float32."""
    with torch.no_grad():
        logits = model(input_ids=batch.padded(), attention_mask=batch.mask(), use_cache=False).logits
    steps = batch.decode_steps + 1
    starts = [length - 1 for length in batch.prompt_lengths]
    return torch.stack([logits[row, start : start + steps].float() for row, start in enumerate(starts)])


def reference_decode(model: Any, batch: TokenBatch) -> Tensor:
    """The same from the source's own KV cache, token by token: [B, steps + 1, V] float32."""
    rows = []
    # the cache's keyword is renamed in later versions
    with torch.no_grad(), quiet_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for row, length in zip(batch.rows, batch.prompt_lengths, strict=True):
            out = model(input_ids=torch.tensor([list(row[:length])]), use_cache=True)
            found = [out.logits[0, -1]]
            for token in row[length:]:
                out = model(input_ids=torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
                found.append(out.logits[0, -1])
            rows.append(torch.stack(found).float())
    return torch.stack(rows)
