"""Bugs in norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
