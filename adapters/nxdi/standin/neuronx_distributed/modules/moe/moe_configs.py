"""What configures experts, routers and the one-token block; data alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch

from neuronx_distributed._standin.missing import attribute_hook, refuse
from neuronx_distributed.modules.moe.model_utils import DEFAULT_BLOCK_SIZE, DEFAULT_LNC_SIZE, DEFAULT_SKIP_MODE, GLUType

__getattr__ = attribute_hook(__name__)

_DTYPES = ("float32", "float16", "bfloat16")


def to_torch_dtype(dtype_str: str) -> torch.dtype:
    """The dtype of that name. Raises AssertionError for one that a router cannot have."""
    assert dtype_str in _DTYPES, f"Unsupported dtype: {dtype_str}"
    return getattr(torch, dtype_str)


class BlockShardStrategy(Enum):
    """How blocks are dealt to the cores of one device: kept as data."""

    HI_LO = 0
    PING_PONG = 1


class BlockwiseMatmulConfig:
    """How prompts of at least `block_size` routed tokens are cut. On a CPU only the block's size has an effect."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    @staticmethod
    def from_kwargs(**kwargs: Any) -> BlockwiseMatmulConfig:
        """Defaults and what is given; an unknown keyword is passed over. Raises ValueError for an unknown strategy."""
        defaults: dict[str, Any] = {
            "block_size": DEFAULT_BLOCK_SIZE,
            "use_block_parallel": False,
            "block_sharding_strategy": BlockShardStrategy.HI_LO,
            "skip_dma_token": DEFAULT_SKIP_MODE[0],
            "skip_dma_weight": DEFAULT_SKIP_MODE[1],
            "logical_nc_config": DEFAULT_LNC_SIZE,
            "blockwise_nki_autograd_cls": None,
            "use_torch_block_wise": False,
            "parallelize_token_to_block_mapping": True,
            "optimized_block_to_token_mapping": True,
            "always_augment_inputs_for_blockwise_matmul": False,
            "use_shard_on_intermediate_dynamic_while": False,
            "use_shard_on_block_dynamic_while": False,
            "num_static_blocks": None,
            "pad_num_blocks_to_even": False,
        }
        values = {name: kwargs.get(name, default) for name, default in defaults.items()}
        strategy = values["block_sharding_strategy"]
        if isinstance(strategy, str):
            if strategy not in BlockShardStrategy.__members__:
                raise ValueError(f"Unsupported block_sharding_strategy: {strategy}")
            values["block_sharding_strategy"] = BlockShardStrategy[strategy]
        return BlockwiseMatmulConfig(**values)

    @staticmethod
    def default() -> BlockwiseMatmulConfig:
        """All defaults."""
        return BlockwiseMatmulConfig.from_kwargs()


class RoutedExpertsMLPOpsConfig:
    """Sizes, activation and combination of the routed experts.

    Raises:
        ValueError: an unknown kind of gated unit.
        StandInRefused: a distribution of experts over ranks.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        top_k: int,
        hidden_act: str,
        glu_mlp: bool,
        bias: bool = False,
        glu_type: Any = GLUType.GLU,
        hidden_act_scaling_factor: float = 1.0,
        hidden_act_bias: float = 0.0,
        hidden_size_actual: int | None = None,
        intermediate_size_actual: int | None = None,
        is_hidden_dim_shuffled: bool | None = None,
        is_intermediate_dim_shuffled: bool | None = None,
        use_index_calc_kernel: bool = True,
        gate_clamp_upper_limit: float | None = None,
        gate_clamp_lower_limit: float | None = None,
        up_clamp_upper_limit: float | None = None,
        up_clamp_lower_limit: float | None = None,
        normalize_top_k_affinities: bool = False,
        early_expert_affinity_modulation: bool = False,
        input_layer_init_method: Callable[..., Any] | None = None,
        output_layer_init_method: Callable[..., Any] | None = None,
        capacity_factor: float | None = None,
        enable_spmd_rank: bool = False,
        is_prefill: bool | None = None,
        expert_distribution: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if expert_distribution:
            refuse("RoutedExpertsMLPOpsConfig(expert_distribution=...)", "expert parallelism")
        self.num_experts, self.top_k = num_experts, top_k
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.hidden_size_actual, self.intermediate_size_actual = hidden_size_actual, intermediate_size_actual
        self.is_hidden_dim_shuffled = is_hidden_dim_shuffled
        self.is_intermediate_dim_shuffled = is_intermediate_dim_shuffled
        self.hidden_act, self.glu_mlp, self.bias = hidden_act, glu_mlp, bias
        self.glu_type = GLUType.validate(glu_type) if glu_mlp else glu_type
        self.hidden_act_scaling_factor, self.hidden_act_bias = hidden_act_scaling_factor, hidden_act_bias
        self.use_index_calc_kernel = use_index_calc_kernel
        self.gate_clamp_upper_limit, self.gate_clamp_lower_limit = gate_clamp_upper_limit, gate_clamp_lower_limit
        self.up_clamp_upper_limit, self.up_clamp_lower_limit = up_clamp_upper_limit, up_clamp_lower_limit
        self.normalize_top_k_affinities = normalize_top_k_affinities
        self.early_expert_affinity_modulation = early_expert_affinity_modulation
        self.input_layer_init_method = input_layer_init_method
        self.output_layer_init_method = output_layer_init_method
        self.capacity_factor, self.enable_spmd_rank, self.is_prefill = capacity_factor, enable_spmd_rank, is_prefill
        self.expert_distribution = expert_distribution


class RouterConfig:
    """The router's activation and dtype (a dtype or its name)."""

    def __init__(self, act_fn: str = "softmax", dtype: torch.dtype | str | None = torch.float32) -> None:
        self.act_fn = act_fn
        self.dtype = to_torch_dtype(dtype) if isinstance(dtype, str) else dtype

    @staticmethod
    def from_kwargs(**kwargs: Any) -> RouterConfig:
        """From `router_act_fn` and `router_dtype`."""
        return RouterConfig(kwargs.get("router_act_fn", "softmax"), kwargs.get("router_dtype", torch.float32))


class MoEFusedTKGConfig:
    """Kernels of the one-token block: data; the ones that are on are refused when a token comes."""

    def __init__(
        self,
        quantized: bool,
        moe_fused_kernel_enabled: bool | None = None,
        router_topk_kernel_enabled: bool | None = None,
        expert_mlp_kernel_enabled: bool | None = None,
        shared_mlp_kernel_enabled: bool | None = None,
        norm_topk_prob: bool = False,
        is_mxfp4_compute: bool | None = None,
        router_mm_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.quantized, self.norm_topk_prob, self.is_mxfp4_compute = quantized, norm_topk_prob, is_mxfp4_compute
        self.moe_fused_kernel_enabled = moe_fused_kernel_enabled
        self.router_topk_kernel_enabled = router_topk_kernel_enabled
        self.expert_mlp_kernel_enabled = expert_mlp_kernel_enabled
        self.shared_mlp_kernel_enabled = shared_mlp_kernel_enabled
        self.router_mm_dtype = router_mm_dtype
