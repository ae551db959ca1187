"""What the source model says: logits of whole sequences, greedy continuations."""

from __future__ import annotations

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

    The prompts run as one left-padded batch, which `generate` masks and positions by itself.
    """
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
