"""Routed experts: which of them are run for a call, and how their outputs are combined."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from neuronx_distributed._standin.missing import attribute_hook, refuse, refuse_overrides
from neuronx_distributed.modules.moe.experts import Experts
from neuronx_distributed.modules.moe.model_utils import (
    ACT2FN,
    DEFAULT_SELECTIVE_LOADING_THRESHOLD,
    create_spmd_ranks,
)
from neuronx_distributed.modules.moe.moe_configs import BlockwiseMatmulConfig, RoutedExpertsMLPOpsConfig
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers._parameter import SPMDRank

__getattr__ = attribute_hook(__name__)


# The stack's own steps, which are taken in one place here.
_NOT_CALLED = (
    "initialize_mlp_op",
    "setup_all_experts",
    "mask_padding_tokens",
    "get_blockwise_expert_and_token_mapping",
    "torch_blockwise_matmul_inference",
)


class ExpertMLPsV2(nn.Module):
    """[T, hidden] with affinities [T, E] and choices [T, k] -> [T, hidden], of this rank (the sum is the caller's).

    Few tokens load their own experts alone, some run all experts, many are cut into blocks of one expert each: the
    same function, in another order of additions.

    Raises:
        ValueError: top_k is not in 1..num_experts, an unknown activation, or normalisation of a single affinity.
        StandInRefused: expert parallelism, hybrid sharding, sequence parallelism.
    """

    def __init__(
        self,
        routed_experts_mlp_config: RoutedExpertsMLPOpsConfig,
        blockwise_matmul_config: BlockwiseMatmulConfig | None = None,
        return_bias: bool = False,
        dtype: torch.dtype = torch.float32,
        sequence_parallel_enabled: bool = False,
        device: torch.device = torch.device("cpu"),  # the stack's own default
        tensor_model_parallel_group: ProcessGroup | None = None,
        expert_model_parallel_group: ProcessGroup | None = None,
        tkg_tensor_model_parallel_group: ProcessGroup | None = None,
        tkg_expert_model_parallel_group: ProcessGroup | None = None,
        cte_tensor_model_parallel_group: ProcessGroup | None = None,
        cte_expert_model_parallel_group: ProcessGroup | None = None,
        is_prefill: bool | None = True,
        enabled_hybrid_sharding: bool = False,
    ) -> None:
        super().__init__()
        refuse_overrides(self, ExpertMLPsV2, *_NOT_CALLED)
        if return_bias:
            raise NotImplementedError("Returning bias is currently unsupported for MoE")
        if enabled_hybrid_sharding:
            refuse("ExpertMLPsV2(enabled_hybrid_sharding=True)", "expert parallelism")
        if sequence_parallel_enabled:
            refuse("ExpertMLPsV2(sequence_parallel_enabled=True)", "sequence parallelism")
        self.routed_experts_mlp_config = routed_experts_mlp_config
        self.blockwise_matmul_config = blockwise_matmul_config or BlockwiseMatmulConfig.default()
        self.validate_routed_experts_configs(routed_experts_mlp_config)
        self.sequence_parallel_enabled, self.return_bias = sequence_parallel_enabled, return_bias
        self.enabled_hybrid_sharding, self.is_prefill = enabled_hybrid_sharding, is_prefill
        self.dtype, self.device = dtype, device
        tensor, expert = tensor_model_parallel_group, expert_model_parallel_group
        self.tensor_parallel_group = tensor or parallel_state.get_tensor_model_parallel_group()
        self.expert_model_parallel_group = expert or parallel_state.get_expert_model_parallel_group()
        by_stage = (
            (cte_tensor_model_parallel_group, cte_expert_model_parallel_group)
            if is_prefill
            else (tkg_tensor_model_parallel_group, tkg_expert_model_parallel_group)
        )
        self.moe_tensor_model_parallel_group = by_stage[0] or self.tensor_parallel_group
        self.moe_expert_model_parallel_group = by_stage[1] or self.expert_model_parallel_group
        if routed_experts_mlp_config.enable_spmd_rank:
            group = cte_tensor_model_parallel_group or self.tensor_parallel_group
            self.spmd_rank = SPMDRank(parallel_state.get_world_group().size(), group.size())
        self.mlp_op = self._make_experts(
            cte_tensor_model_parallel_group or self.tensor_parallel_group,
            cte_expert_model_parallel_group or self.expert_model_parallel_group,
        )

    def _make_experts(self, tensor_group: ProcessGroup, expert_group: ProcessGroup) -> Experts:
        given = self.routed_experts_mlp_config
        # Limits are meant for `up` before the bias is added, which the checkpoint's bias already holds.
        for name in ("up_clamp_upper_limit", "up_clamp_lower_limit"):
            if getattr(given, name):
                setattr(given, name, getattr(given, name) + given.hidden_act_bias)
        return Experts(
            given.num_experts,
            given.hidden_size,
            given.intermediate_size,
            glu=given.glu_mlp,
            activation_fn=ACT2FN[given.hidden_act],
            dtype=self.dtype,
            device=self.device,
            bias=given.bias,
            glu_type=given.glu_type,
            hidden_act_scaling_factor=given.hidden_act_scaling_factor,
            gate_clamp_upper_limit=given.gate_clamp_upper_limit,
            gate_clamp_lower_limit=given.gate_clamp_lower_limit,
            up_clamp_upper_limit=given.up_clamp_upper_limit,
            up_clamp_lower_limit=given.up_clamp_lower_limit,
            input_layer_init_method=given.input_layer_init_method,
            output_layer_init_method=given.output_layer_init_method,
            tensor_model_parallel_group=tensor_group,
            expert_model_parallel_group=expert_group,
        )

    def get_mlp_op(self) -> Experts:
        """The experts."""
        return self.mlp_op

    def get_spmd_rank(self) -> SPMDRank:
        """This rank's number as a parameter; absent unless `enable_spmd_rank`."""
        return self.spmd_rank

    def use_index_calc_kernel(self, total_tokens: int) -> bool:
        """Always False: a kernel."""
        return False

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        """Add the ranks; put `hidden_act_bias` into the up half of the bias and share the down bias among ranks."""
        given, own = self.routed_experts_mlp_config, prefix.removesuffix("weight")
        create_spmd_ranks(model_state_dict, own, parallel_state.get_world_group().size())
        if not given.bias:
            return
        both, down = f"{own}mlp_op.gate_up_proj.bias", f"{own}mlp_op.down_proj.bias"
        bias = model_state_dict[both].clone()
        if self.dtype is torch.float32:
            bias = bias.float()
        if not given.is_intermediate_dim_shuffled:
            start = bias.shape[-1] // 2
            width = given.intermediate_size_actual or bias.shape[-1] - start
            bias[:, start : start + width] += given.hidden_act_bias
        model_state_dict[both] = bias
        model_state_dict[down] = model_state_dict[down] / self.moe_tensor_model_parallel_group.size()

    @staticmethod
    def validate_routed_experts_configs(routed_experts_mlp_config: RoutedExpertsMLPOpsConfig) -> None:
        """Raises ValueError for what cannot be; a capacity that holds every token becomes None."""
        given = routed_experts_mlp_config
        if not 0 < given.top_k <= given.num_experts:
            raise ValueError(f"Invalid top_k={given.top_k} for num_experts={given.num_experts}")
        if given.hidden_act not in ACT2FN:
            raise ValueError(f"Unknown activation: {given.hidden_act} ; Supported: {list(ACT2FN)}")
        if given.capacity_factor is not None and given.capacity_factor >= given.num_experts / given.top_k:
            given.capacity_factor = None
        if given.normalize_top_k_affinities and given.top_k == 1:
            raise ValueError("top_k must be greater than 1 for normalizing top-k expert affinities")

    @staticmethod
    def get_expert_mask(expert_index: Tensor, num_experts: int) -> Tensor:
        """[T, k] -> [T, E] float64: how often each expert was chosen (1 or 0)."""
        return F.one_hot(expert_index, num_experts).sum(dim=1).double()

    @staticmethod
    def get_expert_affinities_masked(
        expert_affinities: Tensor, expert_mask: Tensor, normalize_top_k_affinities: bool
    ) -> Tensor:
        """[T, E]: 0 for experts that were not chosen; the others, if asked, divided by their sum."""
        masked = expert_affinities.masked_fill(expert_mask == 0, 0)
        return F.normalize(masked, p=1.0, dim=1) if normalize_top_k_affinities else masked

    def _masks(self, expert_affinities: Tensor, expert_index: Tensor) -> tuple[Tensor, Tensor]:
        mask = self.get_expert_mask(expert_index, expert_affinities.shape[1])
        normalize = self.routed_experts_mlp_config.normalize_top_k_affinities
        return mask, self.get_expert_affinities_masked(expert_affinities, mask, normalize)

    def forward_all_experts(
        self,
        hidden_states: Tensor,
        expert_affinities: Tensor,
        expert_index: Tensor,
        chosen_expert_indices: Tensor | None = None,
    ) -> Tensor:
        """Every expert sees every token.

        `early_expert_affinity_modulation` scales the input by the affinity of one chosen expert (top_k = 1).
        """
        mask, masked = self._masks(expert_affinities, expert_index)
        early = self.routed_experts_mlp_config.early_expert_affinity_modulation
        inputs = hidden_states * torch.gather(masked, 1, expert_index) if early else hidden_states
        outputs = self.mlp_op(inputs.unsqueeze(0), expert_indices=chosen_expert_indices)
        combined = torch.zeros_like(hidden_states)
        for expert, weights in enumerate((mask if early else masked).unbind(1)):
            combined += outputs[expert] * weights.unsqueeze(1)
        return combined

    def forward_selective_loading(
        self, hidden_states: Tensor, expert_affinities: Tensor, expert_index: Tensor
    ) -> Tensor:
        """Each token by itself, through its own experts, the one of the largest logit first."""
        chosen = torch.gather(expert_affinities, 1, expert_index)
        if self.routed_experts_mlp_config.normalize_top_k_affinities:
            chosen = F.normalize(chosen, p=1.0, dim=1)
        rows = []
        for token, weights, experts in zip(hidden_states, chosen, expert_index, strict=True):
            if self.routed_experts_mlp_config.early_expert_affinity_modulation:
                inputs = token.unsqueeze(0) * weights.unsqueeze(1)
                rows.append(self.mlp_op(inputs.unsqueeze(1), expert_indices=experts).squeeze(1).sum(0))
            else:
                outputs = self.mlp_op(token[None, None], expert_indices=experts).squeeze(1)
                rows.append((outputs * weights.unsqueeze(1)).sum(0))
        return torch.stack(rows)

    def forward_capacity_factor(self, hidden_states: Tensor, expert_affinities: Tensor, expert_index: Tensor) -> Tensor:
        """Each expert takes its first C = tokens · k · factor / E tokens, in order; the others are dropped there."""
        given = self.routed_experts_mlp_config
        tokens = hidden_states.shape[0]
        capacity = min(math.ceil(tokens * given.top_k * (given.capacity_factor or 0.0) / given.num_experts), tokens)
        mask = self.get_expert_mask(expert_index, given.num_experts)
        place = torch.cumsum(mask, dim=0)
        mask = mask.masked_fill(place > capacity, 0)
        masked = self.get_expert_affinities_masked(expert_affinities, mask, given.normalize_top_k_affinities)
        # Who sits where; an empty seat is token 0's, and is not read again.
        seats = torch.zeros(given.num_experts, capacity, dtype=torch.long, device=hidden_states.device)
        token, expert = torch.nonzero(mask, as_tuple=True)
        seats[expert, place[token, expert].long() - 1] = token
        outputs = self.mlp_op(hidden_states[seats])
        combined = torch.zeros_like(hidden_states)
        for index in expert_index.unbind(1):
            everyone = torch.arange(tokens, device=index.device)
            seat = (place[everyone, index].long() - 1).clamp(max=capacity - 1)
            combined += outputs[index, seat] * masked[everyone, index].unsqueeze(1)
        return combined

    def forward_blockwise(
        self,
        hidden_states: Tensor,
        expert_affinities: Tensor,
        expert_index: Tensor,
        expert_affinities_masked_full: Any = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Blocks of tokens of one expert, filled up by zeros. `padding_mask` [B, S] takes tokens out (output 0)."""
        mask, masked = self._masks(expert_affinities, expert_index)
        if padding_mask is not None:
            counted = padding_mask.reshape(-1, 1)
            mask, masked = mask * counted, masked * counted
        size = self.blockwise_matmul_config.block_size
        early = self.routed_experts_mlp_config.early_expert_affinity_modulation
        combined = torch.zeros_like(hidden_states)
        for expert in range(mask.shape[1]):
            index = torch.tensor([expert], device=hidden_states.device)
            for tokens in torch.nonzero(mask[:, expert]).flatten().split(size):
                inputs, weights = hidden_states[tokens], masked[tokens, expert].unsqueeze(1)
                if early:
                    inputs = inputs * weights
                block = F.pad(inputs, (0, 0, 0, size - tokens.numel())).unsqueeze(0)
                output = self.mlp_op(block, expert_indices=index).squeeze(0)[: tokens.numel()]
                combined[tokens] += output if early else output * weights
        return combined

    def forward(
        self,
        hidden_states: Tensor,
        expert_affinities: Tensor,
        expert_index: Tensor,
        seq_len: int,
        padding_mask: Tensor | None = None,
        expert_affinities_masked_full: Any = None,
    ) -> Tensor:
        """See the class. `seq_len` 1 is a decode step: capacity and padding are without effect there."""
        given, routed = self.routed_experts_mlp_config, (hidden_states, expert_affinities, expert_index)
        if self.training:
            if given.capacity_factor is None:
                return self.forward_all_experts(*routed)
            refuse("ExpertMLPsV2 in training mode with a capacity factor", "training")
        decode = seq_len == 1
        if not decode and given.capacity_factor is not None:
            return self.forward_capacity_factor(*routed)
        loaded = hidden_states.shape[0] * given.top_k
        if loaded / given.num_experts < DEFAULT_SELECTIVE_LOADING_THRESHOLD:
            return self.forward_selective_loading(*routed)
        if decode or loaded < self.blockwise_matmul_config.block_size:
            return self.forward_all_experts(*routed)
        return self.forward_blockwise(*routed, padding_mask=padding_mask)
