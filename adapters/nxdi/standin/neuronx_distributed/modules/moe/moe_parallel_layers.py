"""Linear layers of all experts at once: weights [experts, in, out], cut by output or by input features."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from neuronx_distributed._standin.missing import attribute_hook, refuse
from neuronx_distributed.parallel_layers import mappings, parallel_state
from neuronx_distributed.parallel_layers._linear import BaseParallelLinear
from neuronx_distributed.parallel_layers._parameter import group_or_default, sharded_parameter
from neuronx_distributed.parallel_layers.utils import divide, set_tensor_model_parallel_attributes

__getattr__ = attribute_hook(__name__)


class ExpertFusedLinear(BaseParallelLinear):
    """What both cuts share."""

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        stride: int = 1,
        init_method: Callable[..., Any] | None = None,
        keep_master_weight: bool = False,
        tensor_model_parallel_group: ProcessGroup | None = None,
        expert_model_parallel_group: ProcessGroup | None = None,
        is_prefill: bool = True,
        is_fused_gate_up: bool = False,
        expert_distribution: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(device=device)
        if expert_distribution is not None:
            refuse("a layer of experts with expert_distribution", "expert parallelism")
        group = expert_model_parallel_group
        self.expert_model_parallel_group = parallel_state.get_expert_model_parallel_group() if group is None else group
        self.tensor_parallel_group = group_or_default(tensor_model_parallel_group)
        self.num_experts = num_experts
        self._n_local_experts = divide(num_experts, self.expert_model_parallel_group.size())
        self.input_size, self.output_size = input_size, output_size
        self.add_bias, self.arg_init_method, self.dtype, self.stride = bias, init_method, dtype, stride
        self.is_prefill, self.is_fused_gate_up, self.pad = is_prefill, is_fused_gate_up, False
        self._make_parameters(device)

    def _make_parameters(self, device: torch.device | None) -> None:
        raise NotImplementedError

    def _init_weight(self, weight: Tensor) -> None:
        for expert in weight:  # each expert by itself
            super()._init_weight(expert)

    def _cut(self, shape: tuple[int, int, int], dim: int, device: torch.device | None) -> nn.Parameter:
        return sharded_parameter(
            shape,
            dim=dim,
            stride=self.stride,
            group=self.tensor_parallel_group,
            dtype=self.dtype,
            device=device,
            init=self._init_weight,
        )

    def _drawn_bias(self, width: int, fan_in: int) -> nn.Parameter:
        bias = nn.Parameter(torch.empty(self._n_local_experts, width, dtype=self.dtype, device=self.weight.device))
        if bias.device.type != "meta":
            nn.init.uniform_(bias, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
        return bias

    def _product(self, input_: Tensor, expert_indices: Tensor | None) -> Tensor:
        weight = self.weight if expert_indices is None else self.weight[expert_indices]
        if input_.shape[0] not in (1, weight.shape[0]):
            raise RuntimeError(f"the input is for {input_.shape[0]} experts, the weight has {weight.shape[0]}")
        return torch.einsum("e...h,ehi->e...i", input_, weight)

    def _plus_bias(self, output: Tensor, expert_indices: Tensor | None) -> Tensor:
        if self.bias is None:
            return output
        bias = self.bias if expert_indices is None else self.bias[expert_indices]
        return output + bias[:, None, None]


class ExpertFusedColumnParallelLinear(ExpertFusedLinear):
    """[E or 1, ..., in] -> [E, ..., out / ranks]; with `expert_indices` [n], of these experts alone."""

    def _make_parameters(self, device: torch.device | None) -> None:
        ranks = self.tensor_parallel_group.size()
        self.output_size_per_partition = divide(self.output_size, ranks)
        self.weight = self._cut((self._n_local_experts, self.input_size, self.output_size_per_partition), 2, device)
        if not self.add_bias:
            self.register_parameter("bias", None)
            return
        self.bias = self._drawn_bias(self.output_size_per_partition, self.output_size_per_partition)
        set_tensor_model_parallel_attributes(self.bias, True, dim=1, stride=self.stride, num_partitions=ranks)

    def forward(self, input_: Tensor, expert_indices: Tensor | None = None, *_: Any) -> Tensor:
        """See the class. Raises RuntimeError when input and weight have other numbers of experts."""
        return self._plus_bias(self._product(input_, expert_indices), expert_indices)


class ExpertFusedRowParallelLinear(ExpertFusedLinear):
    """[E, ..., in / ranks] -> [E, ..., out]. Without `reduce_output` the sum over the ranks is the caller's."""

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        bias: bool = False,
        reduce_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_experts, input_size, output_size, bias, dtype, device, **options)
        self.reduce_output = reduce_output

    def _make_parameters(self, device: torch.device | None) -> None:
        self.input_size_per_partition = divide(self.input_size, self.tensor_parallel_group.size())
        self.weight = self._cut((self._n_local_experts, self.input_size_per_partition, self.output_size), 1, device)
        if self.add_bias:
            self.bias = self._drawn_bias(self.output_size, self.input_size_per_partition)
        else:
            self.register_parameter("bias", None)

    def forward(self, input_: Tensor, expert_indices: Tensor | None = None) -> Tensor:
        """See the class. Raises RuntimeError when input and weight have other numbers of experts."""
        output = self._product(input_, expert_indices)
        if self.reduce_output:
            output = mappings.reduce_from_tensor_model_parallel_region(output, self.tensor_parallel_group)
        return self._plus_bias(output, expert_indices)
