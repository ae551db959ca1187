"""Bugs in norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equiport.bench.portbugs.operator import BugOperator, modules, wrap_forward

_NORMS = ("layernorm", "norm")


class EpsTooLarge(BugOperator):
    """Another eps than the config's."""

    name, family = "eps 1e-6 for 1e-5", "llama"
    component, causes = ("norm",), ("eps",)

    def inject(self, model: nn.Module) -> None:
        """All norms."""
        for found in modules(model, *_NORMS):
            found.module.variance_epsilon = 1e-6


class OffsetMissing(BugOperator):
    """w where the source has 1 + w."""

    name, family = "RMSNorm w for 1 + w", "gemma2"
    component, causes = ("norm",), ("norm offset",)

    def inject(self, model: nn.Module) -> None:
        """All norms."""
        for found in modules(model, *_NORMS):
            found.module.weight.data -= 1


class OffsetMissingOnLast(BugOperator):
    """The final norm alone lacks its offset."""

    name, family = "1 + w missing on the final norm", "gemma3"
    component, causes = ("model.norm",), ("norm offset",)

    def inject(self, model: nn.Module) -> None:
        """The norm before the head."""
        for found in modules(model, "model.norm"):
            found.module.weight.data -= 1


class NormInBf16(BugOperator):
    """The variance is taken in the input's precision."""

    name, family = "RMSNorm computed in bf16", "llama"
    component, causes = ("norm",), ("precision order",)

    def inject(self, model: nn.Module) -> None:
        """All norms; in fp32 nothing changes."""
        for found in modules(model, *_NORMS):
            norm = found.module

            def low(original: object, x: Tensor, norm: nn.Module = norm) -> Tensor:
                variance = x.pow(2).mean(-1, keepdim=True)
                return norm.weight * (x * torch.rsqrt(variance + norm.variance_epsilon))  # type: ignore[operator]

            wrap_forward(norm, low)


class MeanKept(BugOperator):
    """An RMSNorm stands for a LayerNorm."""

    name, family = "RMSNorm for LayerNorm", "cohere2"
    component, causes = ("norm",), ("norm kind",)

    def inject(self, model: nn.Module) -> None:
        """All norms."""
        for found in modules(model, *_NORMS):
            norm = found.module

            def rms(original: object, x: Tensor, norm: Any = norm) -> Tensor:
                wide = x.float()
                return F.rms_norm(wide, wide.shape[-1:], norm.weight.float(), 1e-5).to(x.dtype)

            wrap_forward(norm, rms)


class MeanTaken(BugOperator):
    """A LayerNorm stands for an RMSNorm."""

    name, family = "LayerNorm for RMSNorm", "qwen2"
    component, causes = ("norm",), ("norm kind",)

    def inject(self, model: nn.Module) -> None:
        """All norms."""
        for found in modules(model, *_NORMS):
            norm = found.module

            def layer(original: object, x: Tensor, norm: nn.Module = norm) -> Tensor:
                wide = x.float()
                return F.layer_norm(wide, wide.shape[-1:], None, None, 1e-6).to(x.dtype) * norm.weight  # type: ignore[operator]

            wrap_forward(norm, layer)


class NormBiasDropped(BugOperator):
    """LayerNorms without their bias."""

    name, family = "LayerNorm bias dropped", "starcoder2"
    component, causes = ("norm",), ("bias dropped", "norm kind")

    def inject(self, model: nn.Module) -> None:
        """All norms."""
        for found in modules(model, *_NORMS):
            norm = found.module
            wrap_forward(norm, lambda original, x, norm=norm: F.layer_norm(x, x.shape[-1:], norm.weight, None, 1e-5))


class OffsetTwice(BugOperator):
    """The 1 of 1 + w is added in the conversion and in the norm."""

    name, family = "1 + w applied twice", "gemma"
    component, causes = ("norm",), ("norm offset",)

    def inject(self, model: nn.Module) -> None:
        """All norms."""
        for found in modules(model, *_NORMS):
            norm = found.module
            wrap_forward(
                norm,
                lambda original, x, norm=norm: F.rms_norm(x.float(), x.shape[-1:], 2 + norm.weight.float(), 1e-6).to(
                    x.dtype
                ),
            )


class EpsOutside(BugOperator):
    """x / (rms + eps) for x / sqrt(ms + eps)."""

    name, family = "eps outside the root", "mistral"
    component, causes = ("norm",), ("eps",)

    def inject(self, model: nn.Module) -> None:
        """All norms."""
        for found in modules(model, *_NORMS):
            norm = found.module

            def outside(original: object, x: Tensor, norm: nn.Module = norm) -> Tensor:
                wide = x.float()
                return norm.weight * (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + 1e-5)).to(x.dtype)  # type: ignore[operator]

            wrap_forward(norm, outside)


class EpsFromAnotherKey(BugOperator):
    """eps keeps the class's default where the config says 1e-6."""

    name, family = "eps 1e-3 for 1e-6", "qwen3 llama3"
    component, causes = ("norm",), ("eps",)

    def inject(self, model: nn.Module) -> None:
        """The final norm alone."""
        for found in modules(model, "model.norm"):
            found.module.variance_epsilon = 1e-3


class SecondNormSkipped(BugOperator):
    """The norm before the MLP is left out."""

    name, family = "second norm skipped", "llama"
    component, causes = ("post_attention_layernorm",), ("norm kind", "norm placement")

    def inject(self, model: nn.Module) -> None:
        """All layers."""
        for found in modules(model, "post_attention_layernorm"):
            wrap_forward(found.module, lambda original, x: x)


class FinalNormSkipped(BugOperator):
    """The norm before the head is left out."""

    name, family = "final norm skipped", "granite"
    component, causes = ("model.norm",), ("norm kind", "norm placement")

    def inject(self, model: nn.Module) -> None:
        """The last norm."""
        for found in modules(model, "model.norm"):
            wrap_forward(found.module, lambda original, x: x)


class NormWeightsExchanged(BugOperator):
    """The two norms of a layer hold each other's weights."""

    name, family = "norm weights exchanged", "mistral"
    component, causes = ("layernorm", "layers.{i}"), ("wrong layer's weights", "norm placement")

    def inject(self, model: nn.Module) -> None:
        """Every layer."""
        for layer in model.model.layers:  # type: ignore[union-attr,attr-defined]
            first, second = layer.input_layernorm.weight.data, layer.post_attention_layernorm.weight.data  # type: ignore[union-attr]
            layer.input_layernorm.weight.data, layer.post_attention_layernorm.weight.data = second, first  # type: ignore[union-attr]


class NormWeightIgnored(BugOperator):
    """The scaled input is not multiplied by the weight."""

    name, family = "norm weight ignored", "qwen3_moe"
    component, causes = ("layernorm",), ("norm kind",)

    def inject(self, model: nn.Module) -> None:
        """The first norm of each layer."""
        for found in modules(model, "input_layernorm"):
            wrap_forward(found.module, lambda original, x: F.rms_norm(x.float(), x.shape[-1:], None, 1e-6).to(x.dtype))


class FusedNorm(BugOperator):
    """The norm as one call of a fused kernel, the weight in fp32 too."""

    name, family, control = "control: fused norm", "qwen3", True

    def inject(self, model: nn.Module) -> None:
        """All norms."""
        for found in modules(model, *_NORMS):
            norm = found.module
            wrap_forward(
                norm,
                lambda original, x, norm=norm: (
                    F.rms_norm(x.float(), x.shape[-1:], None, norm.variance_epsilon).to(x.dtype) * norm.weight
                ),
            )
