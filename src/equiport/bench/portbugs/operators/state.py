"""Bugs in what is carried from prefill into decode, and between rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equiport.bench.portbugs.operator import BugOperator, Core, attend, attentions, decoding, edit_output, forget

_STATE = ("state not carried in decode",)


class PromptForgotten(BugOperator):
    """Decode sees the new token alone."""

    name, family = "cache not read in decode", "llama"
    component, causes = ("self_attn",), _STATE

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            forget(attention, lambda count: range(count - 1))


class FirstSlotLost(BugOperator):
    """Decode does not see the first slot."""

    name, family = "first cache slot lost in decode", "qwen3"
    component, causes = ("self_attn",), _STATE

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            forget(attention, lambda count: (0,))


class PreviousTokenLost(BugOperator):
    """The token before is not written in time."""

    name, family, quick = "previous token lost in decode", "qwen2", True
    component, causes = ("self_attn",), _STATE

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            forget(attention, lambda count: (-2,))


class NewTokenHidden(BugOperator):
    """Decode does not see its own token."""

    name, family = "own token hidden in decode", "granite"
    component, causes = ("self_attn",), ("mask", "state not carried in decode")

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            forget(attention, lambda count: (-1,))


class RowsMixed(BugOperator):
    """Decode reads another row's cache lines."""

    name, family = "cache rows exchanged in decode", "llama"
    component, causes = ("self_attn",), ("batch row mixed up",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""

        def core(original: Core, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
            if decoding(q, k):
                k, v = (torch.cat((x[:, :, :-1].flip(0), x[:, :, -1:]), 2) for x in (k, v))
            return original(module, q, k, v, mask, **options)

        for attention in attentions(model):
            attend(attention, core)


class RowsMixedAlways(BugOperator):
    """Every row reads the first row's keys and values."""

    name, family = "first row's cache for all", "hunyuan"
    component, causes = ("self_attn",), ("batch row mixed up",)

    def inject(self, model: nn.Module) -> None:
        """All layers, in decode."""

        def core(original: Core, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
            if decoding(q, k):
                k, v = k[:1].expand_as(k), v[:1].expand_as(v)
            return original(module, q, k, v, mask, **options)

        for attention in attentions(model):
            attend(attention, core)


class StaleValues(BugOperator):
    """The values of the last prompt token are those of the first."""

    name, family = "a slot never written", "gemma"
    component, causes = ("self_attn",), _STATE

    def inject(self, model: nn.Module) -> None:
        """All layers: in decode the slot before the last holds zeros, and is attended."""

        def core(original: Core, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
            if decoding(q, k):
                k, v = k.clone(), v.clone()
                k[:, :, -2], v[:, :, -2] = 0, 0
            return original(module, q, k, v, mask, **options)

        for attention in attentions(model):
            attend(attention, core)


class OutputOfNeighbour(BugOperator):
    """The batch comes out in reverse order."""

    name, family = "rows in reverse order", "mixtral"
    component, causes = ("self_attn", "embed_tokens"), ("batch row mixed up",)

    def inject(self, model: nn.Module) -> None:
        """The attention of the second layer."""
        edit_output(attentions(model)[1], lambda out: out.flip(0))
