"""What flows through a module: the hidden tensor that goes in, the first tensor that comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_HIDDEN_NAMES = ("hidden_states", "x", "input", "inputs", "hidden_state", "input_ids")


@dataclass(frozen=True)
class CallSite:
    """Where the hidden tensor sits in a call: a positional index or a keyword."""

    position: int | None
    keyword: str | None

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """The tensor at this place."""
        value = args[self.position] if self.position is not None else kwargs[self.keyword or ""]
        return value  # type: ignore[no-any-return]

    def replaced(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments with another tensor at this place."""
        if self.position is not None:
            return (*args[: self.position], value, *args[self.position + 1 :]), dict(kwargs)
        return args, {**kwargs, self.keyword or "": value}


def find_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallSite | None:
    """The hidden tensor of a module call: a keyword of a usual name, else the first positional tensor."""
    for name in _HIDDEN_NAMES:
        if isinstance(kwargs.get(name), Tensor):
            return CallSite(None, name)
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            return CallSite(index, None)
    return None


def output_tensors(output: Any) -> tuple[Tensor, ...]:
    """The leading tensors of an output: the tensor itself, or those of a tuple up to the first non-tensor."""
    if isinstance(output, Tensor):
        return (output,)
    for name in ("logits", "hidden_states"):
        named = getattr(output, name, None)
        if isinstance(named, Tensor):
            return (named,)
    if isinstance(output, (tuple, list)):
        found = []
        for item in output:
            if not isinstance(item, Tensor):
                break
            found.append(item)
        return tuple(found)
    return ()


def take_tokens(tensor: Tensor, positions: Tensor) -> Tensor:
    """Rows of [B, T, ...] at `positions` [N, 2] (row, token): [N, ...].

    A tensor of one row stands for all rows, as it does for what it is added to (embeddings of positions).
    """
    if tensor.shape[0] == 1:
        return tensor[0, positions[:, 1]]
    return tensor[positions[:, 0], positions[:, 1]]


def token_positions(starts: list[int], ends: list[int]) -> Tensor:
    """[N, 2] (row, token) of every token in [start, end) of each row."""
    pairs = [
        (row, token) for row, (start, end) in enumerate(zip(starts, ends, strict=True)) for token in range(start, end)
    ]
    return torch.tensor(pairs, dtype=torch.long).reshape(-1, 2)
