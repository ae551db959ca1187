"""The mixture of experts that a configuration describes."""

from __future__ import annotations

from typing import Any

from neuronx_distributed._standin.missing import attribute_hook, refuse
from neuronx_distributed.modules.moe.expert_mlps_v2 import ExpertMLPsV2
from neuronx_distributed.modules.moe.model import MoE
from neuronx_distributed.modules.moe.moe_configs import MoEFusedTKGConfig, RoutedExpertsMLPOpsConfig
from neuronx_distributed.modules.moe.routing import RouterTopK
from neuronx_distributed.modules.moe.shared_experts import SharedExperts
from neuronx_distributed.parallel_layers import parallel_state
from torch import nn

from neuronx_distributed_inference.models.config import InferenceConfig

__getattr__ = attribute_hook(__name__)

# Attributes of the serving configuration that the experts take as they are.
_OF_EXPERTS = (
    "is_hidden_dim_shuffled",
    "is_intermediate_dim_shuffled",
    "glu_mlp",
    "glu_type",
    "hidden_act_scaling_factor",
    "hidden_act_bias",
    "use_index_calc_kernel",
    "gate_clamp_upper_limit",
    "gate_clamp_lower_limit",
    "up_clamp_upper_limit",
    "up_clamp_lower_limit",
    "early_expert_affinity_modulation",
    "normalize_top_k_affinities",
)


def initialize_moe_module(
    config: InferenceConfig,
    rmsnorm: nn.Module | None = None,
    init_tkg_module: bool = False,
    apply_act_fn_over_topk: bool = False,
    router_bias: bool = False,
    experts_bias: bool = False,
) -> MoE:
    """Router, experts of width `config.intermediate_size`, and `config.n_shared_experts` shared ones; in eval mode.

    Reads num_local_experts, num_experts_per_tok, hidden_size, intermediate_size, hidden_act and n_shared_experts of
    `config` and the MoE fields of its neuron_config, at this moment: what is set later has no effect.

    Raises:
        AttributeError: one of them is absent.
    """
    served: Any = config.neuron_config
    described: Any = config
    tkg_tensor, tkg_expert, cte_tensor, cte_expert = initialize_moe_process_group(config, False)
    router = RouterTopK(
        num_experts=described.num_local_experts,
        top_k=described.num_experts_per_tok,
        hidden_size=described.hidden_size,
        dtype=served.router_config.dtype,
        act_fn=served.router_config.act_fn,
        sequence_parallel_enabled=served.sequence_parallel_enabled,
        sequence_dimension=1,
        bias=router_bias,
        apply_act_fn_over_topk=apply_act_fn_over_topk,
        store_transposed_weights=init_tkg_module,
    )
    experts = ExpertMLPsV2(
        RoutedExpertsMLPOpsConfig(
            num_experts=described.num_local_experts,
            hidden_size=described.hidden_size,
            intermediate_size=described.intermediate_size,
            hidden_size_actual=getattr(config, "original_hidden_size", None),
            intermediate_size_actual=getattr(config, "original_intermediate_size", None),
            top_k=described.num_experts_per_tok,
            hidden_act=described.hidden_act,
            bias=experts_bias,
            enable_spmd_rank=served.blockwise_matmul_config.parallelize_token_to_block_mapping,
            **{name: getattr(served, name) for name in _OF_EXPERTS},
        ),
        blockwise_matmul_config=served.blockwise_matmul_config,
        sequence_parallel_enabled=served.sequence_parallel_enabled,
        dtype=served.torch_dtype,
        is_prefill=served.is_prefill_stage,
        tensor_model_parallel_group=parallel_state.get_tensor_model_parallel_group(),
        expert_model_parallel_group=parallel_state.get_expert_model_parallel_group(),
        cte_tensor_model_parallel_group=cte_tensor,
        cte_expert_model_parallel_group=cte_expert,
        tkg_tensor_model_parallel_group=tkg_tensor,
        tkg_expert_model_parallel_group=tkg_expert,
    )
    shared = None
    if described.n_shared_experts:
        shared = SharedExperts(
            described.hidden_size,
            described.intermediate_size,
            described.n_shared_experts,
            described.hidden_act,
            dtype=served.torch_dtype,
            reduce_dtype=served.rpl_reduce_dtype,
            fused_gate_up_projection=served.fused_shared_experts,
            transpose_weights=served.transpose_shared_experts_weights,
        )
    one_token = MoEFusedTKGConfig(
        quantized=served.quantized,
        moe_fused_kernel_enabled=served.moe_fused_nki_kernel_enabled,
        router_topk_kernel_enabled=served.router_topk_nki_kernel_enabled,
        expert_mlp_kernel_enabled=served.expert_mlp_nki_kernel_enabled,
        shared_mlp_kernel_enabled=served.shared_mlp_nki_kernel_enabled,
        norm_topk_prob=served.normalize_top_k_affinities,
        is_mxfp4_compute=served.is_mxfp4_compute,
        router_mm_dtype=served.router_config.dtype,
    )
    return MoE(
        router,
        experts,
        shared_experts=shared,
        rmsnorm=rmsnorm,
        return_expert_index=served.return_expert_index,
        return_router_logits=served.return_router_logits,
        sequence_dimension=1,
        init_tkg_module=init_tkg_module,
        tkg_config=one_token if init_tkg_module else None,
    ).eval()


def initialize_moe_process_group(config: InferenceConfig, enabled_hybrid_sharding: bool) -> tuple[Any, Any, Any, Any]:
    """The tensor and the expert group of decode, and those of prefill: the model's own, both times."""
    if enabled_hybrid_sharding:
        refuse("initialize_moe_process_group(enabled_hybrid_sharding=True)", "expert parallelism")
    groups = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_model_parallel_group()
    return (*groups, *groups)
