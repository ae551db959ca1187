"""Run the port whole, while the modules under test are fed the reference's inputs (a shadow run).

A component so runs in its own surroundings: with the port's masks, positions, rotary tables and KV cache, in prefill
and in decode, on ragged rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from equiport.fixtures.tokens import TokenBatch
from equiport.stacks.contract import StackAdapter
from equiport.trace.module_io import find_hidden, output_tensors, take_tokens, token_positions
from equiport.trace.reference import ReferenceIO


@dataclass(frozen=True)
class ShadowPair:
    """A target module and the source module whose recorded input it is fed."""

    target: str
    source: str


@dataclass(frozen=True)
class ShadowEntry:
    """Under which name to keep the hidden input that a target module gets by itself, before anything is fed to it."""

    name: str
    module: str


@dataclass
class ShadowOutput:
    """What one target module gave: outputs [N, ...] and their (row, token) places [N, 2], by phase.

    `problem` says why it could not be fed or read; then it is untested.
    """

    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    places: dict[str, list[Tensor]] = field(default_factory=dict)
    calls: int = 0
    problem: str = ""

    def phase(self, name: str) -> tuple[Tensor, Tensor] | None:
        """(outputs [N, ...], places [N, 2]) of `prefill` or `decode`; None if there are none."""
        if name not in self.outputs:
            return None
        return torch.cat(self.outputs[name]), torch.cat(self.places[name])


@dataclass
class _Step:
    """Where the run stands: the phase and, for each row, the first token position and the number of real tokens."""

    phase: str = ""
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def fits(self, tensor: Tensor) -> bool:
        """Whether [B, T, ...] holds every real token of this step, or the last one of each row."""
        rows, width = tensor.shape[:2]
        return rows == len(self.counts) and (width >= max(self.counts) or (self.phase == "prefill" and width == 1))


def shadow_target(
    adapter: StackAdapter,
    model: nn.Module,
    batch: TokenBatch,
    pairs: Sequence[ShadowPair],
    reference: ReferenceIO | None,
    logits: str = "",
    entry: ShadowEntry | None = None,
) -> dict[str, ShadowOutput]:
    """Prefill the ragged prompts, then decode step by step; target path -> outputs.

    `reference` None: nothing is fed, the port runs on its own activations (a free run); else `pairs` must not be nested
    in one another. `model` was made with `batch.batch_size` rows. What the port returns is
    kept under the name `logits`, if one is given; what a module would have been given by itself under that of `entry`.
    """
    modules = dict(adapter.inner_model(model).named_modules())
    step = _Step()
    found = {pair.target: ShadowOutput() for pair in pairs}
    handles = []
    if entry is not None:
        handles.append(_watch_input(modules[entry.module], step, found.setdefault(entry.name, ShadowOutput())))
    for pair in pairs:
        handles += _watch(modules[pair.target], pair, step, reference, found[pair.target])
    returned = found.setdefault(logits, ShadowOutput()) if logits else ShadowOutput()
    ids = batch.padded()
    lengths = torch.tensor(batch.prompt_lengths)
    try:
        with torch.no_grad():
            step.phase, step.starts, step.counts = "prefill", [0] * batch.batch_size, list(batch.prompt_lengths)
            out = adapter.forward(model, ids[:, : int(lengths.max())] * _prompt_mask(lengths), lengths=lengths)
            _keep(returned, "prefill", out, lengths - 1)
            for offset in range(batch.decode_steps):
                positions = lengths + offset
                step.phase, step.starts, step.counts = "decode", positions.tolist(), [1] * batch.batch_size
                out = adapter.forward(model, ids.gather(1, positions[:, None]), positions=positions)
                _keep(returned, "decode", out, positions)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _keep(returned: ShadowOutput, phase: str, logits: Tensor, positions: Tensor) -> None:
    """Logits [B, V] after the token at `positions` [B] of each row."""
    returned.calls += 1
    returned.outputs.setdefault(phase, []).append(logits.detach().clone())
    returned.places.setdefault(phase, []).append(torch.stack((torch.arange(len(positions)), positions), dim=1))


def _prompt_mask(lengths: Tensor) -> Tensor:
    return (torch.arange(int(lengths.max()))[None] < lengths[:, None]).long()


def _watch_input(module: nn.Module, step: _Step, found: ShadowOutput) -> Any:
    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.calls += 1
        site = find_hidden(args, kwargs)
        if site is None:
            found.problem = "is called without a tensor"
        else:
            _take(found, step, site.read(args, kwargs))

    return module.register_forward_pre_hook(before, with_kwargs=True)


def _take(found: ShadowOutput, step: _Step, tensor: Tensor) -> None:
    """Keep the real tokens of [B, T, ...]."""
    if found.problem or tensor.dim() < 2 or not step.fits(tensor):
        found.problem = found.problem or f"gives a part of the batch or of the sequence, {tuple(tensor.shape)}"
        return
    spans = _spans(step, tensor.shape[1])
    local = token_positions([offset for *_, offset in spans], [offset + end - start for start, end, offset in spans])
    places = token_positions([start for start, *_ in spans], [end for _, end, _ in spans])
    found.outputs.setdefault(step.phase, []).append(take_tokens(tensor.detach(), local).clone())
    found.places.setdefault(step.phase, []).append(places)


def _watch(
    module: nn.Module, pair: ShadowPair, step: _Step, reference: ReferenceIO | None, found: ShadowOutput
) -> list[Any]:
    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        site = find_hidden(args, kwargs)
        if site is None:
            found.problem = "is called without a tensor"
            return None
        own = site.read(args, kwargs)
        if reference is None or not own.is_floating_point():
            return None
        fed = reference.inputs.get(pair.source)
        if fed is None or own.dim() != fed.dim() or own.shape[2:] != fed.shape[2:] or own.shape[0] != fed.shape[0]:
            shape = None if fed is None else tuple(fed.shape)
            found.problem = f"takes a hidden tensor of shape {tuple(own.shape)}, the source's is {shape}"
            return None
        if not step.fits(own):
            found.problem = f"is called on a part of the batch or of the sequence, {tuple(own.shape)}"
            return None
        if fed.shape[1] < max(start + count for start, count in zip(step.starts, step.counts, strict=True)):
            found.problem = f"its second dimension holds no tokens, {tuple(own.shape)}"
            return None
        value = own.clone()
        for row, (start, end, offset) in enumerate(_spans(step, own.shape[1])):
            value[row, offset : offset + end - start] = fed[row, start:end].to(own.dtype)
        return site.replaced(args, kwargs, value)

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found.calls += 1
        tensors = output_tensors(output)
        if not tensors or tensors[0].dim() < 2:
            found.problem = found.problem or "returns no tensor"
            return
        _take(found, step, tensors[0])

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]


def _spans(step: _Step, width: int) -> list[tuple[int, int, int]]:
    """(first token, end token, offset in the call's tensor) of each row's real tokens.

    A prefill call of width 1 behind longer prompts is the stack's last-token gather.
    """
    if step.phase == "prefill" and width == 1 and max(step.counts) > 1:
        return [(start + count - 1, start + count, 0) for start, count in zip(step.starts, step.counts, strict=True)]
    return [(start, start + count, 0) for start, count in zip(step.starts, step.counts, strict=True)]
