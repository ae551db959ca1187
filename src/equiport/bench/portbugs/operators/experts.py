"""Bugs in experts and shared experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equiport.bench.portbugs.operator import BugOperator, modules, wrap_forward

_MLP = ("mlp",)


def _gates(model: nn.Module) -> list[Any]:
    return [found.module for found in modules(model, ".mlp.gate", ".mlp.router")]


def _experts(model: nn.Module) -> list[Any]:
    return [found.module for found in modules(model, ".mlp.experts")]


def _weights(model: nn.Module, edit: Any) -> None:
    """`edit(gate, logits, weights, indices)` makes the weights of the chosen experts."""
    for gate in _gates(model):

        def forward(original: Any, x: Tensor, gate: Any = gate) -> Any:
            logits, weights, indices = original(x)
            return logits, edit(gate, logits, weights, indices).to(weights.dtype), indices

        wrap_forward(gate, forward)


class SharedMissing(BugOperator):
    """The shared expert is not added."""

    name, family = "shared expert missing", "deepseek_v3"
    component, causes = ("mlp",), ("shared expert",)

    def inject(self, model: nn.Module) -> None:
        """All blocks."""
        for found in modules(model, ".mlp"):
            block = found.module
            if hasattr(block, "shared_experts"):
                wrap_forward(block, lambda original, x, block=block: original(x) - block.shared_experts(x))


class SharedUngated(BugOperator):
    """The shared expert is added without its gate."""

    name, family = "shared expert not gated", "qwen2_moe"
    component, causes = _MLP, ("shared expert",)

    def inject(self, model: nn.Module) -> None:
        """All blocks."""
        for found in modules(model, ".mlp"):
            block = found.module

            def ungated(original: Any, x: Tensor, block: Any = block) -> Tensor:
                return original(x) + block.shared_expert(x) * (1 - torch.sigmoid(block.shared_expert_gate(x)))  # type: ignore[no-any-return]

            wrap_forward(block, ungated)


class SharedScaled(BugOperator):
    """routed_scaling_factor multiplies the shared expert too."""

    name, family = "shared expert scaled as the routed ones", "deepseek_v3"
    component, causes = _MLP, ("shared expert",)

    def inject(self, model: nn.Module) -> None:
        """All blocks."""
        for found in modules(model, ".mlp"):
            block = found.module
            if hasattr(block, "shared_experts"):
                more = block.gate.routed_scaling_factor - 1
                wrap_forward(block, lambda original, x, b=block, more=more: original(x) + more * b.shared_experts(x))


class ExpertsSwapped(BugOperator):
    """gate and up of the fused expert weights are swapped."""

    name, family = "experts' gate and up swapped", "mixtral"
    component, causes = _MLP, ("gate/up order",)

    def inject(self, model: nn.Module) -> None:
        """All experts, at run time."""
        for experts in _experts(model):
            first, second = experts.gate_up_proj.data.chunk(2, 1)
            _with(experts, "gate_up_proj", torch.cat((second, first), 1))


def _with(experts: Any, name: str, value: Tensor) -> None:
    """Compute with another tensor in place of a parameter, which itself stays as it was loaded."""
    held = experts._parameters[name]

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        experts._parameters[name] = nn.Parameter(value, requires_grad=False)
        try:
            return original(*args, **kwargs)
        finally:
            experts._parameters[name] = held

    wrap_forward(experts, forward)


class ExpertsShifted(BugOperator):
    """Expert e computes with the weights of expert e + 1."""

    name, family = "experts in another order", "qwen3_moe"
    component, causes = _MLP, ("expert order",)

    def inject(self, model: nn.Module) -> None:
        """All experts, at run time."""
        for experts in _experts(model):
            _with(experts, "down_proj", experts.down_proj.data.roll(-1, 0))


class ExpertsChunked(BugOperator):
    """Interleaved gate and up are read as halves."""

    name, family = "experts' gate and up read as halves", "gpt_oss"
    component, causes = _MLP, ("gate/up order",)

    def inject(self, model: nn.Module) -> None:
        """All experts."""
        for experts in _experts(model):

            def gated(both: Tensor, experts: Any = experts) -> Tensor:
                gate, up = both.chunk(2, -1)
                gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
                return (up + 1) * gate * torch.sigmoid(gate * experts.alpha)  # type: ignore[no-any-return]

            experts._apply_gate = gated


class OneOfUpDropped(BugOperator):
    """up where the source has up + 1."""

    name, family = "up for up + 1", "gpt_oss"
    component, causes = _MLP, ("activation flavour",)

    def inject(self, model: nn.Module) -> None:
        """All experts."""
        for experts in _experts(model):

            def gated(both: Tensor, experts: Any = experts) -> Tensor:
                gate, up = both[..., ::2].clamp(max=experts.limit), both[..., 1::2].clamp(-experts.limit, experts.limit)
                return up * gate * torch.sigmoid(gate * experts.alpha)  # type: ignore[no-any-return]

            experts._apply_gate = gated


class AlphaDropped(BugOperator):
    """silu where the source has gate · sigmoid(alpha · gate)."""

    name, family = "swiglu alpha dropped", "gpt_oss"
    component, causes = _MLP, ("activation flavour",)

    def inject(self, model: nn.Module) -> None:
        """All experts."""
        for experts in _experts(model):
            experts.alpha = 1.0


class ClampDropped(BugOperator):
    """Gate and up are not clamped."""

    name, family = "swiglu clamp dropped", "gpt_oss"
    component, causes = _MLP, ("clamp",)

    def inject(self, model: nn.Module) -> None:
        """All experts."""
        for experts in _experts(model):
            experts.limit = 1e9


class ClampBothSides(BugOperator):
    """The gate is clamped from below too."""

    name, family = "gate clamped from below", "gpt_oss"
    component, causes = _MLP, ("clamp",)

    def inject(self, model: nn.Module) -> None:
        """All experts."""
        for experts in _experts(model):

            def gated(both: Tensor, experts: Any = experts) -> Tensor:
                gate, up = both.clamp(-experts.limit, experts.limit).unflatten(-1, (-1, 2)).unbind(-1)
                return (up + 1) * gate * torch.sigmoid(gate * experts.alpha)  # type: ignore[no-any-return]

            experts._apply_gate = gated


class ExpertBiasesDropped(BugOperator):
    """The experts add no biases."""

    name, family = "expert biases dropped", "gpt_oss"
    component, causes = _MLP, ("bias dropped",)

    def inject(self, model: nn.Module) -> None:
        """All experts, at run time."""
        for experts in _experts(model):
            for name in ("gate_up_proj_bias", "down_proj_bias"):
                _with(experts, name, torch.zeros_like(getattr(experts, name)))


class DenseExperts(BugOperator):
    """Every expert runs on every token, those not chosen with weight zero."""

    name, family, control = "control: all experts run", "qwen2_moe", True

    def inject(self, model: nn.Module) -> None:
        """All experts."""
        for experts in _experts(model):

            def dense(original: Any, x: Tensor, chosen: Tensor, weights: Tensor, own: Any = experts) -> Tensor:
                full = torch.zeros(len(x), own.num_experts, dtype=weights.dtype).scatter(1, chosen, weights)
                out = torch.zeros_like(x)
                for number in range(own.num_experts):
                    gate, up = F.linear(x, own.gate_up_proj[number]).chunk(2, -1)
                    out = out + F.linear(own.act_fn(gate) * up, own.down_proj[number]) * full[:, number, None]
                return out

            wrap_forward(experts, dense)


class UnchangedLatent(BugOperator):
    """Nothing is changed in a mixture of experts with latent attention."""

    name, family, control = "control: unchanged MoE", "deepseek_v3", True

    def inject(self, model: nn.Module) -> None:
        """Nothing."""


class UnchangedSinks(BugOperator):
    """Nothing is changed in a mixture of experts with sinks."""

    name, family, control = "control: unchanged MoE with sinks", "gpt_oss", True

    def inject(self, model: nn.Module) -> None:
        """Nothing."""
