"""Bugs in MLPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equiport.bench.portbugs.operator import BugOperator, edit_output, modules, wrap_forward


def _activation(model: nn.Module, name: str, function: Callable[[Tensor], Tensor]) -> None:
    for found in modules(model, ".mlp"):
        if isinstance(getattr(found.module, name), nn.Module):
            delattr(found.module, name)
        setattr(found.module, name, function)


class GateAndUpSwapped(BugOperator):
    """The activation sits on up."""

    name, family = "gate and up swapped", "llama"
    component, causes = ("mlp",), ("gate/up order",)

    def inject(self, model: nn.Module) -> None:
        """All MLPs."""
        for found in modules(model, ".mlp"):
            mlp = found.module
            wrap_forward(mlp, lambda _, x, mlp=mlp: mlp.down_proj(mlp.gate_proj(x) * mlp.act_fn(mlp.up_proj(x))))


class FusedHalvesSwapped(BugOperator):
    """The fused projection is split as up, gate."""

    name, family = "fused gate and up swapped", "phi3"
    component, causes = ("mlp",), ("gate/up order", "fused layout or head order")

    def inject(self, model: nn.Module) -> None:
        """All MLPs."""
        for found in modules(model, "gate_up_proj"):
            edit_output(found.module, lambda out: torch.cat(out.chunk(2, -1)[::-1], -1))


class FusedInterleaved(BugOperator):
    """The fused projection is read interleaved where it holds halves."""

    name, family = "fused gate and up read interleaved", "glm4"
    component, causes = ("mlp",), ("gate/up order", "fused layout or head order")

    def inject(self, model: nn.Module) -> None:
        """All MLPs."""
        for found in modules(model, "gate_up_proj"):
            edit_output(found.module, lambda out: torch.cat((out[..., ::2], out[..., 1::2]), -1))


class GeluErf(BugOperator):
    """The exact gelu for the tanh one."""

    name, family = "gelu erf for tanh", "gemma2"
    component, causes = ("mlp",), ("activation flavour",)

    def inject(self, model: nn.Module) -> None:
        """All MLPs."""
        _activation(model, "act_fn", F.gelu)


class GeluTanh(BugOperator):
    """The tanh gelu for the exact one."""

    name, family = "gelu tanh for erf", "gpt_neox"
    component, causes = ("mlp",), ("activation flavour",)

    def inject(self, model: nn.Module) -> None:
        """All MLPs."""
        _activation(model, "act", lambda x: F.gelu(x, approximate="tanh"))


class QuickGelu(BugOperator):
    """x · sigmoid(1.702 x) for the tanh gelu."""

    name, family = "quick gelu for gelu_new", "phi"
    component, causes = ("mlp",), ("activation flavour",)

    def inject(self, model: nn.Module) -> None:
        """All MLPs."""
        _activation(model, "activation_fn", lambda x: x * torch.sigmoid(1.702 * x))


class SiluForGelu(BugOperator):
    """silu, as in most models, for gelu."""

    name, family = "silu for gelu", "gemma"
    component, causes = ("mlp",), ("activation flavour",)

    def inject(self, model: nn.Module) -> None:
        """All MLPs."""
        _activation(model, "act_fn", F.silu)


class GateWithoutActivation(BugOperator):
    """The gate is not activated."""

    name, family = "activation left out", "stablelm"
    component, causes = ("mlp",), ("activation flavour",)

    def inject(self, model: nn.Module) -> None:
        """All MLPs."""
        _activation(model, "act_fn", lambda x: x)


class SquaredRelu(BugOperator):
    """relu² for silu."""

    name, family = "relu squared for silu", "olmo2"
    component, causes = ("mlp",), ("activation flavour",)

    def inject(self, model: nn.Module) -> None:
        """All MLPs."""
        _activation(model, "act_fn", lambda x: F.relu(x).square())


class WideActivation(BugOperator):
    """The activation in fp32."""

    name, family, control = "control: activation in fp32", "qwen3", True

    def inject(self, model: nn.Module) -> None:
        """All MLPs."""
        for found in modules(model, ".mlp"):
            mlp = found.module

            def forward(original: object, x: Tensor, mlp: Any = mlp) -> Tensor:
                gate, up = mlp.gate_proj(x), mlp.up_proj(x)
                return mlp.down_proj(mlp.act_fn(gate.float()).to(x.dtype) * up)  # type: ignore[no-any-return]

            wrap_forward(mlp, forward)
