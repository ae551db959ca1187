"""Bugs in the scores: their scale and their cap."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from equiport.bench.portbugs.operator import (
    BugOperator,
    Core,
    attend,
    attentions,
    decoding,
    scored,
)


class ScaleInverted(BugOperator):
    """A factor is passed where a divisor is expected."""

    name, family = "softmax scale inverted", "llama"
    component, causes = ("self_attn",), ("softmax scale",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            scored(attention, 1 / attention.scaling)


class ScaleOfHeadDim(BugOperator):
    """query_pre_attn_scalar is not read."""

    name, family = "query_pre_attn_scalar ignored", "gemma2"
    component, causes = ("self_attn",), ("softmax scale",)

    def inject(self, model: nn.Module) -> None:
        """head_dim**-0.5 in all layers."""
        for attention in attentions(model):
            attention.scaling = attention.head_dim**-0.5


class MultiplierIgnored(BugOperator):
    """attention_multiplier is not read."""

    name, family = "attention_multiplier ignored", "granite"
    component, causes = ("self_attn",), ("softmax scale",)

    def inject(self, model: nn.Module) -> None:
        """head_dim**-0.5 in all layers."""
        for attention in attentions(model):
            attention.scaling = attention.head_dim**-0.5


class ScaleLeftOut(BugOperator):
    """Scores are not scaled."""

    name, family = "softmax scale left out", "hunyuan"
    component, causes = ("self_attn",), ("softmax scale",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            scored(attention, 1.0)


class ScaleTwice(BugOperator):
    """q is scaled in the projection and the scores again."""

    name, family = "softmax scale applied twice", "qwen3_moe"
    component, causes = ("self_attn",), ("softmax scale",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            scored(attention, attention.scaling**2)


class ScaleOfHiddenOverHeads(BugOperator):
    """head_dim is derived although the config names it."""

    name, family = "softmax scale of hidden/heads", "llama tied, head_dim"
    component, causes = ("self_attn",), ("softmax scale",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            attention.scaling = (attention.config.hidden_size // attention.config.num_attention_heads) ** -0.5


class LatentScale(BugOperator):
    """The scale of latent attention counts the unrotated channels alone."""

    name, family = "MLA scale of the unrotated width", "deepseek_v3"
    component, causes = ("self_attn",), ("softmax scale",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            attention.scaling *= (attention.qk_head_dim / attention.qk_nope_head_dim) ** 0.5


class MscaleDropped(BugOperator):
    """yarn's mscale is not squared into the softmax scale."""

    name, family = "yarn mscale not in the softmax scale", "deepseek_v3"
    component, causes = ("self_attn",), ("softmax scale",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            attention.scaling = attention.qk_head_dim**-0.5


class ScaleInPrefillAlone(BugOperator):
    """The decode path has a default scale of its own."""

    name, family = "softmax scale other in decode", "granite"
    component, causes = ("self_attn",), ("softmax scale",)

    def inject(self, model: nn.Module) -> None:
        """All layers, in decode."""

        def core(original: Core, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
            if decoding(q, k):
                options["scaling"] = q.shape[-1] ** -0.5
            return original(module, q, k, v, mask, **options)

        for attention in attentions(model):
            attend(attention, core)


class SoftcapDropped(BugOperator):
    """Scores are not capped."""

    name, family, quick = "attention softcap dropped", "gemma2", True
    component, causes = ("self_attn",), ("softcap",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            attention.attn_logit_softcapping = None


class SoftcapOfLogits(BugOperator):
    """The logits' cap is applied to the scores."""

    name, family = "softcaps exchanged", "gemma2"
    component, causes = ("self_attn",), ("softcap",)

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for attention in attentions(model):
            attention.attn_logit_softcapping = attention.config.final_logit_softcapping
