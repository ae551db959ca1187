"""Writing into a cache [B, H, S, D], and its shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from neuronx_distributed._standin.missing import attribute_hook
from torch import Tensor

__getattr__ = attribute_hook(__name__)


def fill_prefix(cache: Tensor, prefix_cache: Tensor) -> Tensor:
    """Overwrite, in place, the leading block of `cache` that has `prefix_cache`'s shape. The rest stays."""
    with torch.no_grad():
        cache[tuple(slice(0, size) for size in prefix_cache.shape)] = prefix_cache
    return cache


def dynamic_update_slice(tensor: Tensor, update: Tensor, start_indices: Sequence[Any]) -> Tensor:
    """A copy of `tensor` with `update` at `start_indices`; what would stick out is cut off."""
    result = tensor.clone()
    starts = [int(start) for start in start_indices]
    fits = [min(n, size - start) for n, size, start in zip(update.shape, tensor.shape, starts, strict=False)]
    here = tuple(slice(start, start + n) for start, n in zip(starts, fits, strict=True))
    result[here] = update[tuple(slice(0, n) for n in fits)]
    return result


def update_cache_const_indices(cache: Tensor, updates: Tensor, sequence_ids: Tensor) -> Tensor:
    """A copy of `cache` whose rows `sequence_ids` start with `updates` [n, H, length, D]."""
    result = cache.clone()
    result[sequence_ids.long(), :, : updates.shape[2]] = updates
    return result


def get_layer_to_kv_cache_size_mapping_for_mixed_attn(
    local_cache_size: int | None, global_cache_size: int | None, is_layer_locals: Sequence[Any]
) -> list[int]:
    """Cache length of each layer: the local one where the flag is set.

    Raises:
        ValueError: a length is None.
    """
    if local_cache_size is None or global_cache_size is None:
        raise ValueError("both cache sizes must be given")
    return [local_cache_size if local else global_cache_size for local in is_layer_locals]


def get_kv_shapes(
    max_len: int,
    bsz: int,
    num_kv_heads_per_rank: int,
    head_dim: int,
    k_cache_transposed: bool = False,
    is_kv_cache_tiled: bool = False,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of one layer's K and V."""
    tiles = (128, max_len // 128) if is_kv_cache_tiled else (max_len,)
    batch, heads = bsz, num_kv_heads_per_rank
    v_shape = (batch, heads, *tiles, head_dim)
    return ((batch, heads, head_dim, *tiles) if k_cache_transposed else v_shape), v_shape
