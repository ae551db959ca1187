"""The mixture of experts of Mixtral and DBRX, from loose arguments."""

from __future__ import annotations

from typing import Any

from neuronx_distributed._standin.missing import attribute_hook
from neuronx_distributed.modules.moe.expert_mlps import ExpertMLPs
from neuronx_distributed.modules.moe.model import MoE
from neuronx_distributed.modules.moe.routing import RouterTopK

from neuronx_distributed_inference.models.config import InferenceConfig

__getattr__ = attribute_hook(__name__)


def initialize_moe_module(
    config: InferenceConfig,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    hidden_act: str,
    normalize_top_k_affinities: bool = True,
) -> MoE:
    """A softmax router and experts; both are made in float32 and are not told the serving dtype. In eval mode."""
    served: Any = config.neuron_config
    router = RouterTopK(
        num_experts,
        top_k,
        hidden_size,
        sequence_parallel_enabled=served.sequence_parallel_enabled,
        sequence_dimension=1,
    )
    experts = ExpertMLPs(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        hidden_act=hidden_act,
        capacity_factor=served.capacity_factor,
        sequence_parallel_enabled=served.sequence_parallel_enabled,
        glu_mlp=served.glu_mlp,
        normalize_top_k_affinities=normalize_top_k_affinities,
        is_prefill=served.is_prefill_stage,
    )
    return MoE(router, experts, sequence_dimension=1).eval()
