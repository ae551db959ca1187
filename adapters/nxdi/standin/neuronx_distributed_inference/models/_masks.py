"""Attention masks, boolean, True where a key is seen: [B, 1, queries, keys]."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed._standin.missing import refuse
from torch import Tensor, nn


class AttentionMasks(nn.Module):
    """The mask hooks of the base model.

    Prefill masks are square in `n_positions`, whatever the input's length. Decode masks cover the cache, and come from
    the caller's mask (or, in a window or chunk, from the position): strictly earlier positions alone.
    """

    batch_size: int
    has_mixed_attn: bool
    n_positions: int
    neuron_config: Any
    padding_side: str
    sliding_window: int | None

    def _square(self, mask: Tensor) -> Tensor:
        return mask[None, None].expand(self.batch_size, 1, self.n_positions, self.n_positions)

    def _query_and_key(self, device: torch.device) -> tuple[Tensor, Tensor]:
        place = torch.arange(self.n_positions, device=device)
        return place[:, None], place[None, :]

    def _create_context_attn_mask(self, attention_mask: Tensor, **kwargs: Any) -> Tensor:
        """Causal. Padding is masked for left padding alone: at the right, nothing earlier sees it."""
        query, key = self._query_and_key(attention_mask.device)
        mask = self._square(key <= query)
        return mask if self.padding_side == "right" else mask & attention_mask[:, None, None, :].to(torch.bool)

    def _create_windowed_attn_mask_cte(self, attention_mask: Tensor, window_size: int) -> Tensor:
        """Causal, and `window_size` keys at most, the query's own included."""
        query, key = self._query_and_key(attention_mask.device)
        return self._square((key <= query) & (key > query - window_size))

    def _create_chunked_attn_mask_cte(self, attention_mask: Tensor, chunk_size: int) -> Tensor:
        """Causal, and in the query's chunk."""
        query, key = self._query_and_key(attention_mask.device)
        return self._square((key <= query) & (key // chunk_size == query // chunk_size))

    def _create_simple_attn_mask(self, attention_mask: Tensor) -> Tensor:
        """The caller's mask [B, n_positions] as it is."""
        rows = attention_mask.shape[0]
        return attention_mask[:, None, None, :].expand(rows, 1, 1, self.n_positions).to(torch.bool)

    def _create_windowed_attn_mask_tkg(self, attention_mask: Tensor, window_size: int, position_ids: Tensor) -> Tensor:
        """The filled entries of the ring, [B, 1, 1, window_size]; its last entry is never used."""
        slot = torch.arange(window_size, device=attention_mask.device)[None, :]
        seen = (slot < position_ids[:, :1]) & (slot < window_size - 1)
        return seen[:, None, None, :]

    def _create_chunked_attn_mask_tkg(self, attention_mask: Tensor, chunk_size: int, position_ids: Tensor) -> Tensor:
        """The entries of the current chunk, [B, 1, 1, chunk_size]: none when the position opens one."""
        slot = torch.arange(chunk_size, device=attention_mask.device)[None, :]
        return (slot < position_ids % chunk_size)[:, None, None, :]

    def create_attn_mask(
        self,
        attention_mask: Tensor,
        is_for_context_encoding: bool,
        is_for_speculation: bool,
        position_ids: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """The mask of the layers in general; layers of a second kind get the local one."""
        windowed = self.sliding_window if not self.has_mixed_attn else None
        if is_for_context_encoding and windowed:
            return self._create_windowed_attn_mask_cte(attention_mask, windowed)
        if is_for_context_encoding:
            return self._create_context_attn_mask(attention_mask)
        if windowed:
            return self._create_windowed_attn_mask_tkg(attention_mask, windowed, position_ids)
        if is_for_speculation:
            refuse("create_attn_mask(is_for_speculation=True)", "speculation")
        return self._create_simple_attn_mask(attention_mask)

    def create_padding_mask(self, position_ids: Tensor) -> Tensor | None:
        """None, unless `moe_mask_padded_tokens` is set: then [B, S] float, 1 up to the last position."""
        if not getattr(self.neuron_config, "moe_mask_padded_tokens", False):
            return None
        place = torch.arange(position_ids.shape[1], device=position_ids.device)
        return (place[None, :] <= position_ids.argmax(dim=1, keepdim=True)).float()
