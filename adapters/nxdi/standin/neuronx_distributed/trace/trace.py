"""From a converted checkpoint to one rank's weights. Tracing and compiling need the real stack."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from neuronx_distributed._standin.missing import attribute_hook
from neuronx_distributed.parallel_layers.layers import BaseParallelLinear, ParallelEmbedding, SPMDRank
from neuronx_distributed.parallel_layers.utils import divide
from neuronx_distributed.utils.model_utils import init_on_device

__all__ = [
    "create_local_weight",
    "create_local_weight_qkv",
    "get_sharded_checkpoint",
    "init_on_device",
    "invoke_preshard_hook",
    "preprocess_checkpoint",
    "shard_children",
]
__getattr__ = attribute_hook(__name__)

_SHARDED = (BaseParallelLinear, ParallelEmbedding, SPMDRank)


def invoke_preshard_hook(module: nn.Module | None, checkpoint: dict[str, Any], prefix: str) -> None:
    """Let the modules rearrange the checkpoint, outermost first. A module with a hook hides its children's hooks."""
    if module is None:
        return
    if hasattr(module, "preshard_hook"):
        module.preshard_hook(checkpoint, prefix + "weight")
        if getattr(module, "add_bias", False):
            module.preshard_hook(checkpoint, prefix + "bias")
        return
    for name, child in module._modules.items():
        invoke_preshard_hook(child, checkpoint, f"{prefix}{name}.")


def preprocess_checkpoint(model: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Run the hooks, then drop, with a warning alone, every key that the model does not have."""
    invoke_preshard_hook(model, checkpoint, "")
    known = model.state_dict().keys()
    extra = [key for key in checkpoint if key not in known]
    warnings.warn(f"Removing redundant keys from checkpoint: {extra}", stacklevel=2)
    for key in extra:
        del checkpoint[key]


def create_local_weight(
    rank: int,
    world_size: int,
    full_weight: Tensor,
    partition_dim: int,
    per_partition_size: int,
    stride: int,
    out_weight: Tensor | None = None,
) -> Tensor:
    """`rank`'s piece of a whole weight."""
    pieces = torch.split(full_weight, divide(per_partition_size, stride), dim=partition_dim)[rank::world_size]
    return torch.cat(pieces, dim=partition_dim) if stride > 1 else pieces[0]


def create_local_weight_qkv(
    rank: int,
    world_size: int,
    full_weight: Tensor,
    partition_dim: int,
    q_len: int,
    kv_len: int,
    out_weight: Tensor | None = None,
) -> Tensor:
    """`rank`'s piece of a fused query, key and value weight: each of the three is cut by itself."""
    parts = torch.split(full_weight, [q_len, kv_len, kv_len], dim=partition_dim)
    return torch.cat([part.chunk(world_size, dim=partition_dim)[rank] for part in parts], dim=partition_dim)


def _own_parameters(model: nn.Module, prefix: str) -> Iterable[tuple[str, str, nn.Parameter]]:
    """(prefix of the module, key, parameter) of every sharded layer, children before their parents."""
    for name, child in model._modules.items():
        if child is not None:
            yield from _own_parameters(child, f"{prefix}{name}.")
    if isinstance(model, _SHARDED):
        for name, param in model._parameters.items():
            if param is not None:
                yield prefix, prefix + name, param


def _piece(param: Any, tensor: Tensor, rank: int) -> Tensor:
    if not getattr(param, "tensor_model_parallel", False):
        return tensor
    parts, dim = param.num_partitions, param.partition_dim
    if getattr(param, "rank_ordering", None) is not None:
        rank = int(param.rank_ordering[rank])
    if hasattr(param, "fused_qkv"):
        widths = param.num_attention_heads * param.head_dim, param.num_key_value_heads * param.head_dim
        return create_local_weight_qkv(rank % parts, parts, tensor, dim, *widths)
    return create_local_weight(rank % parts, parts, tensor, dim, tensor.shape[dim] // parts, param.partition_stride)


def shard_children(
    module: nn.Module, checkpoint: dict[str, Any], prefix: str, dtype: Any, rank: int, tp_degree: int
) -> None:
    """Replace every sharded layer's tensors in `checkpoint` by `rank`'s pieces. An absent key is passed over.

    Raises:
        RuntimeError: a piece does not have its parameter's shape.
    """
    for owner, key, param in list(_own_parameters(module, prefix)):
        if hasattr(param, "get_tensor_from_state_dict"):
            tensor = param.get_tensor_from_state_dict(owner, checkpoint)
        elif key in checkpoint:
            tensor = checkpoint[key]
        else:
            continue
        checkpoint[key] = _piece(param, tensor, rank)
        if checkpoint[key].shape != param.shape:
            raise RuntimeError(f"{key} has the shape {tuple(checkpoint[key].shape)}, expected {tuple(param.shape)}")


def get_sharded_checkpoint(
    checkpoint: dict[str, Any], model: nn.Module, rank: int, tp_degree: int, is_cached: bool = False
) -> None:
    """Turn a converted checkpoint, in place, into `rank`'s weights of `model`."""
    if not is_cached:
        preprocess_checkpoint(model, checkpoint)
    shard_children(model, checkpoint, "", None, rank, tp_degree)
