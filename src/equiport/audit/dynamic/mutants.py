"""Ways to make a port wrong at its border, where every test of it must notice."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from equiport.audit.dynamic.bugs import Kept
from equiport.audit.dynamic.structures import replaced, tensors
from equiport.audit.dynamic.watch import PortCall, running_test

_ROW = 1.5
_RANKS = "rank"


def _noise(tensor: Tensor, generator: torch.Generator) -> Tensor:
    wide = tensor.detach().float()
    size = float(wide[torch.isfinite(wide)].std(unbiased=False)) if wide.numel() else 0.0
    drawn = torch.randn(tensor.shape, generator=generator) * (size or 1.0)
    return drawn.to(tensor.dtype)


def _wrong_integers(tensor: Tensor) -> Tensor:
    return ~tensor if tensor.dtype is torch.bool else tensor + 1


class OutputMutant:
    """Replaces every tensor that the port gives."""

    def __init__(self, name: str) -> None:
        self.generator = torch.Generator().manual_seed(977)
        self.change: Callable[[Tensor], Tensor] = {
            "noise": lambda tensor: _noise(tensor, self.generator),
            "zeros": torch.zeros_like,
            "constant": lambda tensor: torch.full_like(tensor, 0.5),
            "scaled": lambda tensor: tensor * 1.01,
        }[name]
        self.applied: set[str] = set()

    def call(self, call: PortCall) -> Any:
        """The port's result, spoilt; integers alone are moved by one."""
        out = call.result()
        found = [item for item in tensors(out)]
        if found:
            self.applied.add(running_test())
        if any(item.is_floating_point() for item in found):
            return replaced(out, lambda item: self.change(item.detach()) if item.is_floating_point() else item)
        return replaced(out, _wrong_integers)


class RowMutant:
    """Scales one row of one weight of each port module by 1.5, before its first call from outside.

    Where the port's results come from a store, one channel of them.
    """

    def __init__(self) -> None:
        self.done: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.applied: set[str] = set()

    def call(self, call: PortCall) -> Any:
        """The port's result with a weight of it changed."""
        if call.owner is None:
            out = call.result()
            if call.args and out is call.args[0]:
                self.applied.add(running_test())
                return replaced(out, _one_channel)
            return out
        if call.owner not in self.done:
            self.done.add(call.owner)
            if _scale_row(call.owner, call):
                self.applied.add(running_test())
        return call.result()


def spoil(name: str, tensor: Tensor) -> Tensor:
    """A stored result as one of the mutants would give it: noise, zeros, constant, scaled, or row."""
    if not tensor.is_floating_point():
        return _wrong_integers(tensor)
    return _one_channel(tensor) if name == "row" else OutputMutant(name).change(tensor.detach())


def _one_channel(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    changed = tensor.detach().clone()
    flat = changed.reshape(-1, changed.shape[-1]) if changed.dim() else changed.reshape(1, 1)
    channel = int(flat.float().norm(dim=0).argmax())
    changed[..., channel] *= _ROW
    return changed


def _scale_row(module: nn.Module, call: PortCall) -> bool:
    weights = [
        item for name, item in module.named_parameters() if item.is_floating_point() and _RANKS not in name.lower()
    ]
    wide = [item for item in weights if item.dim() > 1]
    if not weights:
        return False
    weight = (wide or weights)[-1]
    ids = next((item for item in tensors((call.args, call.kwargs)) if item.dtype in (torch.int64, torch.int32)), None)
    with torch.no_grad():
        rows = weight.reshape(weight.shape[0], -1)
        row = int(rows.float().norm(dim=1).argmax())
        takes_ids = len(weights) == 1 and weight.dim() == 2 and ids is not None and ids.numel()
        if takes_ids and ids is not None and int(ids.flatten()[0]) < weight.shape[0]:
            # an embedding shows the rows of its tokens alone
            row = int(ids.flatten()[0])
        weight.data[row] *= _ROW
    return True


class BugMutant:
    """Puts a bug of the corpus into each port module before its first call from outside."""

    def __init__(self, inject: Callable[[nn.Module], None]) -> None:
        self.inject = inject
        self.done: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.applied: set[str] = set()

    def call(self, call: PortCall) -> Any:
        """The port's result with the bug in it; a module that the bug does not fit stays as it is."""
        module = call.owner
        if module is None:
            return call.result()
        if module not in self.done:
            self.done.add(module)
            kept = Kept(module)
            try:
                self.inject(module)
                if kept.touched():
                    self.applied.add(running_test())
            except Exception:  # what the corpus expects is not there
                kept.put_back()
        return call.result()
