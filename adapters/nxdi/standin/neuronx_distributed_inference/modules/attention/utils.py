"""Tensor layouts, softmax and rotary embeddings of the attention block."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from neuronx_distributed._standin.missing import attribute_hook, refused_call
from torch import Tensor, nn

from neuronx_distributed_inference.modules.attention._windows import (
    get_last_kv_chunk,
    get_last_kv_window,
    order_strided_tensor,
    stride_tensor,
)

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_pos_emb",
    "get_last_kv_chunk",
    "get_last_kv_window",
    "manual_softmax",
    "move_heads_front",
    "neuron_scaled_dot_product_attention",
    "order_strided_tensor",
    "repeat_kv",
    "stride_tensor",
    "transpose_parallel_linear_layer",
]
__getattr__ = attribute_hook(__name__)

preprocess_quantized_linear_layer = refused_call(f"{__name__}.preprocess_quantized_linear_layer", "quantization")

# Transposed checkpoint weights, by layer: a second model with the same layer names gets the first one's weights.
weight_cache: dict[str, Tensor] = {}


def _read_transposed(prefix: str, state_dict: dict[str, Any]) -> Tensor:
    if prefix not in weight_cache:
        if prefix + "weight" not in state_dict:
            raise RuntimeError(f"Cannot find {prefix}weight in the state_dict")
        weight_cache[prefix] = state_dict[prefix + "weight"].t()
    return weight_cache[prefix]


def _write_transposed(prefix: str, tensor: Tensor, state_dict: dict[str, Any]) -> None:
    if prefix + "weight" not in state_dict:
        raise RuntimeError(f"Cannot find {prefix}weight in the state_dict")
    state_dict[prefix + "weight"] = tensor.t()


def transpose_parallel_linear_layer(parallel_layer: nn.Parameter) -> nn.Parameter:
    """A sharded weight stored transposed, cut along the other dimension; the checkpoint keeps the usual layout."""
    turned: Any = nn.Parameter(parallel_layer.detach().clone().T, requires_grad=False)
    vars(turned).update(vars(parallel_layer))
    turned.partition_dim = 1 - turned.partition_dim
    turned.get_tensor_from_state_dict = _read_transposed
    turned.set_tensor_to_state_dict = _write_transposed
    return turned


def move_heads_front(
    tensor: Tensor,
    bsz: int,
    seq_len: int,
    num_head: int,
    head_dim: int,
    layernorm: Any = None,
    post_transpose_layernorm: bool = False,
) -> Tensor:
    """[B, S, H * D] -> [B, H, S, D]; the norm, if any, runs on [B, S, H, D], or on the result if asked."""
    heads = tensor.view(bsz, seq_len, num_head, head_dim)
    if layernorm and not post_transpose_layernorm:
        heads = layernorm(heads)
    heads = heads.transpose(1, 2).contiguous()
    return layernorm(heads) if layernorm and post_transpose_layernorm else heads


def repeat_kv(hidden_states: Tensor, n_rep: int) -> Tensor:
    """[B, H, S, D] -> [B, H * n_rep, S, D]: each head `n_rep` times in a row."""
    if n_rep == 1:
        return hidden_states
    # A view where that is possible (a single head): copies would round differently in the products that follow.
    return hidden_states.unsqueeze(2).expand(-1, -1, n_rep, -1, -1).flatten(1, 2)


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate q and k [B, H, S, D] by cos and sin [B, S, D]; the pair of a feature is half a head away."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def manual_softmax(prior_scores: Tensor, active_scores: Tensor, is_speculation: bool) -> tuple[Tensor, Tensor]:
    """One softmax over two score tensors [B, H, Q, prior] and [B, H, Q, active], returned as two."""
    active_top = active_scores.amax(dim=-1, keepdim=True) if is_speculation else active_scores
    top = torch.maximum(prior_scores.amax(dim=-1, keepdim=True), active_top)
    prior, active = torch.exp(prior_scores - top), torch.exp(active_scores - top)
    total = prior.sum(dim=-1, keepdim=True) + active.sum(dim=-1, keepdim=True)
    return prior / total, active / total


def neuron_scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of [..., Q, D] on [..., K, D]; a boolean mask keeps where True, another is added. No dropout."""
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    bias = torch.zeros(query.size(-2), key.size(-2), dtype=query.dtype, device=query.device)
    if is_causal:
        assert attn_mask is None
        bias = bias.masked_fill(torch.ones_like(bias, dtype=torch.bool).tril().logical_not(), float("-inf"))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = bias.masked_fill(attn_mask.logical_not(), float("-inf"))
    elif attn_mask is not None:
        bias = bias + attn_mask
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale) + bias
    return F.dropout(torch.softmax(scores, dim=-1), dropout_p) @ value


class RotaryEmbedding(nn.Module):
    """cos and sin [B, S, dim] of the positions; with `factor`, linearly stretched. Frequencies stay float32."""

    def __init__(
        self, dim: int, max_position_embeddings: int = 2048, base: float = 10000, factor: float | None = None
    ) -> None:
        super().__init__()
        self.dim, self.max_position_embeddings, self.base, self.factor = dim, max_position_embeddings, base, factor
        # Filled by the first call, after any cast of the model: so it is not rounded to the model's dtype.
        self.register_buffer("inv_freq", None, persistent=False)

    def get_inv_freqs(self, device: torch.device | None = None) -> Tensor:
        """Frequencies [dim / 2], float32."""
        steps = torch.arange(0, self.dim, 2, dtype=torch.float, device=device)
        freqs = 1.0 / (self.base ** (steps / self.dim))
        return freqs if self.factor is None else freqs / self.factor

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """`x` gives dtype and device alone; positions [B, S]."""
        if self.inv_freq is None:
            self.inv_freq = self.get_inv_freqs(x.device)
        freqs = self.inv_freq.float()
        angles = (freqs[None, :, None].expand(position_ids.shape[0], -1, 1) @ position_ids[:, None, :].float()).mT
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
