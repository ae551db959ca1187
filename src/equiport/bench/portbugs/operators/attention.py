"""Bugs in heads, sinks and precision of attention, and correct rewrites of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equiport.bench.portbugs.operator import (
    BugOperator,
    Core,
    attend,
    attentions,
    while_running,
)


def _tiled(x: Tensor, groups: int) -> Tensor:
    return x.repeat(1, groups, 1, 1)


class HeadsTiled(BugOperator):
    """Key and value heads are tiled over the query heads, not repeated."""

    name, family = "kv heads tiled", "llama"
    component, causes = ("self_attn",), ("head order or replication",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            while_running(attention, "repeat_kv", lambda original, x, groups: _tiled(x, groups))


class ValuesTiled(BugOperator):
    """Value heads alone are tiled."""

    name, family = "v heads tiled", "qwen2"
    component, causes = ("self_attn",), ("head order or replication",)

    def inject(self, model: nn.Module) -> None:
        """All layers: v is given to the core in another order, so that its repetition gives the tiled one."""

        def core(original: Core, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
            groups = module.num_key_value_groups
            seen = [0]

            def repeat(x: Tensor, n: int) -> Tensor:
                seen[0] += 1
                return _tiled(x, n) if seen[0] == 2 else x.repeat_interleave(groups, 1)

            import sys

            file: Any = sys.modules[type(module).__module__]
            kept, file.repeat_kv = file.repeat_kv, repeat
            try:
                return original(module, q, k, v, mask, **options)
            finally:
                file.repeat_kv = kept

        for attention in attentions(model):
            attend(attention, core)


class OneHeadForAll(BugOperator):
    """Every query head reads the first kv head."""

    name, family = "first kv head for all", "mixtral"
    component, causes = ("self_attn",), ("head order or replication",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            while_running(attention, "repeat_kv", lambda original, x, n: x[:, :1].expand(-1, x.shape[1] * n, -1, -1))


class SinksDropped(BugOperator):
    """The learned sinks do not take part in the softmax."""

    name, family = "sinks dropped", "gpt_oss"
    component, causes = ("self_attn",), ("attention sinks",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""

        def core(original: Core, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
            groups = module.num_key_value_groups
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            scores = q @ k.transpose(2, 3) * options["scaling"] + mask
            return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None

        for attention in attentions(model):
            attend(attention, core)


class LowSoftmax(BugOperator):
    """The softmax is taken in the scores' precision."""

    name, family, quick = "softmax in bf16", "llama", True
    component, causes = ("self_attn",), ("precision order",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""

        def core(original: Core, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
            groups = module.num_key_value_groups
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            scores = q @ k.transpose(2, 3) * options["scaling"] + mask
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            return ((weights / weights.sum(-1, keepdim=True)) @ v).transpose(1, 2).contiguous(), None

        for attention in attentions(model):
            attend(attention, core)


class Unchanged(BugOperator):
    """Nothing is changed."""

    name, family, control, quick = "control: unchanged", "llama", True, True

    def inject(self, model: nn.Module) -> None:
        """Nothing."""


class Sdpa(BugOperator):
    """torch's fused attention for the eager one."""

    name, family, control = "control: sdpa for eager", "llama", True

    def inject(self, model: nn.Module) -> None:
        """All layers, inside the target alone."""

        def core(original: Core, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
            groups = module.num_key_value_groups
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options["scaling"])
            return out.transpose(1, 2).contiguous(), None

        for attention in attentions(model):
            attend(attention, core)


class WideAttention(BugOperator):
    """Scores, softmax and product with V in fp32."""

    name, family, control = "control: attention in fp32", "gemma2", True

    def inject(self, model: nn.Module) -> None:
        """All layers."""

        def core(original: Core, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
            out, weights = original(module, q.float(), k.float(), v.float(), mask, **options)
            return out.to(q.dtype), weights

        for attention in attentions(model):
            attend(attention, core)


class HeadsRepeatedBefore(BugOperator):
    """Key and value heads are repeated before the core, which finds one a query head."""

    name, family, control = "control: kv heads repeated beforehand", "mistral", True

    def inject(self, model: nn.Module) -> None:
        """All layers."""

        def core(original: Core, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
            groups = module.num_key_value_groups
            index = torch.arange(k.shape[1]).repeat_interleave(groups)
            module.num_key_value_groups = 1
            try:
                return original(module, q, k[:, index], v[:, index], mask, **options)
            finally:
                module.num_key_value_groups = groups

        for attention in attentions(model):
            attend(attention, core)
