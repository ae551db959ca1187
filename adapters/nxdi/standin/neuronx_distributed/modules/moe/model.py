"""A mixture of experts as a layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from neuronx_distributed._standin.missing import attribute_hook, refuse, refuse_overrides
from neuronx_distributed.modules.moe.moe_configs import MoEFusedTKGConfig
from neuronx_distributed.modules.moe.moe_fused_tkg import MoEFusedTKG
from neuronx_distributed.parallel_layers import mappings, parallel_state

__getattr__ = attribute_hook(__name__)


class MoE(nn.Module):
    """norm (if given), router, routed experts plus shared experts, and the sum over ranks. Returns a tuple.

    Raises:
        ValueError: router and experts are of other sizes.
        StandInRefused: sequence parallelism, shuffled tokens.
    """

    def __init__(
        self,
        router: Any,
        expert_mlps: Any,
        shared_experts: nn.Module | None = None,
        rmsnorm: nn.Module | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        return_router_logits: bool = False,
        return_expert_index: bool = False,
        token_shuffle_group_size: int = 1,
        token_shuffle_seed: Any = None,
        tensor_model_parallel_group: ProcessGroup | None = None,
        init_tkg_module: bool = False,
        tkg_config: MoEFusedTKGConfig | None = None,
    ) -> None:
        super().__init__()
        refuse_overrides(self, MoE, "_apply_shared_experts")
        for name in ("num_experts", "top_k", "hidden_size"):
            if getattr(router, name) != getattr(expert_mlps.routed_experts_mlp_config, name):
                raise ValueError(f"Inconsistent {name} across the router and expert_mlps")
        if sequence_parallel_enabled or router.sequence_parallel_enabled:
            refuse("MoE(sequence_parallel_enabled=True)", "sequence parallelism")
        if token_shuffle_group_size > 1:
            refuse(f"MoE(token_shuffle_group_size={token_shuffle_group_size})", "training")
        self.router, self.expert_mlps, self.shared_experts = router, expert_mlps, shared_experts
        self.rmsnorm, self.sequence_parallel_enabled = rmsnorm, sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.return_router_logits, self.return_expert_index = return_router_logits, return_expert_index
        self.token_shuffle_group_size, self.token_shuffle_seed = token_shuffle_group_size, token_shuffle_seed
        self.shuffle_permutation, self.ep_enabled = None, False
        group = tensor_model_parallel_group
        self.tensor_parallel_group = parallel_state.get_tensor_model_parallel_group() if group is None else group
        self.moe_fused_tkg: MoEFusedTKG | None = None
        if init_tkg_module:
            assert tkg_config is not None, "tkg_config must be passed if init_tkg_module is True"
            if tkg_config.is_mxfp4_compute:
                refuse("MoEFusedTKGConfig(is_mxfp4_compute=True)", "quantization")
            self.moe_fused_tkg = MoEFusedTKG(
                router,
                expert_mlps,
                tkg_config,
                self.sequence_dimension,
                shared_experts=shared_experts,
                post_attention_layernorm=rmsnorm,
                tensor_model_parallel_group=self.tensor_parallel_group,
                return_router_logits=return_router_logits,
                return_expert_index=return_expert_index,
            ).eval()

    def forward(
        self,
        hidden_states: Tensor,
        padding_mask: Tensor | None = None,
        is_speculative_decoding: bool = False,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """[B, S, hidden] -> (output, and what is asked for of router logits [T, E], choices [T, k], the residual)."""
        length = hidden_states.shape[self.sequence_dimension]
        if (length == 1 or is_speculative_decoding) and self.moe_fused_tkg is not None:
            return self.moe_fused_tkg(hidden_states, residual=residual)
        if residual is None:
            return self._forward_compute_bound(hidden_states, padding_mask)
        hidden_states = hidden_states + residual
        return (*self._forward_compute_bound(hidden_states, padding_mask), hidden_states.clone())

    def _forward_compute_bound(self, hidden_states: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, ...]:
        if self.rmsnorm is not None:
            hidden_states = self.rmsnorm(hidden_states)
        length = hidden_states.shape[self.sequence_dimension]
        logits, affinities, index = self.router(hidden_states)
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        output = self.expert_mlps(
            hidden_states=flat,
            expert_affinities=affinities,
            expert_index=index,
            seq_len=length,
            padding_mask=padding_mask,
        )
        if self.shared_experts is not None:
            output = output + self.shared_experts(flat, length)
        output = mappings.reduce_from_tensor_model_parallel_region(
            output.view(hidden_states.shape), self.tensor_parallel_group
        )
        asked = [(self.return_router_logits, logits), (self.return_expert_index, index)]
        return (output, *(value for wanted, value in asked if wanted))
