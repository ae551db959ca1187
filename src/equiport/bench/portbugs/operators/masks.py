"""Bugs in masks and windows."""

from __future__ import annotations

from typing import Any

from torch import nn

from equiport.bench.portbugs.operator import BugOperator, attentions, masked


class WindowMissing(BugOperator):
    """sliding_window is not read."""

    name, family = "window missing", "mistral"
    component, causes = ("self_attn",), ("window",)

    def inject(self, model: nn.Module) -> None:
        """Masks and caches without a window."""
        _config(model).sliding_window = None


class WindowTooLong(BugOperator):
    """One token too many is seen."""

    name, family = "window one too long", "gemma2"
    component, causes = ("self_attn",), ("window",)

    def inject(self, model: nn.Module) -> None:
        """Masks and caches with another window."""
        _config(model).sliding_window += 1


class WindowTooShort(BugOperator):
    """One token too few is seen."""

    name, family = "window one too short", "cohere2"
    component, causes = ("self_attn",), ("window",)

    def inject(self, model: nn.Module) -> None:
        """Masks and caches with another window."""
        _config(model).sliding_window -= 1


class WindowOnOtherLayers(BugOperator):
    """Local and global layers are taken for one another."""

    name, family = "window on the wrong layers", "gemma2"
    component, causes = ("self_attn",), ("window",)

    def inject(self, model: nn.Module) -> None:
        """The list of layer types, turned round."""
        kinds = _config(model).layer_types
        other = {"sliding_attention": "full_attention", "full_attention": "sliding_attention"}
        _config(model).layer_types = [other[kind] for kind in kinds]


class WindowOnAllLayers(BugOperator):
    """max_window_layers is not read."""

    name, family = "window on all layers", "qwen2 windows"
    component, causes = ("self_attn",), ("window",)

    def inject(self, model: nn.Module) -> None:
        """Every layer is local."""
        _config(model).layer_types = ["sliding_attention"] * 3


class WindowInDecodeAlone(BugOperator):
    """Prefill sees everything, the cache is a ring."""

    name, family = "window missing in prefill", "gpt_oss"
    component, causes = ("self_attn",), ("window",)

    def inject(self, model: nn.Module) -> None:
        """Local layers, in prefill."""
        for attention in attentions(model):
            if attention.sliding_window:
                masked(attention, lambda query, key: key > query)


class NotCausal(BugOperator):
    """Prefill has no causal mask."""

    name, family = "no causal mask", "llama"
    component, causes = ("self_attn",), ("mask",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            masked(attention, lambda query, key: key > query.max() + 1)


class HidesItself(BugOperator):
    """A token does not see itself."""

    name, family = "a token hidden from itself", "qwen3"
    component, causes = ("self_attn",), ("mask",)

    def inject(self, model: nn.Module) -> None:
        """All layers, in prefill; the first token has nothing else."""
        for attention in attentions(model):
            masked(attention, lambda query, key: (key >= query) & (query > 0) | (key > query))


class SeesNext(BugOperator):
    """A token sees the next one."""

    name, family = "a token sees the next", "granite"
    component, causes = ("self_attn",), ("mask",)

    def inject(self, model: nn.Module) -> None:
        """All layers, in prefill."""
        for attention in attentions(model):
            masked(attention, lambda query, key: key > query + 1)


def _config(model: nn.Module) -> Any:
    """The target's own config: masks and caches are made from it at every call."""
    return model.config
