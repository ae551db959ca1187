"""Linear layers cut by output features (column) or by input features (row)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from neuronx_distributed.parallel_layers import mappings
from neuronx_distributed.parallel_layers._parameter import BaseParallelLayer, group_or_default, sharded_parameter
from neuronx_distributed.parallel_layers.utils import (
    divide,
    get_padding_length,
    set_tensor_model_parallel_attributes,
)


class BaseParallelLinear(BaseParallelLayer):
    """What both cuts share: initialisation, and `pad=True` being for inference alone."""

    arg_init_method: Callable[[Any], Any] | None
    pad: bool
    pad_size: int

    def _init_weight(self, weight: Tensor) -> None:
        if self.arg_init_method is not None:
            self.arg_init_method(weight)
        else:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))

    def _uniform_bias(self, size: int, fan_in: int) -> nn.Parameter:
        """A bias drawn from U(-1/sqrt(fan_in), 1/sqrt(fan_in)): it is not zero until a checkpoint sets it."""
        bias = nn.Parameter(torch.empty(size, dtype=self.dtype, device=self.weight.device))
        if bias.device.type != "meta":
            bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0
            nn.init.uniform_(bias, -bound, bound)
        return bias

    def _check_inference(self) -> None:
        if self.pad and self.training:
            raise RuntimeError("`pad=True` is only supported for inference: call eval() on the model first")

    @staticmethod
    def _sequence_dimension(enabled: bool, dimension: int | None) -> int | None:
        if enabled and dimension is None:
            warnings.warn("sequence parallel without a sequence_dimension: dimension 0 is taken", stacklevel=3)
            return 0
        return dimension


class ColumnParallelLinear(BaseParallelLinear):
    """y = x Wᵀ + b, W [out / ranks, in]. With `gather_output` every rank gets all of y [..., out]."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        stride: int = 1,
        init_method: Callable[[Any], Any] | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        pad_alignment_size_per_rank: int = 1,
        keep_padded_output: bool = False,
        tensor_model_parallel_group: ProcessGroup | None = None,
        reduce_dtype: torch.dtype = torch.float32,
        rank_ordering: Sequence[int] | None = None,
    ) -> None:
        super().__init__(device=device)
        self.tensor_parallel_group = group_or_default(tensor_model_parallel_group)
        ranks = self.tensor_parallel_group.size()
        self.input_size, self.output_size = input_size, output_size
        self.add_bias, self.gather_output, self.skip_bias_add = bias, gather_output, skip_bias_add
        self.arg_init_method, self.rank_ordering = init_method, rank_ordering
        self.dtype, self.stride = dtype, stride
        self.pad, self.keep_padded_output = pad, keep_padded_output
        if pad:
            self.pad_size = get_padding_length(output_size, pad_alignment_size_per_rank * ranks)
            self.output_size += self.pad_size
        self.output_size_per_partition = divide(self.output_size, ranks)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = self._sequence_dimension(sequence_parallel_enabled, sequence_dimension)
        self.reduce_dtype = reduce_dtype if reduce_dtype is not None else dtype
        self.weight = sharded_parameter(
            (self.output_size_per_partition, input_size),
            dim=0,
            stride=stride,
            group=self.tensor_parallel_group,
            dtype=dtype,
            device=device,
            init=self._init_weight,
            rank_ordering=rank_ordering,
        )
        self.device = self.weight.device
        if not bias:
            self.register_parameter("bias", None)
            return
        # A gathered output carries the whole bias on every rank; a cut one carries its piece.
        self.bias = self._uniform_bias(
            self.output_size if gather_output else self.output_size_per_partition, input_size
        )
        if not gather_output:
            set_tensor_model_parallel_attributes(
                self.bias, True, dim=0, stride=stride, num_partitions=ranks, rank_ordering=rank_ordering
            )

    def forward(self, input: Tensor, slice_indices: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor | None]:
        """x [..., in] -> y [..., out or out / ranks]; with `skip_bias_add`, (y, bias) and nothing added."""
        self._check_inference()
        if self.sequence_parallel_enabled:
            input = mappings.gather_from_sequence_parallel_region(
                input, self.sequence_dimension or 0, process_group=self.tensor_parallel_group
            )
        weight = self.weight if slice_indices is None else self.weight[slice_indices, :]
        output = torch.einsum("...i,oi->...o", input, weight)
        if self.gather_output:
            assert not self.sequence_parallel_enabled
            output = mappings.gather_from_tensor_model_parallel_region(output, self.tensor_parallel_group)
            if self.pad and self.pad_size > 0 and not self.keep_padded_output:
                output = output.narrow(-1, 0, self.output_size - self.pad_size)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        """Pad the checkpoint's rows: weights by zeros, a bias by the smallest number of its dtype.

        Raises:
            RuntimeError: the tensor is not of the unpadded size, or is neither a weight nor a bias.
        """
        if not self.pad or self.pad_size == 0:
            return
        tensor = model_state_dict[prefix]
        if tensor.shape[0] + self.pad_size != self.output_size:
            raise RuntimeError(
                f"{prefix} has {tensor.shape[0]} rows in the checkpoint, expected {self.output_size - self.pad_size}"
            )
        if prefix.endswith("weight"):
            model_state_dict[prefix] = F.pad(tensor, (0, 0, 0, self.pad_size))
        elif prefix.endswith("bias"):
            model_state_dict[prefix] = F.pad(tensor, (0, self.pad_size), value=torch.finfo(tensor.dtype).min)
        else:
            raise RuntimeError(f"{prefix} is neither a weight nor a bias")


class RowParallelLinear(BaseParallelLinear):
    """y = sum over ranks of x_r W_rᵀ, + b; W [out, in / ranks]. The bias is added once, after the sum."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        stride: int = 1,
        init_method: Callable[..., Any] | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_output: bool = True,
        tensor_model_parallel_group: ProcessGroup | None = None,
        reduce_dtype: torch.dtype = torch.float32,
        tile_cc: bool = False,
        rank_ordering: Sequence[int] | None = None,
    ) -> None:
        super().__init__(device=device)
        self.tensor_parallel_group = group_or_default(tensor_model_parallel_group)
        ranks = self.tensor_parallel_group.size()
        self.input_size, self.output_size = input_size, output_size
        self.add_bias, self.input_is_parallel, self.skip_bias_add = bias, input_is_parallel, skip_bias_add
        self.reduce_output, self.reduce_dtype = reduce_output, reduce_dtype if reduce_dtype is not None else dtype
        self.arg_init_method, self.rank_ordering = init_method, rank_ordering
        self.dtype, self.stride, self.tile_cc = dtype, stride, tile_cc
        self.pad = pad
        if pad:
            self.pad_size = get_padding_length(input_size, ranks)
            self.input_size += self.pad_size
        self.input_size_per_partition = divide(self.input_size, ranks)
        if sequence_parallel_enabled and not input_is_parallel:
            raise RuntimeError("`sequence_parallel_enabled` needs `input_is_parallel`")
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = self._sequence_dimension(sequence_parallel_enabled, sequence_dimension)
        self.weight = sharded_parameter(
            (output_size, self.input_size_per_partition),
            dim=1,
            stride=stride,
            group=self.tensor_parallel_group,
            dtype=dtype,
            device=device,
            init=self._init_weight,
            rank_ordering=rank_ordering,
        )
        self.device = self.weight.device
        if not bias:
            self.register_parameter("bias", None)
            return
        self.bias = self._uniform_bias(output_size, self.input_size_per_partition)
        self.bias.sequence_parallel_enabled = sequence_parallel_enabled  # type: ignore[attr-defined]

    def forward(self, input_: Tensor, slice_indices: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor | None]:
        """x [..., in / ranks] (or [..., in], cut here) -> y [..., out]: a tensor, so [0] takes batch row 0."""
        self._check_inference()
        if not self.input_is_parallel:
            if self.pad and self.pad_size > 0:
                input_ = F.pad(input_, (0, self.pad_size))
            input_ = mappings.scatter_to_tensor_model_parallel_region(input_, self.tensor_parallel_group)
        weight = self.weight if slice_indices is None else self.weight[:, slice_indices]
        output = torch.einsum("...i,oi->...o", input_, weight)
        if self.reduce_output:
            partial = output.to(self.reduce_dtype)
            if self.sequence_parallel_enabled:
                partial = mappings.reduce_scatter_to_sequence_parallel_region(
                    partial, self.sequence_dimension or 0, process_group=self.tensor_parallel_group
                )
            else:
                partial = mappings.reduce_from_tensor_model_parallel_region(partial, self.tensor_parallel_group)
            output = partial.to(output.dtype)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        """Pad the checkpoint's columns by zeros. A bias is left alone.

        Raises:
            RuntimeError: the weight is not of the unpadded size.
        """
        if not self.pad or self.pad_size == 0 or prefix.endswith("bias"):
            return
        columns = model_state_dict[prefix].shape[1]
        if columns + self.pad_size != self.input_size:
            raise RuntimeError(
                f"{prefix} has {columns} columns in the checkpoint, expected {self.input_size - self.pad_size}"
            )
        model_state_dict[prefix] = F.pad(model_state_dict[prefix], (0, self.pad_size))
