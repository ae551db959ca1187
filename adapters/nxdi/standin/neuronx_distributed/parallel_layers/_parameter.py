"""Sharded parameters: how they are made and marked, and the layer base that makes sure there are groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.utils import (
    divide,
    initialize_fallback_parallel_state,
    set_tensor_model_parallel_attributes,
)


class BaseParallelLayer(nn.Module):
    """Base of the parallel layers. Built before any initialisation, it starts one gloo rank and its groups."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        if not parallel_state.model_parallel_is_initialized():
            warnings.warn("no parallel state yet: one gloo rank is started for this layer", UserWarning, stacklevel=2)
            initialize_fallback_parallel_state(device)


def group_or_default(group: ProcessGroup | None) -> ProcessGroup:
    """`group`, or the tensor group."""
    return group if group is not None else parallel_state.get_tensor_model_parallel_group()


def sharded_parameter(
    shape: Sequence[int],
    *,
    dim: int,
    stride: int,
    group: ProcessGroup,
    dtype: torch.dtype,
    device: torch.device | None,
    init: Callable[[Tensor], Any],
    rank_ordering: Sequence[int] | None = None,
) -> nn.Parameter:
    """This rank's shard of a weight: the whole is drawn in float32 on every rank, then cut and cast.

    `shape` is the shard's. Drawing the whole makes a seed give the same weights at every tensor parallel degree.
    On the meta device nothing is drawn, and the rank ordering is kept for the checkpoint.
    """
    param = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
    on_meta = param.device.type == "meta"
    set_tensor_model_parallel_attributes(
        param,
        is_parallel=True,
        dim=dim,
        stride=stride,
        num_partitions=group.size(),
        rank_ordering=rank_ordering if on_meta else None,
    )
    if on_meta or parallel_state.get_aot_mode():
        return param
    ranks, rank = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
    whole_shape = list(shape)
    whole_shape[dim] *= ranks
    whole = nn.Parameter(torch.empty(whole_shape, dtype=torch.float32))
    init(whole)
    with torch.no_grad():
        pieces = torch.split(whole.to(dtype), divide(shape[dim], stride), dim=dim)[rank::ranks]
        param.copy_(torch.cat(pieces, dim=dim))
    return param


class SPMDRank(nn.Module):
    """This rank's number as a parameter `rank` [1], int32, which the checkpoint provides as arange(world_size)."""

    def __init__(self, world_size: int, tensor_model_parallel_size: int | None = None) -> None:
        super().__init__()
        self.world_size = world_size
        self.tensor_model_parallel_size = (
            parallel_state.get_tensor_model_parallel_size()
            if tensor_model_parallel_size is None
            else tensor_model_parallel_size
        )
        self.rank = nn.Parameter(torch.zeros(1, dtype=torch.int32), requires_grad=False)
        set_tensor_model_parallel_attributes(
            self.rank, is_parallel=True, dim=0, stride=1, num_partitions=self.world_size
        )

    def get_rank(self) -> Tensor:
        """The parameter: zero until a checkpoint sets it."""
        return self.rank
