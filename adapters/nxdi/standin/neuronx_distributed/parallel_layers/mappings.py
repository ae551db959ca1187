"""Collectives over the tensor group: gloo when it has several ranks, the identity when it has one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from neuronx_distributed._standin.missing import attribute_hook
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.utils import divide

__getattr__ = attribute_hook(__name__)

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _group(process_group: ProcessGroup | None) -> ProcessGroup:
    return process_group if process_group is not None else parallel_state.get_tensor_model_parallel_group()


def _reduce(input_: Tensor, computation: str = "sum", process_group: ProcessGroup | None = None) -> Tensor:
    group = _group(process_group)
    if group.size() == 1:
        return input_
    total = input_.detach().clone().contiguous()
    dist.all_reduce(total, op=_OPERATIONS[computation], group=group)
    return total


def _gather_along_dim(
    x: Tensor, partition_dim: int, process_group: ProcessGroup | None = None, tile_cc: bool = False
) -> Tensor:
    group = _group(process_group)
    if group.size() == 1:
        return x
    own = x.detach().contiguous()
    pieces = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(pieces, own, group=group)
    return torch.cat(pieces, dim=partition_dim)


def _split_along_dim(input_: Tensor, partition_dim: int, process_group: ProcessGroup | None = None) -> Tensor:
    group = _group(process_group)
    if group.size() == 1:
        return input_
    size = divide(input_.shape[partition_dim], group.size())
    return input_.narrow(partition_dim, group.rank() * size, size).contiguous()


def _reduce_scatter_along_dim(
    x: Tensor,
    partition_dim: int,
    computation: str = "sum",
    process_group: ProcessGroup | None = None,
    tile_cc: bool = False,
) -> Tensor:
    return _split_along_dim(_reduce(x, computation, process_group), partition_dim, process_group)


def _gather_along_first_dim(x: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    return _gather_along_dim(x, 0, process_group)


def _gather_along_last_dim(x: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    return _gather_along_dim(x, x.dim() - 1, process_group)


def copy_to_tensor_model_parallel_region(input_: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """The input itself: every rank holds it already."""
    return input_.view_as(input_)


def reduce_from_tensor_model_parallel_region(input_: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """Sum over the group."""
    return _reduce(input_, process_group=process_group)


def scatter_to_tensor_model_parallel_region(input_: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """This rank's piece of the last dimension."""
    return _split_along_dim(input_, input_.dim() - 1, process_group)


def gather_from_tensor_model_parallel_region(input_: Tensor, process_group: ProcessGroup | None = None) -> Tensor:
    """The whole last dimension, from all ranks' pieces."""
    return _gather_along_last_dim(input_, process_group)


def scatter_to_sequence_parallel_region(
    input_: Tensor, sequence_dimension: int = 0, process_group: ProcessGroup | None = None
) -> Tensor:
    """This rank's piece of the sequence."""
    return _split_along_dim(input_, sequence_dimension, process_group)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    sequence_dimension: int = 0,
    to_model_parallel: bool = True,
    process_group: ProcessGroup | None = None,
    tile_cc: bool = False,
) -> Tensor:
    """The whole sequence, from all ranks' pieces."""
    return _gather_along_dim(input_, sequence_dimension, process_group)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor, sequence_dimension: int = 0, process_group: ProcessGroup | None = None, dtype: Any = None
) -> Tensor:
    """Sum over the group, of which this rank keeps its piece of the sequence."""
    return _reduce_scatter_along_dim(input_, sequence_dimension, process_group=process_group)


def gather_from_tensor_model_parallel_region_with_dim(
    input_: Tensor, gather_dim: int, process_group: ProcessGroup | None = None
) -> Tensor:
    """The whole of dimension `gather_dim`, from all ranks' pieces."""
    return _gather_along_dim(input_, gather_dim, process_group)


def reduce_scatter_to_tensor_model_parallel_region_with_dim(
    input_: Tensor, partition_dim: int, process_group: ProcessGroup | None = None
) -> Tensor:
    """Sum over the group, of which this rank keeps its piece of dimension `partition_dim`."""
    return _reduce_scatter_along_dim(input_, partition_dim, process_group=process_group)
