"""What prefill leaves in a cache that is shorter than the sequence, and strided orders."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _take(cache: Tensor, index: Tensor) -> Tensor:
    """Rows `index` [B, n] of the sequence dimension of [B, H, S, D]."""
    batch, heads, _, head_dim = cache.shape
    where = index[:, None, :, None].expand(batch, heads, index.shape[1], head_dim)
    return torch.gather(cache, dim=2, index=where.to(cache.device))


def get_last_kv_window(
    window_size: int,
    position_ids: Tensor,
    latest_k: Tensor,
    latest_v: Tensor,
    windowed_context_encoding_window_idx: int = -1,
    spec_len: int = 0,
) -> tuple[Tensor, Tensor]:
    """The last `window_size - 1` entries of each row [B, H, S, D], at the places a ring of that size gives them.

    A window larger than the sequence asks for entries that do not exist, and fails.
    """
    size = window_size - 1
    if spec_len > 0:
        size += spec_len - 1
    last = position_ids.amax(dim=1)
    if windowed_context_encoding_window_idx >= 1:
        last = last - windowed_context_encoding_window_idx * window_size
    end = (last + 1).clamp(min=size)
    slots = torch.arange(size)
    # Slot s of the ring holds the one position p of [end - size, end) with p mod size = s.
    start = (end - size).clamp(min=0)
    index = start[:, None] + (slots[None, :] - end[:, None]) % size
    return _take(latest_k, index), _take(latest_v, index)


def get_last_kv_chunk(
    attention_chunk_size: int, position_ids: Tensor, latest_k: Tensor, latest_v: Tensor
) -> tuple[Tensor, Tensor]:
    """The chunk that each row's last position lies in, [B, H, attention_chunk_size, D], zeros past the end."""
    short = -position_ids.shape[1] % attention_chunk_size
    first = position_ids.amax(dim=1) // attention_chunk_size * attention_chunk_size
    index = first[:, None] + torch.arange(attention_chunk_size)[None, :]
    padding = (0, 0, 0, short)
    return _take(F.pad(latest_k, padding), index.long()), _take(F.pad(latest_v, padding), index.long())


def stride_tensor(tensor: Tensor, dim: int, stride: int) -> Tensor:
    """Every `stride`-th entry of `dim` first: [0, 1, 2, 3] -> [0, 2, 1, 3] for stride 2."""
    assert tensor.shape[dim] % stride == 0, f"size {tensor.shape[dim]} is not divisible by the stride {stride}"
    order = torch.arange(tensor.shape[dim], device=tensor.device).view(-1, stride).t().reshape(-1)
    return tensor.index_select(dim, order)


def order_strided_tensor(tensor: Tensor, dim: int, stride: int) -> Tensor:
    """Undo `stride_tensor`."""
    assert tensor.shape[dim] % stride == 0, f"size {tensor.shape[dim]} is not divisible by the stride {stride}"
    order = torch.arange(tensor.shape[dim], device=tensor.device).view(stride, -1).t().reshape(-1)
    return tensor.index_select(dim, order)
