"""Run the source model and keep what goes into and comes out of its modules."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from equiport.fixtures.tokens import TokenBatch
from equiport.structure.mapping import module_of
from equiport.trace.module_io import find_hidden, output_tensors


@dataclass
class ReferenceIO:
    """Per module path: hidden input and first output, [B, T, ...] over whole rows (prompt and decode tokens).

    A path of `input_of` has as output what its module would have been given, whatever it is fed.
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)


class _AllSeen(Exception):
    """Every watched module has run: the rest of the forward is not needed."""


def capture_reference(
    model: nn.Module, batch: TokenBatch, paths: Collection[str], feed: ReferenceIO | None = None
) -> ReferenceIO:
    """One forward over whole rows.

    With `feed`, each module of `paths` receives the fed hidden input (cast to its own dtype) in place of its own, so
    that its output tells of itself alone. `paths` must then not be nested in one another.
    """
    captured = ReferenceIO()
    modules = dict(model.named_modules())
    handles = []
    inputs = [path for path in paths if module_of(path) != path]
    # first of all hooks: what is fed comes after
    handles += [_watch_input(modules[module_of(path)], path, captured, feed, len(paths)) for path in inputs]
    for path in paths:
        if path not in inputs:
            handles += _watch(modules[path], path, captured, feed, len(paths))
    try:
        # a large lm_head is most of a small model's forward: stop as soon as the fed modules have answered
        with torch.no_grad(), suppress(_AllSeen):
            model(input_ids=batch.padded(), attention_mask=batch.mask(), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return captured


def _watch_input(module: nn.Module, path: str, captured: ReferenceIO, feed: ReferenceIO | None, wanted: int) -> Any:
    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured.calls[path] = captured.calls.get(path, 0) + 1
        site = find_hidden(args, kwargs)
        if site is not None:
            captured.outputs[path] = site.read(args, kwargs).detach().clone()
        if feed is not None and len(captured.calls) == wanted:
            raise _AllSeen

    return module.register_forward_pre_hook(before, with_kwargs=True)


def _watch(module: nn.Module, path: str, captured: ReferenceIO, feed: ReferenceIO | None, wanted: int) -> list[Any]:
    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        site = find_hidden(args, kwargs)
        if site is None:
            return None
        own = site.read(args, kwargs)
        if feed is None:
            captured.inputs[path] = own.detach().clone()
            return None
        fed = feed.inputs.get(path)
        if fed is None or fed.shape != own.shape or not own.is_floating_point():
            return None
        return site.replaced(args, kwargs, fed.to(own.dtype))

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        captured.calls[path] = captured.calls.get(path, 0) + 1
        tensors = output_tensors(output)
        if tensors:
            captured.outputs[path] = tensors[0].detach().clone()
        if feed is not None and len(captured.calls) == wanted:
            raise _AllSeen

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]
