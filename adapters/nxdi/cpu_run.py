"""Prefill, decode and greedy generation of an NxD Inference model in CPU mode."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equiport.errors import EquiportError
from equiport.stacks.contract import Generation, ModelLimits, StackAdapter

# The stack finds the last token by the largest position: padding must never hold it. It pads positions with this value.
_PAD_POSITION = 1


def prefill(model: nn.Module, input_ids: Tensor, lengths: Tensor, limits: ModelLimits) -> Tensor:
    """Logits [B, V] float32 after the first `lengths` tokens of right-padded `input_ids` [B, T]."""
    rows, width = input_ids.shape
    _check(model, input_ids, lengths, limits)
    if int(lengths.min()) < 1 or int(lengths.max()) > width:
        raise EquiportError(
            f"lengths {lengths.tolist()} do not fit in {width} tokens", field="lengths", remedy="1 <= length <= T."
        )
    used = int(lengths.max())
    # One model serves both stages in CPU mode, so a prefill is always as wide as the cache.
    ids = torch.zeros(rows, limits.seq_len, dtype=torch.long)
    ids[:, :used] = input_ids[:, :used]
    slots = torch.arange(limits.seq_len)[None]
    real = slots < lengths[:, None]
    positions = slots.expand(rows, -1).masked_fill(~real, _PAD_POSITION)
    logits = _call(model, ids.masked_fill(~real, 0), real.long(), positions)
    model._equiport_prefilled = True  # type: ignore[assignment]
    return logits


def decode_step(model: nn.Module, input_ids: Tensor, positions: Tensor, limits: ModelLimits) -> Tensor:
    """Logits [B, V] float32 after one more token [B, 1] at `positions` [B]."""
    _check(model, input_ids, positions + 1, limits)
    if input_ids.shape[1] != 1:
        raise EquiportError(f"a decode step takes one token a row, not {input_ids.shape[1]}", field="input_ids")
    if not getattr(model, "_equiport_prefilled", False):
        raise EquiportError("decode without a prefill", field="positions", remedy="Prefill the prompts first.")
    if int(positions.min()) < 1:
        raise EquiportError("a decode step follows at least one token", field="positions")
    # The mask is of the prior tokens; the stack adds the active one by itself.
    prior = torch.arange(limits.seq_len)[None] < positions[:, None]
    return _call(model, input_ids.long(), prior.long(), positions[:, None].long())


def greedy(
    adapter: StackAdapter,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    eos_token_ids: Collection[int] = (),
    tokenizer: Any = None,
    with_logits: bool = False,
) -> list[Generation]:
    """Argmax generation of `max_tokens` tokens a prompt, in batches of the model's size; a row ends after an eos
    token.
    """
    size = adapter.limits(model).batch_size
    out: list[Generation] = []
    for first in range(0, len(prompts), size):
        batch = list(prompts[first : first + size])
        filled = batch + [batch[-1]] * (size - len(batch))
        steps = _greedy_batch(adapter, model, filled, max_tokens)
        tokens = torch.stack([step.argmax(-1) for step in steps], dim=1)
        for row in range(len(batch)):
            kept = tokens[row].tolist()
            ends = [index for index, token in enumerate(kept) if token in eos_token_ids]
            kept = kept[: ends[0] + 1] if ends else kept
            logits = torch.stack([step[row] for step in steps[: len(kept)]]) if with_logits else None
            text = tokenizer.decode(kept, skip_special_tokens=True) if tokenizer is not None else ""
            out.append(Generation(tuple(kept), text, logits))
    return out


def _greedy_batch(
    adapter: StackAdapter, model: nn.Module, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[Tensor]:
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(list(prompt))
    steps = [adapter.forward(model, ids, lengths=lengths)]
    for step in range(max_tokens - 1):
        steps.append(adapter.forward(model, steps[-1].argmax(-1, keepdim=True), positions=lengths + step))
    return steps


def _check(model: nn.Module, input_ids: Tensor, needed: Tensor, limits: ModelLimits) -> None:
    rows = input_ids.shape[0]
    if rows != limits.batch_size:
        raise EquiportError(
            f"{rows} rows for a model made for {limits.batch_size}", field="batch_size", remedy="Fill the batch up."
        )
    if needed.shape != (rows,):
        raise EquiportError(f"wants one value a row, got shape {list(needed.shape)}", field="lengths/positions")
    if int(needed.max()) > limits.seq_len:
        raise EquiportError(
            f"a row needs {int(needed.max())} positions, the model was made for {limits.seq_len}",
            field="seq_len",
            remedy="Make the model with a larger seq_len.",
        )
    vocabulary = getattr(model.config, "vocab_size", None)
    if vocabulary is not None and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < vocabulary:
        raise EquiportError(
            f"token {int(input_ids.max())} is outside the vocabulary of {vocabulary}", field="input_ids"
        )


def _call(model: nn.Module, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    rows = torch.arange(ids.shape[0])
    with torch.no_grad():
        if hasattr(model, "to_cpu"):
            if model.models[0].model is None:  # type: ignore[index,union-attr]
                raise EquiportError(
                    "the model has no weights yet", field="model", remedy="Call load_weights, and read its report."
                )
            out = model(input_ids=ids, attention_mask=mask, position_ids=positions, seq_ids=rows)
            return _last(out.logits)
        sampling = torch.ones(ids.shape[0], 3)
        logits, *cache = model(ids.int(), mask.int(), positions.int(), rows.int(), sampling)
        for slot, new in zip(model.kv_mgr.past_key_values, cache, strict=True):  # type: ignore[union-attr,arg-type]
            slot.data = new
        return _last(logits)


def _last(logits: Tensor | None) -> Tensor:
    if logits is None:
        raise EquiportError(
            "the model samples on the device and gives no logits",
            field="on_device_sampling_config",
            remedy='Give create_model neuron_config={"on_device_sampling_config": None} or "output_logits": True.',
        )
    return logits[:, -1].float()
