"""Experts that every token goes through, as one MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from neuronx_distributed._standin.missing import attribute_hook, refuse, refuse_overrides
from neuronx_distributed.modules.moe.model_utils import ACT2FN
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_group

__getattr__ = attribute_hook(__name__)


class ColumnParallelLinearTransposed(ColumnParallelLinear):
    """Takes its weight the other way round: y = x W."""

    def forward(self, input: Tensor, slice_indices: Tensor | None = None) -> Tensor:
        """[..., out / ranks] -> [..., in]."""
        self._check_inference()
        return torch.einsum("...i,oi->...o", input, self.weight.t())


class RowParallelLinearTransposed(RowParallelLinear):
    """Takes its weight the other way round: y = x W."""

    def forward(self, input_: Tensor, slice_indices: Tensor | None = None) -> Tensor:
        """[..., out] -> [..., in / ranks]."""
        self._check_inference()
        return torch.einsum("...i,oi->...o", input_, self.weight.t())


class SharedExperts(nn.Module):
    """down(act(gate(x)) · up(x)), `num_shared_experts` times as wide as one expert. No sum over ranks: the caller's.

    Raises:
        KeyError: an activation that experts do not have.
        StandInRefused: sequence parallelism.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_shared_experts: int,
        hidden_act: str,
        dtype: torch.dtype = torch.float32,
        tensor_model_parallel_group: ProcessGroup | None = None,
        reduce_dtype: torch.dtype = torch.float32,
        fused_gate_up_projection: bool = False,
        sequence_parallel_enabled: bool = False,
        transpose_weights: bool = False,
    ) -> None:
        super().__init__()
        refuse_overrides(self, SharedExperts, "_initialize_parallel_layers", "_forward", "_fused_activation")
        if sequence_parallel_enabled:
            refuse("SharedExperts(sequence_parallel_enabled=True)", "sequence parallelism")
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_shared_experts, self.act_fn = num_shared_experts, ACT2FN[hidden_act]
        self.dtype, self.reduce_dtype = dtype, reduce_dtype
        self.fused_gate_up_projection, self.transpose_weights = fused_gate_up_projection, transpose_weights
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.tensor_parallel_group = tensor_model_parallel_group or get_tensor_model_parallel_group()
        width = intermediate_size * num_shared_experts
        options: dict[str, Any] = {
            "bias": False,
            "dtype": dtype,
            "reduce_dtype": reduce_dtype,
            "tensor_model_parallel_group": self.tensor_parallel_group,
        }
        column = ColumnParallelLinearTransposed if transpose_weights else ColumnParallelLinear
        row = RowParallelLinearTransposed if transpose_weights else RowParallelLinear
        cut = {"gather_output": False, **options}
        joined = {"input_is_parallel": True, "reduce_output": False, **options}
        if fused_gate_up_projection:
            self.gate_up_proj = column(hidden_size, 2 * width, stride=2, **cut)
            self.down_proj = row(width, hidden_size, **joined)
        elif transpose_weights:
            self.gate_proj, self.up_proj = (row(width, hidden_size, **joined) for _ in range(2))
            self.down_proj = column(hidden_size, width, **cut)
        else:
            self.gate_proj, self.up_proj = (column(hidden_size, width, **cut) for _ in range(2))
            self.down_proj = row(width, hidden_size, **joined)

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        """Turn the checkpoint's matrices round, where they are kept so.

        Raises:
            AssertionError: gate and up are one matrix.
        """
        if not self.transpose_weights:
            return
        assert not self.fused_gate_up_projection
        own = prefix.removesuffix("weight")
        for name in ("gate_proj", "up_proj", "down_proj"):
            model_state_dict[f"{own}{name}.weight"] = model_state_dict[f"{own}{name}.weight"].T

    def forward(self, x: Tensor, seq_len: int) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        if self.fused_gate_up_projection:
            gate, up = torch.chunk(self.gate_up_proj(x), 2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self.act_fn(gate) * up)
