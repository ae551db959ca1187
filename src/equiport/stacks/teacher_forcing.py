"""Next-token logits of a target under teacher forcing: through prefill and decode steps, and through prefill alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from equiport.errors import EquiportError
from equiport.stacks.contract import StackAdapter

Tokens = Sequence[int]


def decode_logits(
    adapter: StackAdapter,
    model: nn.Module,
    sequences: Sequence[Tokens],
    prompt_lengths: Sequence[int],
    steps: int | None = None,
) -> Tensor:
    """Logits [rows, steps, V] float32 at positions prompt_length-1+k, k = 0 .. steps-1, of each sequence.

    k = 0 comes from the prefill of the ragged, right-padded prompts; each further k from one decode step that is fed
    the sequence's own token. `steps` defaults to the number of tokens after the prompt, so that logits k predict token
    prompt_length+k; it may be one more. Rows are run in batches of the model's batch size, the last batch being
    filled up with copies of its last row.

    Raises:
        EquiportError: empty prompts, too few tokens for `steps`, or a sequence longer than the model was made for.
    """
    lengths = [int(length) for length in prompt_lengths]
    _check_lengths(sequences, lengths)
    forced = [len(row) - length for row, length in zip(sequences, lengths, strict=True)]
    if steps is None:
        if len(set(forced)) > 1:
            raise EquiportError(f"rows have {sorted(set(forced))} forced tokens", field="steps", remedy="Give steps.")
        steps = forced[0]
    if steps < 1 or min(forced) + 1 < steps:
        raise EquiportError(
            f"{steps} steps need {max(steps - 1, 0)} forced tokens, a row has {min(forced)}",
            field="steps",
            remedy="Ask for at least one step, and at most one more than the tokens after the prompt.",
        )
    limits = adapter.limits(model)
    _check_fits([length + steps - 1 for length in lengths], limits.seq_len)
    out = []
    for rows, kept in _batches(len(sequences), limits.batch_size):
        prompts = [list(sequences[row][: lengths[row]]) for row in rows]
        starts = torch.tensor([lengths[row] for row in rows])
        collected = [adapter.forward(model, _right_pad(prompts), lengths=starts)]
        for step in range(steps - 1):
            token = torch.tensor([[sequences[row][lengths[row] + step]] for row in rows])
            collected.append(adapter.forward(model, token, positions=starts + step))
        out.append(torch.stack(collected, dim=1)[:kept])
    return torch.cat(out)


def prefill_logits(
    adapter: StackAdapter, model: nn.Module, sequences: Sequence[Tokens], prefix_lengths: Sequence[int]
) -> Tensor:
    """Logits [rows, V] float32 after the first `prefix_lengths[row]` tokens of each sequence, by prefill alone.

    Raises:
        EquiportError: an empty or too long prefix, or a prefix longer than its sequence.
    """
    lengths = [int(length) for length in prefix_lengths]
    _check_lengths(sequences, lengths)
    limits = adapter.limits(model)
    _check_fits(lengths, limits.seq_len)
    out = []
    for rows, kept in _batches(len(sequences), limits.batch_size):
        prompts = [list(sequences[row][: lengths[row]]) for row in rows]
        starts = torch.tensor([lengths[row] for row in rows])
        out.append(adapter.forward(model, _right_pad(prompts), lengths=starts)[:kept])
    return torch.cat(out)


def _right_pad(prompts: Sequence[Tokens]) -> Tensor:
    width = max(len(prompt) for prompt in prompts)
    return torch.tensor([list(prompt) + [0] * (width - len(prompt)) for prompt in prompts])


def _batches(count: int, size: int) -> Iterator[tuple[list[int], int]]:
    """Row numbers in batches of `size`; the second value says how many of them are not filling."""
    for first in range(0, count, size):
        rows = list(range(first, min(first + size, count)))
        yield rows + [rows[-1]] * (size - len(rows)), len(rows)


def _check_lengths(sequences: Sequence[Tokens], lengths: Sequence[int]) -> None:
    if not sequences or len(sequences) != len(lengths):
        raise EquiportError(
            f"{len(sequences)} sequences with {len(lengths)} lengths",
            field="sequences",
            remedy="Give one length a row.",
        )
    for row, (tokens, length) in enumerate(zip(sequences, lengths, strict=True)):
        if not 1 <= length <= len(tokens):
            raise EquiportError(
                f"length {length} of row {row} is not within its {len(tokens)} tokens",
                field="lengths",
                remedy="A prompt has at least one token and is part of its sequence.",
            )


def _check_fits(needed: Sequence[int], seq_len: int) -> None:
    if max(needed) > seq_len:
        raise EquiportError(
            f"a row needs {max(needed)} positions, the model was made for {seq_len}",
            field="seq_len",
            remedy="Make the model with a larger seq_len.",
        )
