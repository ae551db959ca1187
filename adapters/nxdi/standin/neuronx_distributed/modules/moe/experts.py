"""The MLPs of all experts, side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from neuronx_distributed._standin.missing import attribute_hook
from neuronx_distributed.modules.moe.model_utils import GLUType
from neuronx_distributed.modules.moe.moe_parallel_layers import (
    ExpertFusedColumnParallelLinear,
    ExpertFusedRowParallelLinear,
)
from neuronx_distributed.parallel_layers.parallel_state import (
    get_expert_model_parallel_group,
    get_tensor_model_parallel_group,
)

__getattr__ = attribute_hook(__name__)


class Experts(nn.Module):
    """`gate_up_proj` (gate first) or `up_proj`, activation, `down_proj`. The sum over ranks is the caller's.

    `hidden_act_bias` is taken and left at 0: the stack expects it in the checkpoint's bias.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        glu: bool,
        activation_fn: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
        glu_type: Any = GLUType.GLU,
        hidden_act_scaling_factor: float = 1.0,
        hidden_act_bias: float = 0.0,
        gate_clamp_upper_limit: float | None = None,
        gate_clamp_lower_limit: float | None = None,
        up_clamp_upper_limit: float | None = None,
        up_clamp_lower_limit: float | None = None,
        input_layer_init_method: Any = None,
        output_layer_init_method: Any = None,
        is_prefill: bool = True,
        tensor_model_parallel_group: Any = None,
        expert_model_parallel_group: Any = None,
        expert_distribution: Any = None,
    ) -> None:
        super().__init__()
        self._glu, self._activation_fn = glu, activation_fn
        self._glu_type = GLUType.validate(glu_type) if glu else glu_type
        self.num_experts = num_experts
        self.hidden_act_scaling_factor, self.hidden_act_bias = hidden_act_scaling_factor, hidden_act_bias
        self.gate_clamp_upper_limit, self.gate_clamp_lower_limit = gate_clamp_upper_limit, gate_clamp_lower_limit
        self.up_clamp_upper_limit, self.up_clamp_lower_limit = up_clamp_upper_limit, up_clamp_lower_limit
        self.tensor_parallel_group = tensor_model_parallel_group or get_tensor_model_parallel_group()
        self.expert_model_parallel_group = expert_model_parallel_group or get_expert_model_parallel_group()
        options: dict[str, Any] = {
            "bias": bias,
            "dtype": dtype,
            "device": device,
            "tensor_model_parallel_group": self.tensor_parallel_group,
            "expert_model_parallel_group": self.expert_model_parallel_group,
            "is_prefill": is_prefill,
            "expert_distribution": expert_distribution,
        }
        if glu:
            # Two matrices side by side, each cut by itself.
            self.gate_up_proj = ExpertFusedColumnParallelLinear(
                num_experts,
                hidden_size,
                2 * intermediate_size,
                stride=2,
                init_method=input_layer_init_method,
                is_fused_gate_up=True,
                **options,
            )
        else:
            self.up_proj = ExpertFusedColumnParallelLinear(
                num_experts, hidden_size, intermediate_size, init_method=input_layer_init_method, **options
            )
        self.down_proj = ExpertFusedRowParallelLinear(
            num_experts,
            intermediate_size,
            hidden_size,
            reduce_output=False,
            init_method=output_layer_init_method,
            **options,
        )

    def forward(self, hidden_states: Tensor, expert_indices: Tensor | None = None) -> Tensor:
        """[E or 1, C, hidden] -> [E, C, hidden]; with `expert_indices` [n], n experts in place of all E.

        Raises:
            AssertionError: the input is not 3-dimensional, or for another number of experts.
        """
        count = self.num_experts if expert_indices is None else expert_indices.shape[0]
        assert hidden_states.dim() == 3 and hidden_states.shape[0] in (1, count)
        first = self.gate_up_proj if self._glu else self.up_proj
        inner = self._activation(first(hidden_states.unsqueeze(1), expert_indices))
        return self.down_proj(inner, expert_indices).squeeze(1)

    def _activation(self, x: Tensor) -> Tensor:
        if not self._glu:
            return self._activation_fn(x)
        gate, up = torch.chunk(x, 2, dim=-1)
        # A pair of limits of which none differs from 0 is no clamp, as on the stack.
        if self.gate_clamp_lower_limit or self.gate_clamp_upper_limit:
            gate = gate.clamp(self.gate_clamp_lower_limit, self.gate_clamp_upper_limit)
        if self.up_clamp_lower_limit or self.up_clamp_upper_limit:
            up = up.clamp(self.up_clamp_lower_limit, self.up_clamp_upper_limit)
        activated = self._activation_fn(self.hidden_act_scaling_factor * gate)
        if self._glu_type is GLUType.SWIGLU:
            activated = gate * activated
        return activated * (up + self.hidden_act_bias)
