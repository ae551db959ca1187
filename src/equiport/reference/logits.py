"""What the source model says: logits of whole sequences, greedy continuations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def sequence_logits(
    model: nn.Module, sequence: Sequence[int], start: int, on_step: Callable[[], None] | None = None
) -> Tensor:
    """Next-token logits after positions `start`.. of one sequence, in one forward: float32 [len - start, V]."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(sequence)]), use_cache=False).logits
    if on_step:
        on_step()
    return logits[0, start:].float()


def greedy(model: nn.Module, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Greedy continuations of `num_tokens` tokens each; end-of-sequence does not stop them.

    The prompts run as one left-padded batch, which `generate` masks and positions by itself. The cache keeps every key,
    so that masks alone say what is seen: `generate`'s own cuts at `config.sliding_window` in models that never read it.
    Models that are given no cache (GPT-1, RecurrentGemma) do not mask padding either: each row runs alone and whole.
    """
    from transformers import DynamicCache

    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return [_recomputed(model, prompt, num_tokens) for prompt in prompts]

    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    with torch.no_grad():
        output = model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            **({"past_key_values": DynamicCache()} if _attends_only(model) else {}),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            num_beams=1,
            eos_token_id=None,
            pad_token_id=0,
            repetition_penalty=1.0,
            temperature=None,
            top_p=None,
            top_k=None,
        )
    return [row[width:].tolist() for row in output]


def _recomputed(model: nn.Module, prompt: Sequence[int], num_tokens: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(num_tokens):
        sequence.append(int(sequence_logits(model, sequence, len(sequence) - 1).argmax()))
    return sequence[len(prompt) :]


def _attends_only(model: nn.Module) -> bool:
    """Whether every layer keeps keys and values, and no other state."""
    kinds = {str(kind) for kind in getattr(model.config, "layer_types", None) or ()}
    others = {kind for kind in kinds if not kind.endswith("_attention")} | (kinds & {"linear_attention"})
    return not others and not getattr(model, "_is_stateful", False)
