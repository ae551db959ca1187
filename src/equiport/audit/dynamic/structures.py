"""Tensors inside whatever a module takes or returns: found, and replaced by others."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_DEPTH = 6


def tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Every tensor in tuples, lists, dicts, dataclasses and plain objects."""
    if isinstance(value, Tensor):
        yield value
    elif depth < _DEPTH:
        for item in _parts(value):
            yield from tensors(item, depth + 1)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (tuple, list)):
        return list(value)
    return list(vars(value).values()) if _plain(value) else []


def _plain(value: Any) -> bool:
    """A small object that holds results: no module, no class, no function."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (type, torch.nn.Module, torch.dtype, torch.device))
        and not callable(value)
    )


def replaced(value: Any, change: Callable[[Tensor], Tensor], depth: int = 0) -> Any:
    """The same structure with each tensor changed; what holds no tensor is returned as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if depth >= _DEPTH or next(tensors(value, depth), None) is None:
        return value
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = replaced(item, change, depth + 1)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(item, change, depth + 1) for item in value))
    if type(value) in (tuple, list):
        return type(value)(replaced(item, change, depth + 1) for item in value)
    made = copy.copy(value)
    for key, item in vars(value).items():
        if next(tensors(item, depth), None) is not None:
            changed = replaced(item, change, depth + 1)
            if dataclasses.is_dataclass(made):
                object.__setattr__(made, key, changed)
            else:
                setattr(made, key, changed)
    return made


def distance(one: Any, other: Any) -> float:
    """The largest relative L2 difference over the tensors of two results; inf where they do not pair."""
    first, second = list(tensors(one)), list(tensors(other))
    if len(first) != len(second):
        return float("inf")
    return max((_apart(a, b) for a, b in zip(first, second, strict=True)), default=0.0)


def _apart(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    a, b = one.detach().double(), other.detach().double()
    odd_a, odd_b = ~torch.isfinite(a), ~torch.isfinite(b)
    if not torch.equal(odd_a, odd_b):
        return float("inf")
    a, b = a.masked_fill(odd_a, 0.0), b.masked_fill(odd_b, 0.0)
    size = float(b.norm())
    gap = float((a - b).norm())
    return gap / size if size else gap


def copied(value: Any) -> Any:
    """The same with every tensor cloned."""
    return replaced(value, lambda tensor: tensor.detach().clone())
