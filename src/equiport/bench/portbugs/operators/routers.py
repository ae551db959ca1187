"""Bugs in routers: the order of softmax and choice, scaling, correction."""

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


class Renormalised(BugOperator):
    """The chosen weights are renormalised although norm_topk_prob is off."""

    name, family = "norm_topk_prob ignored", "qwen2_moe"
    component, causes = _MLP, ("router order or renormalisation",)

    def inject(self, model: nn.Module) -> None:
        """All routers."""
        for gate in _gates(model):
            gate.norm_topk_prob = True


class SoftmaxAfterChoice(BugOperator):
    """The softmax is taken over the chosen logits; without renormalisation that is another function."""

    name, family = "softmax after top-k", "qwen2_moe"
    component, causes = _MLP, ("router order or renormalisation",)

    def inject(self, model: nn.Module) -> None:
        """All routers."""
        _weights(model, lambda gate, logits, weights, indices: logits.float().gather(1, indices).softmax(-1))


class NotRenormalised(BugOperator):
    """Mixtral's chosen weights do not sum to one."""

    name, family = "router weights not renormalised", "mixtral"
    component, causes = _MLP, ("router order or renormalisation",)

    def inject(self, model: nn.Module) -> None:
        """All routers."""
        _weights(model, lambda gate, logits, weights, indices: logits.float().softmax(-1).gather(1, indices))


class SigmoidForSoftmax(BugOperator):
    """Scores are sigmoids."""

    name, family = "sigmoid for softmax in the router", "qwen3_moe"
    component, causes = _MLP, ("router order or renormalisation",)

    def inject(self, model: nn.Module) -> None:
        """All routers."""

        def sigmoids(gate: Any, logits: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
            chosen = logits.float().sigmoid().gather(1, indices)
            return chosen / chosen.sum(-1, keepdim=True)

        _weights(model, sigmoids)


class OneExpertLess(BugOperator):
    """One expert fewer is chosen."""

    name, family = "top-k one too small", "mixtral"
    component, causes = _MLP, ("router order or renormalisation",)

    def inject(self, model: nn.Module) -> None:
        """All routers."""
        for gate in _gates(model):
            gate.top_k = 1


class ScalingTwice(BugOperator):
    """The router and the block both multiply by routed_scaling_factor."""

    name, family, quick = "routed scaling twice", "deepseek_v3", True
    component, causes = _MLP, ("routed scaling",)

    def inject(self, model: nn.Module) -> None:
        """All routers."""
        _weights(model, lambda gate, logits, weights, indices: weights * gate.routed_scaling_factor)


class ScalingDropped(BugOperator):
    """routed_scaling_factor is not read."""

    name, family = "routed scaling dropped", "deepseek_v3"
    component, causes = _MLP, ("routed scaling",)

    def inject(self, model: nn.Module) -> None:
        """All routers."""
        for gate in _gates(model):
            gate.routed_scaling_factor = 1.0


class CorrectionDropped(BugOperator):
    """e_score_correction_bias does not take part in the choice."""

    name, family = "correction bias dropped", "deepseek_v3"
    component, causes = _MLP, ("correction bias",)

    def inject(self, model: nn.Module) -> None:
        """All routers."""
        for gate in _gates(model):
            held = gate.e_score_correction_bias

            def forward(original: Any, x: Tensor, gate: Any = gate, held: Tensor = held) -> Any:
                gate._buffers["e_score_correction_bias"] = torch.zeros_like(held)
                try:
                    return original(x)
                finally:
                    gate._buffers["e_score_correction_bias"] = held

            wrap_forward(gate, forward)


class CorrectionInWeights(BugOperator):
    """The corrected scores also weigh the experts."""

    name, family = "correction bias in the weights", "deepseek_v3"
    component, causes = _MLP, ("correction bias",)

    def inject(self, model: nn.Module) -> None:
        """All routers."""

        def corrected(gate: Any, logits: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
            chosen = (logits.sigmoid() + gate.e_score_correction_bias).gather(1, indices)
            return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * gate.routed_scaling_factor

        _weights(model, corrected)


class GroupsIgnored(BugOperator):
    """Experts are chosen without regard to their groups."""

    name, family = "group-limited routing ignored", "deepseek_v3"
    component, causes = _MLP, ("router order or renormalisation",)

    def inject(self, model: nn.Module) -> None:
        """All routers: every group is allowed."""
        for gate in _gates(model):
            gate.topk_group = gate.num_group


class RouterBiasDropped(BugOperator):
    """The router adds no bias."""

    name, family = "router bias dropped", "gpt_oss"
    component, causes = _MLP, ("bias dropped",)

    def inject(self, model: nn.Module) -> None:
        """All routers."""
        for gate in _gates(model):

            def forward(original: Any, x: Tensor, gate: Any = gate) -> Any:
                logits = F.linear(x, gate.weight)
                top, indices = logits.topk(gate.top_k, -1)
                return logits, top.softmax(1), indices

            wrap_forward(gate, forward)


class SoftmaxAfterSame(BugOperator):
    """Softmax over the chosen: the same as renormalising."""

    name, family, control = "control: softmax after top-k, renormalised", "qwen3_moe", True

    def inject(self, model: nn.Module) -> None:
        """All routers, where the config asks for renormalisation."""

        def chosen(gate: Any, logits: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
            return logits.float().gather(1, indices).softmax(-1) if gate.norm_topk_prob else weights

        _weights(model, chosen)


class RouterWide(BugOperator):
    """The router's product in fp32."""

    name, family, control = "control: router in fp32", "mixtral", True

    def inject(self, model: nn.Module) -> None:
        """All routers."""
        for gate in _gates(model):

            def forward(original: Any, x: Tensor, gate: Any = gate) -> Any:
                x = x.reshape(-1, x.shape[-1])
                logits = F.linear(x.float(), gate.weight.float())
                chosen, indices = logits.softmax(-1).topk(gate.top_k, -1)
                return logits, chosen / chosen.sum(-1, keepdim=True), indices

            wrap_forward(gate, forward)
