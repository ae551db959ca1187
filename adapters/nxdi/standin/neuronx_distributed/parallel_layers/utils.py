"""Sizes of shards, and the attributes that mark a parameter as sharded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from neuronx_distributed._standin.missing import attribute_hook
from neuronx_distributed.parallel_layers import parallel_state

__getattr__ = attribute_hook(__name__)

_DEFAULTS: dict[str, Any] = {
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
    "num_partitions": 1,
}


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raises AssertionError unless `numerator` is a multiple of `denominator`."""
    assert numerator % denominator == 0, f"{numerator} is not divisible by {denominator}"


def divide(numerator: int, denominator: int) -> int:
    """Exact integer quotient (AssertionError otherwise)."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def get_padding_length(numerator: int, denominator: int) -> int:
    """How much to add to `numerator` to reach a multiple of `denominator`."""
    return -numerator % denominator


def set_tensor_model_parallel_attributes(
    tensor: Tensor,
    is_parallel: bool,
    dim: int,
    stride: int,
    num_partitions: int = -1,
    rank_ordering: Sequence[int] | None = None,
) -> None:
    """Mark `tensor` as one of `num_partitions` shards along `dim`, for the checkpoint's sharding.

    Raises:
        AssertionError: it is marked already.
        ValueError: `rank_ordering` leaves out a rank.
    """
    assert not any(hasattr(tensor, name) for name in _DEFAULTS), "the tensor is marked as sharded already"
    if num_partitions == -1:
        warnings.warn("num_partitions was not given: the tensor parallel size is taken", stacklevel=2)
        num_partitions = parallel_state.get_tensor_model_parallel_size()
    if rank_ordering is not None:
        absent = set(range(parallel_state.get_tensor_model_parallel_size())) - {int(rank) for rank in rank_ordering}
        if absent:
            raise ValueError(f"rank_ordering {rank_ordering} leaves out the ranks {sorted(absent)}")
    values = (is_parallel, dim, stride, num_partitions)
    for name, value in zip(_DEFAULTS, values, strict=True):
        setattr(tensor, name, value)
    tensor.rank_ordering = rank_ordering  # type: ignore[attr-defined]


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Mark an unmarked tensor as not sharded."""
    for name, value in _DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Copy the marks that `source_tensor` has."""
    for name in _DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def param_is_not_tensor_parallel_duplicate(param: Tensor) -> bool:
    """True when this rank's copy counts: it is a shard, or the rank is the first."""
    return bool(getattr(param, "tensor_model_parallel", False)) or parallel_state.get_tensor_model_parallel_rank() == 0


def split_tensor_along_dim(
    tensor: Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[Tensor]:
    """`num_partitions` equal pieces along `dim`."""
    pieces = torch.split(tensor, divide(tensor.size(dim), num_partitions), dim=dim)
    return tuple(piece.contiguous() for piece in pieces) if contiguous_split_chunks else list(pieces)


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[Tensor]:
    """`num_partitions` equal pieces along the last dimension."""
    return split_tensor_along_dim(tensor, tensor.dim() - 1, num_partitions, contiguous_split_chunks)


def split_tensor_along_second_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[Tensor]:
    """`num_partitions` equal pieces along dimension 1."""
    return split_tensor_along_dim(tensor, 1, num_partitions, contiguous_split_chunks)


def indices_split_along_dim(tensor: Tensor | None, dim: int, rank: Any, num_partitions: int) -> Tensor | None:
    """Indices of `rank`'s piece along `dim`; None for None."""
    if tensor is None:
        return None
    size = divide(tensor.size(dim), num_partitions)
    return torch.arange(size, device=tensor.device) + rank * size


class EmbeddingUtility:
    """Which vocabulary entries a rank holds."""

    @staticmethod
    def range_from_per_partition_vocab_size(per_partition_vocab_size: int, rank: int, world_size: int) -> Sequence[int]:
        """First entry, and one past the last."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> Sequence[int]:
        """First entry, and one past the last."""
        per_rank = divide(global_vocab_size, world_size)
        return EmbeddingUtility.range_from_per_partition_vocab_size(per_rank, rank, world_size)


def initialize_fallback_parallel_state(device: torch.device | None = None) -> None:
    """One gloo rank and its groups, for a layer that is built before anything was initialised.

    Raises:
        ValueError: a default process group exists already (torch's own error).
    """
    address = SimpleNamespace(host="127.0.0.1", port=os.environ.get("MASTER_PORT", "29500"))
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address.host, address.port
    torch.distributed.init_process_group(backend="gloo", world_size=1, rank=0)
    parallel_state.initialize_model_parallel(skip_collective_init=True)
