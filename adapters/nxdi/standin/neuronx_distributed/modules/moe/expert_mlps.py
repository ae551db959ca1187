"""Routed experts with every option as an argument of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from neuronx_distributed._standin.missing import attribute_hook
from neuronx_distributed.modules.moe.expert_mlps_v2 import ExpertMLPsV2
from neuronx_distributed.modules.moe.model_utils import DEFAULT_BLOCK_SIZE
from neuronx_distributed.modules.moe.moe_configs import BlockwiseMatmulConfig, RoutedExpertsMLPOpsConfig

__getattr__ = attribute_hook(__name__)

_ROUTED = (
    "bias",
    "glu_type",
    "hidden_act_scaling_factor",
    "hidden_act_bias",
    "gate_clamp_upper_limit",
    "gate_clamp_lower_limit",
    "up_clamp_upper_limit",
    "up_clamp_lower_limit",
    "early_expert_affinity_modulation",
    "enable_spmd_rank",
    "expert_distribution",
)
_BLOCKS = (
    "blockwise_nki_autograd_cls",
    "use_torch_block_wise",
    "logical_nc_config",
    "parallelize_token_to_block_mapping",
    "optimized_block_to_token_mapping",
    "use_block_parallel",
    "always_augment_inputs_for_blockwise_matmul",
    "block_sharding_strategy",
    "skip_dma_token",
    "skip_dma_weight",
    "use_shard_on_intermediate_dynamic_while",
    "use_shard_on_block_dynamic_while",
)


class ExpertMLPs(ExpertMLPsV2):
    """`ExpertMLPsV2` from loose arguments."""

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        glu_mlp: bool,
        capacity_factor: float | None,
        sequence_parallel_enabled: bool = False,
        block_size: int | None = None,
        normalize_top_k_affinities: bool = False,
        init_method: Callable[..., Any] | None = torch.nn.init.kaiming_uniform_,
        output_layer_init_method: Callable[..., Any] | None = torch.nn.init.kaiming_uniform_,
        use_index_calc_kernel: bool = False,
        **options: Any,
    ) -> None:
        routed = {name: options.pop(name) for name in _ROUTED if name in options}
        blocks = {name: options.pop(name) for name in _BLOCKS if name in options}
        super().__init__(
            RoutedExpertsMLPOpsConfig(
                num_experts=num_experts,
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                top_k=top_k,
                hidden_act=hidden_act,
                glu_mlp=glu_mlp,
                capacity_factor=capacity_factor,
                normalize_top_k_affinities=normalize_top_k_affinities,
                input_layer_init_method=init_method,
                output_layer_init_method=output_layer_init_method,
                use_index_calc_kernel=use_index_calc_kernel,
                **routed,
            ),
            BlockwiseMatmulConfig.from_kwargs(block_size=block_size or DEFAULT_BLOCK_SIZE, **blocks),
            sequence_parallel_enabled=sequence_parallel_enabled,
            **options,
        )
