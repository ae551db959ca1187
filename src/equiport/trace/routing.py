"""Routers of a source model: what goes in, whom each token is sent to, and which tokens noise would send elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equiport.trace.module_io import find_hidden

_NAMES = ("gate", "router")
_DRAWS, _NOISES = 48, 2.0
#: Relative error of logits that two correct fp32 programs may differ by.
_FP32_NOISE = 1e-5


@dataclass(frozen=True)
class Routed:
    """One call of a router over N tokens: input [N, H], logits [N, E], chosen experts [N, k] (sorted)."""

    router: nn.Module
    top_k: int
    hidden: Tensor
    logits: Tensor
    choice: Tensor

    @property
    def experts(self) -> int:
        """How many there are."""
        return self.logits.shape[-1]


@contextmanager
def watch_routers(model: nn.Module) -> Iterator[dict[str, Routed]]:
    """Inside, calls of the model fill path -> what its router did; a router that cannot be read is left out."""
    found: dict[str, Routed] = {}
    handles = [
        module.register_forward_hook(_keep(path, top_k, found), with_kwargs=True)
        for path, module, top_k in _routers(model)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _routers(model: nn.Module) -> list[tuple[str, nn.Module, int]]:
    modules = dict(model.named_modules())
    found = []
    for path, module in modules.items():
        parent = modules.get(path.rpartition(".")[0])
        if path.split(".")[-1] in _NAMES and hasattr(parent, "experts"):
            top_k = next((k for side in (module, parent) if isinstance(k := getattr(side, "top_k", None), int)), 0)
            found.append((path, module, top_k))
    return found


def _keep(path: str, top_k: int, found: dict[str, Routed]) -> Any:
    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        site = find_hidden(args, kwargs)
        if site is None:
            return
        hidden = site.read(args, kwargs).detach()
        hidden = hidden.reshape(-1, hidden.shape[-1]).clone()
        read = _read(output, top_k, module, hidden)
        if read is not None:
            found[path] = Routed(module, top_k, hidden, *read)

    return after


def _read(output: Any, top_k: int, router: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
    """Logits [N, E] and chosen experts [N, k] of what a router gives: (logits, scores, indices), or logits alone.

    Of one that gives the chosen experts and their scores alone, the logits are those of its weight on `hidden` [N, H].
    """
    parts = [output] if isinstance(output, Tensor) else list(output) if isinstance(output, (tuple, list)) else []
    tensors = [part.detach() for part in parts if isinstance(part, Tensor)]
    logits = next((part for part in tensors if part.is_floating_point()), None)
    chosen = next((part for part in tensors if part.dtype in (torch.int64, torch.int32)), None)
    if logits is None:
        return None
    logits = logits.reshape(-1, logits.shape[-1])
    if chosen is None:
        if not 0 < top_k < logits.shape[-1]:
            return None
        chosen = logits.topk(top_k, dim=-1).indices
    chosen = chosen.reshape(-1, chosen.shape[-1]).long()
    if len(parts) > 1 and logits.shape[-1] <= chosen.shape[-1]:
        weight = getattr(router, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
            return None
        logits = nn.functional.linear(hidden.float(), weight.detach().float())
    if len(chosen) != len(logits):
        return None
    return logits, chosen.sort(dim=-1).values


@dataclass(frozen=True)
class Unsure:
    """[N] bool each: tokens that noise of bf16 would send to other experts, and those that noise of fp32 would."""

    bf16: Tensor
    fp32: Tensor


def unsure_tokens(exact: Routed, rounded: Routed) -> Unsure:
    """Tokens whose choice is within the noise. `exact`: the fp32 run; `rounded`: bf16, of the component under test.

    The router runs in fp32 on inputs moved at random, so far that its logits change by twice what bf16 changed
    them; groups and biases of the choice so count as they do in the model. A token that the bf16 run itself sent
    elsewhere counts as well.
    """
    error = (rounded.logits.double() - exact.logits.double()).square().mean(-1).sqrt()
    noise = torch.maximum(error, error.square().mean().sqrt())
    flips = (rounded.choice != exact.choice).any(-1)
    tiny = _FP32_NOISE * exact.logits.double().square().mean(-1).sqrt()
    generator = torch.Generator().manual_seed(0)
    found = [flips, torch.zeros_like(flips)]
    with torch.no_grad():
        for _ in range(_DRAWS):
            step = torch.randn(exact.hidden.shape, generator=generator)
            step = 1e-2 * step * exact.hidden.float().square().mean(-1, keepdim=True).sqrt()
            moved = _route(exact, step)
            if moved is None:
                return Unsure(flips, torch.zeros_like(flips))
            change = (moved[0].double() - exact.logits.double()).square().mean(-1).sqrt().clamp(min=1e-30)
            for place, wanted in enumerate((_NOISES * noise, tiny)):
                again = _route(exact, step * (wanted / change).float()[:, None])
                if again is not None:
                    found[place] = found[place] | (again[1] != exact.choice).any(-1)
    return Unsure(found[0] | found[1], found[1])


def _route(exact: Routed, step: Tensor) -> tuple[Tensor, Tensor] | None:
    hidden = exact.hidden.float() + step
    return _read(exact.router(hidden), exact.top_k, exact.router, hidden)


class RoutingNoise:
    """Which tokens of a component are routed within the noise, by the level on which it is tested."""

    def __init__(self, exact: Mapping[str, Routed], rounded: Mapping[int, Mapping[str, Routed]], width: int) -> None:
        """`exact`: routers of the fp32 run; `rounded`: of the bf16 run, level by level; `width`: of the batch."""
        self._exact, self._rounded, self._width = exact, rounded, width
        self._known: dict[tuple[str, int], Unsure] = {}

    def at(self, sources: Sequence[str], level: int, places: Tensor) -> Unsure:
        """[N] each for the (row, token) places [N, 2] of a component that consists of these source modules.

        Of a router itself nothing is unsure: its logits are compared as they are. Nor of the whole model: its head
        gets the recorded input.
        """
        bf16 = torch.zeros(len(places), dtype=torch.bool)
        fp32 = torch.zeros(len(places), dtype=torch.bool)
        token = places[:, 0] * self._width + places[:, 1]
        for path in self._exact:
            inside = any(source and path.startswith(source + ".") for source in sources)
            if not inside or path not in self._rounded.get(level, {}):
                continue
            if (path, level) not in self._known:
                self._known[path, level] = unsure_tokens(self._exact[path], self._rounded[level][path])
            found = self._known[path, level]
            bf16 |= found.bf16[token]
            fp32 |= found.fp32[token]
        return Unsure(bf16, fp32)


def settled(tensors: tuple[Tensor, ...], unsure: Tensor) -> tuple[Tensor, ...]:
    """ref_fp32, ref_bf16, target[, target_fp32] [N, ...]: where `unsure` [N], both bf16 sides are ref_fp32, rounded.

    No error is counted there, on neither side; target_fp32 stays as it is.
    """
    if not bool(unsure.any()):
        return tensors
    reference, *others = tensors
    changed = []
    for tensor in others[:2]:
        value = tensor.clone()
        if value.shape == reference.shape:
            value[unsure] = reference[unsure].to(value.dtype)
        changed.append(value)
    return (reference, *changed, *others[2:])
