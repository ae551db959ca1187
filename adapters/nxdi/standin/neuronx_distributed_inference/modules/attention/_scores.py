"""From queries, keys and values to the attention's output: prefill and decode."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from neuronx_distributed._standin.missing import refuse
from torch import Tensor, nn

from neuronx_distributed_inference.modules.attention._kinds import FlashAttentionStrategy
from neuronx_distributed_inference.modules.attention.utils import manual_softmax, repeat_kv


def _positions_first(out: Tensor, strategy: FlashAttentionStrategy) -> Tensor:
    """[B, heads, S, D] -> [B, S, heads, D]; what an override calls a kernel's output is read as [B, heads, D, S]."""
    if strategy is not FlashAttentionStrategy.NONE:
        return out.permute(0, 3, 1, 2)
    return out.transpose(1, 2).contiguous()


class AttentionScores(nn.Module):
    """The hooks that ports override to change the scores. Tensors are [B, heads, S, head_dim]."""

    neuron_config: Any
    attention_chunk_size: int | None
    attn_kernel_enabled: bool | None
    head_dim: int
    learned_sinks_size: int | None
    logical_nc_config: int
    num_heads: int
    num_key_value_groups: int
    sliding_window: int | None
    softmax_scale: float

    def get_learned_sinks(self) -> Tensor | None:
        """Sink logits [heads], or None."""
        raise NotImplementedError

    def scaled_qk(self, Q: Tensor, K: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Q Kᵀ divided by `softmax_scale`, the smallest number of the dtype where the mask is False."""
        scores = torch.matmul(Q, K.transpose(2, 3)) / self.softmax_scale
        if attention_mask is None:
            return scores
        return torch.where(attention_mask.to(torch.bool), scores, torch.finfo(scores.dtype).min)

    def get_flash_attention_strategy(self, q_len: int, has_attention_mask: bool) -> FlashAttentionStrategy:
        """Which kernel the stack would take for a prefill of `q_len` positions."""
        if self.attn_kernel_enabled is False:
            return FlashAttentionStrategy.NONE
        if int(self.logical_nc_config) > 1:
            multiple = 512 if q_len >= 1024 else 256
            if not has_attention_mask or q_len % multiple == 0:
                return FlashAttentionStrategy.SHARDED_KERNEL
            warnings.warn("no flash attention: the context length does not suit the kernel", stacklevel=2)
            return FlashAttentionStrategy.NONE
        if q_len >= 4096 or (self.attn_kernel_enabled and q_len >= 512):
            return FlashAttentionStrategy.UNSHARDED_KERNEL
        return FlashAttentionStrategy.NONE

    def perform_prefill(
        self, Q: Tensor, K: Tensor, V: Tensor, q_len: int, bsz: int, attention_mask: Tensor | None
    ) -> tuple[Tensor, FlashAttentionStrategy]:
        """Attention of every position on the prompt. Softmax in float32, then back to Q's dtype.

        Raises:
            StandInRefused: the stack would run a kernel here.
        """
        strategy = self.get_flash_attention_strategy(q_len, attention_mask is not None)
        if strategy is not FlashAttentionStrategy.NONE:
            refuse(f"a prefill of {q_len} positions", f"the stack runs the {strategy.name} flash-attention kernel")
        K, V = repeat_kv(K, self.num_key_value_groups), repeat_kv(V, self.num_key_value_groups)
        scores = self.scaled_qk(Q, K, attention_mask)
        sinks = self._sinks_like(scores)
        if sinks is not None:
            scores = torch.cat((scores, sinks), dim=-1)
        weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(Q.dtype)
        if sinks is not None:
            weights = weights[..., :-1]
        return torch.matmul(weights, V), strategy

    def perform_prefill_windowed_attn(
        self, Q: Tensor, K: Tensor, V: Tensor, q_len: int, bsz: int, attention_mask: Tensor | None, window_size: Any
    ) -> tuple[Tensor, FlashAttentionStrategy]:
        """As `perform_prefill`: the window is in the mask."""
        return self.perform_prefill(Q, K, V, q_len, bsz, attention_mask)

    def perform_prefill_chunked_attn(
        self, Q: Tensor, K: Tensor, V: Tensor, q_len: int, bsz: int, attention_mask: Tensor, chunk_size: int
    ) -> tuple[Tensor, FlashAttentionStrategy]:
        """Attention within each chunk of `chunk_size` positions.

        Raises:
            ValueError: with learned sinks.
        """
        if self.learned_sinks_size is not None:
            raise ValueError("learned sinks are not supported with chunked attention")
        K, V = repeat_kv(K, self.num_key_value_groups), repeat_kv(V, self.num_key_value_groups)
        outputs = []
        for start in range(0, q_len, chunk_size):
            here = slice(start, min(start + chunk_size, q_len))
            scores = self.scaled_qk(Q[:, :, here], K[:, :, here], attention_mask[:, :, here, here])
            weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(Q.dtype)
            outputs.append(torch.matmul(weights, V[:, :, here]))
        return torch.cat(outputs, dim=2), FlashAttentionStrategy.NONE

    def compute_for_token_gen(
        self,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        position_ids: Tensor | None,
        past_key_value: Any,
        attention_mask: Tensor,
        active_mask: Tensor | None,
        is_prefix_caching: bool = False,
    ) -> Tensor:
        """Attention of the new position on the cache and on itself.

        `attention_mask` [B, 1, 1, cache] covers the cache alone. The new position is always added: a mask that covers
        its cache slot too makes it count twice, without an error.
        """
        if is_prefix_caching or (position_ids is not None and position_ids.shape[-1] > 1):
            refuse("decoding several positions at once", "speculation and prefix caching")
        past_k, past_v = (repeat_kv(past, self.num_key_value_groups) for past in past_key_value[:2])
        prior = torch.matmul(Q, past_k.transpose(2, 3)) / self.softmax_scale
        prior = torch.where(attention_mask, prior, torch.finfo(prior.dtype).min).to(torch.float32)
        new_k, new_v = repeat_kv(K, self.num_key_value_groups), repeat_kv(V, self.num_key_value_groups)
        active = (torch.matmul(Q, new_k.transpose(2, 3)) / self.softmax_scale).to(torch.float32)
        sinks = self._sinks_like(active)
        if sinks is not None:
            prior = torch.cat((prior, sinks), dim=-1)
        prior_weights, active_weights = manual_softmax(prior, active, False)
        if sinks is not None:
            prior_weights = prior_weights[..., :-1]
        return torch.matmul(prior_weights.to(Q.dtype), past_v) + torch.matmul(active_weights.to(Q.dtype), new_v)

    def _sinks_like(self, scores: Tensor) -> Tensor | None:
        """Sink logits as one more column of `scores` [B, heads, S, *], or None."""
        sinks = self.get_learned_sinks()
        if sinks is None:
            return None
        assert sinks.ndim == 1 and sinks.shape[0] == self.num_heads
        return sinks.reshape(1, self.num_heads, 1, 1).expand(scores.shape[0], -1, scores.shape[2], -1)

    def attention_context_encode(
        self,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        q_len: int,
        bsz: int,
        attention_mask: Tensor | None,
        past_key_value: Any = None,
        active_mask: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Prefill: output [B, S, heads, head_dim], and the K and V to cache."""
        if past_key_value is not None:
            refuse("a prefill on top of a cache", "prefix caching")
        return _positions_first(*self.perform_prefill(Q, K, V, q_len, bsz, attention_mask)), K, V

    def attention_context_encode_windowed_attention(
        self,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        q_len: int,
        bsz: int,
        attention_mask: Tensor | None,
        window_size: int | None = None,
        past_key_value: Any = None,
        active_mask: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Prefill in a window: output [B, S, heads, head_dim], and the K and V of all positions."""
        if past_key_value is not None:
            refuse("a prefill on top of a cache", "windowed context encoding")
        result = self.perform_prefill_windowed_attn(Q, K, V, q_len, bsz, attention_mask, window_size)
        return _positions_first(*result), K, V

    def attention_context_encode_chunked_attention(
        self,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        q_len: int,
        bsz: int,
        attention_mask: Tensor,
        chunk_size: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Prefill in chunks: output [B, S, heads, head_dim], and the K and V of all positions."""
        assert chunk_size is not None
        out, _ = self.perform_prefill_chunked_attn(Q, K, V, q_len, bsz, attention_mask, chunk_size)
        return out.transpose(1, 2).contiguous(), K, V

    def attention_tokengen(
        self,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None,
        past_key_value: Any,
        active_mask: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        """Decode: [B, heads, 1, head_dim]."""
        return self.compute_for_token_gen(Q, K, V, position_ids, past_key_value, attention_mask, active_mask)
