"""Bugs in the norms of queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from equiport.bench.portbugs.operator import (
    BugOperator,
    attentions,
    modules,
    rotate,
    wrap_forward,
)


class QkNormDropped(BugOperator):
    """q and k are not normed."""

    name, family = "qk-norm dropped", "qwen3"
    component, causes = ("q_norm", "k_norm"), ("qk-norm", "norm kind")

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for found in modules(model, "q_norm", "k_norm"):
            wrap_forward(found.module, lambda original, x: x)


class QkNormNotCalled(BugOperator):
    """The norms of q and k are there and never called."""

    name, family = "qk-norm never called", "olmo2"
    component, causes = ("self_attn", "q_norm", "k_norm"), ("qk-norm",)

    def inject(self, model: nn.Module) -> None:
        """All layers, around the modules."""
        for attention in attentions(model):
            held = {name: attention._modules[name] for name in ("q_norm", "k_norm")}

            def forward(original: Any, *args: Any, a: Any = attention, h: Any = held, **kwargs: Any) -> Any:
                a._modules.update(q_norm=nn.Identity(), k_norm=nn.Identity())
                try:
                    return original(*args, **kwargs)
                finally:
                    a._modules.update(h)

            wrap_forward(attention, forward)


class KeyNormDropped(BugOperator):
    """Keys are not normed."""

    name, family = "k-norm dropped", "gemma3"
    component, causes = ("k_norm", "self_attn"), ("qk-norm", "norm kind")

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for found in modules(model, "k_norm"):
            wrap_forward(found.module, lambda original, x: x)


class NormBeforeRotation(BugOperator):
    """q and k are normed before the rotation, the source norms them after."""

    name, family = "qk-norm before the rotation", "hunyuan"
    component, causes = ("self_attn",), ("qk-norm",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            q_norm, k_norm = _taken_out(attention, "query_layernorm", "key_layernorm")

            def before(
                original: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor,
                q_norm: Any = q_norm, k_norm: Any = k_norm,
            ) -> Any:  # fmt: skip
                return original(q_norm(q), k_norm(k), cos, sin)

            rotate(attention, before)


class NormAfterRotation(BugOperator):
    """q and k are normed after the rotation, the source norms them before."""

    name, family = "qk-norm after the rotation", "qwen3"
    component, causes = ("self_attn",), ("qk-norm",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            q_norm, k_norm = _taken_out(attention, "q_norm", "k_norm")

            def after(
                original: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor,
                q_norm: Any = q_norm, k_norm: Any = k_norm,
            ) -> Any:  # fmt: skip
                q, k = original(q, k, cos, sin)
                return q_norm(q), k_norm(k)

            rotate(attention, after)


def _taken_out(attention: Any, *names: str) -> list[nn.Module]:
    """The norms, which do nothing in their own places while the attention runs: they are called elsewhere in it."""
    held = {name: attention._modules[name] for name in names}

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        attention._modules.update({name: nn.Identity() for name in names})
        try:
            return original(*args, **kwargs)
        finally:
            attention._modules.update(held)

    wrap_forward(attention, forward)
    return list(held.values())


class NormPerShard(BugOperator):
    """A norm over all heads takes its mean square over one rank's half."""

    name, family = "full-width qk-norm per shard", "olmo2"
    component, causes = ("q_norm", "k_norm"), ("qk-norm",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for found in modules(model, "q_norm", "k_norm"):
            norm = found.module

            def shards(original: Any, x: Tensor, norm: Any = norm) -> Tensor:
                parts = x.float().unflatten(-1, (2, -1))
                scaled = parts / (parts.square().mean(-1, keepdim=True) + 1e-6).sqrt()
                return (scaled.flatten(-2) * norm.weight).to(x.dtype)  # type: ignore[no-any-return]

            wrap_forward(norm, shards)


class QkNormWeightsExchanged(BugOperator):
    """q's norm holds k's weight and the reverse."""

    name, family = "q and k norm weights exchanged", "gemma3"
    component, causes = ("q_norm", "k_norm", "self_attn"), ("wrong layer's weights",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            q, k = attention.q_norm, attention.k_norm
            q.weight.data, k.weight.data = k.weight.data, q.weight.data
