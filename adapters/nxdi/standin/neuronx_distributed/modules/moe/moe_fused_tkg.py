"""The block of one token a row. Its kernels need the device; without them it is the block of a prompt."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from neuronx_distributed._standin.missing import attribute_hook, refuse
from neuronx_distributed.modules.moe.model_utils import DEFAULT_LNC_SIZE
from neuronx_distributed.modules.moe.moe_configs import MoEFusedTKGConfig
from neuronx_distributed.parallel_layers import mappings, parallel_state

__getattr__ = attribute_hook(__name__)


class MoEFusedTKG(nn.Module):
    """norm, router, experts and shared experts of one token a row. The modules are the caller's own, not copies."""

    def __init__(
        self,
        router: Any,
        expert_mlps: Any,
        config: MoEFusedTKGConfig,
        sequence_dimension: int,
        shared_experts: nn.Module | None = None,
        post_attention_layernorm: nn.Module | None = None,
        tensor_model_parallel_group: Any = None,
        logical_nc_config: int = DEFAULT_LNC_SIZE,
        return_router_logits: bool = False,
        return_expert_index: bool = False,
    ) -> None:
        super().__init__()
        self.post_attention_layernorm = post_attention_layernorm
        self.router, self.expert_mlps, self.shared_experts = router, expert_mlps, shared_experts
        self.config, self.sequence_dimension, self.logical_nc_config = config, sequence_dimension, logical_nc_config
        self.return_router_logits, self.return_expert_index = return_router_logits, return_expert_index
        given = expert_mlps.routed_experts_mlp_config
        self.hidden_size, self.num_experts_per_tok = given.hidden_size, given.top_k
        self.hidden_act, self.num_local_experts = given.hidden_act, given.num_experts
        group = tensor_model_parallel_group
        self.tensor_parallel_group = parallel_state.get_tensor_model_parallel_group() if group is None else group

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> tuple[Tensor, ...]:
        """[B, 1, hidden] -> (output, and what is asked for of logits, choices and the residual).

        Raises:
            StandInRefused: the fused kernel is switched on.
        """
        if self.config.moe_fused_kernel_enabled:
            refuse("MoEFusedTKG with moe_fused_kernel_enabled=True", "a kernel")
        if residual is not None:
            hidden_states = hidden_states + residual
            residual = hidden_states.clone()
        if self.post_attention_layernorm is not None:
            hidden_states = self.post_attention_layernorm(hidden_states)
        logits, affinities, index = self.router(hidden_states)
        length = hidden_states.shape[self.sequence_dimension]
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        shared = 0 if self.shared_experts is None else self.shared_experts(hidden_states, length)
        output = self.expert_mlps(flat, affinities, index, length).view(hidden_states.shape) + shared
        output = mappings.reduce_from_tensor_model_parallel_region(output, parallel_state.get_world_group())
        asked = [(self.return_router_logits, logits), (self.return_expert_index, index)]
        extra = [value for wanted, value in asked if wanted]
        return (output, *extra) if residual is None else (output, *extra, residual)

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        """Nothing: the caller's own modules have arranged the checkpoint."""
