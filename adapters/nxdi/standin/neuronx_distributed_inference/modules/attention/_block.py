"""Attention as ports build on it: constructor, projections, rotation, and the forward of its three kinds.

The forward follows one of three paths: chunked (`attention_chunk_size`), windowed (`sliding_window`) or global. The
scores themselves are in `_scores`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from neuronx_distributed._standin.missing import refuse
from neuronx_distributed.modules.attention.utils import apply_rotary_polar_compatible, precompute_freqs_cis
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import SPMDRank
from neuronx_distributed.parallel_layers.utils import divide
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.modules.attention._kinds import (
    EPDispatchOption,
    NeuronAttentionBaseOutput,
    QKNormPlacement,
)
from neuronx_distributed_inference.modules.attention._scores import AttentionScores
from neuronx_distributed_inference.modules.attention.gqa import GroupQueryAttention_O, GroupQueryAttention_QKV
from neuronx_distributed_inference.modules.attention.sink import LearnedSink
from neuronx_distributed_inference.modules.attention.utils import (
    apply_rotary_pos_emb,
    get_last_kv_chunk,
    get_last_kv_window,
    move_heads_front,
)
from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm

logger = logging.getLogger("Neuron")

# The order in which the stack hands these on from `forward`; after the hidden states.
_ORDER = (
    "attention_mask",
    "position_ids",
    "past_key_value",
    "active_mask",
    "adapter_ids",
    "cos_cache",
    "sin_cache",
    "rmsnorm",
    "rotary_position_ids",
    "kv_mgr",
    "get_kv_per_layer",
    "update_kv_per_layer",
    "residual",
    "windowed_context_encoding_window_idx",
)


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(_ORDER, args, strict=False)), **kwargs}


class NeuronAttentionBase(AttentionScores):
    """Grouped-query attention with a cache. Heads are this rank's; the scores are divided by `softmax_scale`."""

    def __init__(
        self,
        config: InferenceConfig,
        *,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int | None = None,
        rotary_emb: Any = None,
        rope_theta: float | None = None,
        use_scaled_rope: bool = False,
        rms_norm_eps: float | None = None,
        use_qk_norm: bool = False,
        qk_norm_placement: QKNormPlacement = QKNormPlacement.PRE_ROPE,
        q_layernorm: Callable[..., Tensor] | None = None,
        k_layernorm: Callable[..., Tensor] | None = None,
        post_transpose_layernorm: bool = False,
        clip_qkv: float | None = None,
        qkv_bias: bool = False,
        o_bias: bool = False,
        softmax_scale: float | None = None,
        num_cores_per_group: int = 1,
        sequence_parallel_enabled: bool | None = None,
        attention_chunk_size: int | None = None,
        is_post_global_attn_layer: bool = False,
        is_pre_global_attn_layer: bool = False,
        sliding_window: int | None = None,
        tensor_model_parallel_group: ProcessGroup | None = None,
        o_proj_layer_name: str = "o_proj",
        learned_sinks_size: int | None = None,
        optimize_interleave_attn: bool = False,
    ) -> None:
        super().__init__()
        served = config.neuron_config
        self.config, self.neuron_config = config, served
        group = tensor_model_parallel_group
        if group is None and parallel_state.model_parallel_is_initialized():
            group = parallel_state.get_tensor_model_parallel_group()
        self.tensor_model_parallel_group = group
        self.rank_util = None if group is None else SPMDRank(served.tp_degree)
        self.tp_degree = served.tp_degree if group is None else group.size()
        self.cp_degree = self.dp_degree = 1
        self.rpl_reduce_dtype = served.rpl_reduce_dtype
        self.torch_dtype = served.torch_dtype if served.attention_dtype is None else served.attention_dtype
        self.fused_qkv, self.padding_side = served.fused_qkv, served.padding_side
        self.attn_kernel_enabled, self.logical_nc_config = served.attn_kernel_enabled, served.logical_nc_config
        self.qk_layernorm = served.qk_layernorm
        self.attn_block_tkg_nki_kernel_enabled = self.attn_block_tkg_nki_kernel_cache_update = False
        self.qkv_cte_nki_kernel_fuse_rope = self.mlp_kernel_enabled = self.is_eagle3_draft = False
        self.flash_decoding_enabled = self.k_cache_transposed = self.strided_context_parallel_kernel_enabled = False
        self.is_post_global_attn_layer, self.is_pre_global_attn_layer = (
            is_post_global_attn_layer,
            is_pre_global_attn_layer,
        )
        self.optimize_interleave_attn = optimize_interleave_attn
        if sequence_parallel_enabled:
            refuse("NeuronAttentionBase(sequence_parallel_enabled=True)")
        self.sequence_parallel_enabled = self.qkv_proj_sp_enabled = self.o_proj_sp_enabled = False
        self.sequence_dimension = None

        self.hidden_size, self.num_attention_heads = hidden_size, num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        self.softmax_scale = math.sqrt(self.head_dim) if softmax_scale is None else softmax_scale
        self.rotary_emb, self.rope_theta, self.use_scaled_rope = rotary_emb, rope_theta, use_scaled_rope
        self.rms_norm_eps, self.use_qk_norm, self.qk_norm_placement = rms_norm_eps, use_qk_norm, qk_norm_placement
        self.q_layernorm, self.k_layernorm = q_layernorm, k_layernorm
        self.post_transpose_layernorm = post_transpose_layernorm
        self.clip_qkv, self.qkv_bias, self.o_bias = clip_qkv, qkv_bias, o_bias
        self.num_cores_per_group, self.inv_freqs = num_cores_per_group, None
        self.o_proj_layer_name, self.learned_sinks_size = o_proj_layer_name, learned_sinks_size
        self.sliding_window, self.windowed_context_encoding_size = sliding_window, None
        self.attention_chunk_size = attention_chunk_size
        if attention_chunk_size and attention_chunk_size >= served.seq_len:
            logger.warning(f"attention_chunk_size {attention_chunk_size} covers seq_len {served.seq_len}: not chunked")
            self.attention_chunk_size = None
        self.ep_dispatch_cc_option = EPDispatchOption(served.ep_dispatch_cc_option)

        self.init_gqa_properties()
        self.qk_norm: nn.Module | None = None
        if use_qk_norm:
            self.init_qk_norm()

    def init_gqa_properties(self) -> None:
        """Build the projections, and count this rank's heads. Ports override or extend it.

        Raises:
            ValueError: one of `q_layernorm` and `k_layernorm` is set without the other.
        """
        sizes: dict[str, Any] = {
            "hidden_size": self.hidden_size,
            "head_dim": self.head_dim,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "tp_degree": self.tp_degree,
            "dtype": self.torch_dtype,
            "tensor_model_parallel_group": self.tensor_model_parallel_group,
        }
        self.qkv_proj = GroupQueryAttention_QKV(
            **sizes,
            bias=self.qkv_bias,
            gather_output=False,
            fused_qkv=self.fused_qkv,
            clip_qkv=self.clip_qkv,
            rms_norm_eps=self.rms_norm_eps,
        )
        self.o_proj = GroupQueryAttention_O(
            **sizes,
            bias=self.o_bias,
            input_is_parallel=True,
            layer_name=self.o_proj_layer_name,
            rpl_reduce_dtype=self.rpl_reduce_dtype,
        )
        self.learned_sinks: LearnedSink | None = None
        if self.learned_sinks_size is not None:
            self.learned_sinks = LearnedSink(
                self.learned_sinks_size, self.num_attention_heads, self.torch_dtype, self.tp_degree
            )
        self._src_num_key_value_heads = self.num_key_value_heads
        self.num_heads = divide(self.qkv_proj.get_num_attention_heads(), self.tp_degree)
        self.num_key_value_heads = divide(self.qkv_proj.get_num_key_value_heads(), self.tp_degree)
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.qkv_sharding_strategy = self.qkv_proj.sharding_strategy
        if (self.q_layernorm is None) != (self.k_layernorm is None):
            raise ValueError("q_layernorm and k_layernorm must both be set or both be None")
        if self.q_layernorm is None and self.qk_layernorm:
            self.q_layernorm, self.k_layernorm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)

    def init_qk_norm(self) -> None:
        """One norm for queries and keys, without a width: its weight takes the width of the first call's queries."""
        if self.use_qk_norm and self.qk_norm is None:
            self.qk_norm = CustomRMSNorm() if self.rms_norm_eps is None else CustomRMSNorm(eps=self.rms_norm_eps)

    def get_qkv_proj(self) -> GroupQueryAttention_QKV:
        """The projection to queries, keys and values."""
        return self.qkv_proj

    def get_o_proj(self) -> GroupQueryAttention_O:
        """The output projection."""
        return self.o_proj

    def get_learned_sinks(self) -> Tensor | None:
        """Sink logits [heads], or None."""
        return None if self.learned_sinks is None else self.learned_sinks.sink

    def apply_rotary_embedding(
        self,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        position_ids: Tensor,
        cos_cache: Tensor | None,
        sin_cache: Tensor | None,
        use_polar_compatible_rope: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Rotate Q and K [B, H, S, D]. cos and sin that come from an earlier layer are used as they are."""
        if use_polar_compatible_rope:
            longest = self.neuron_config.max_context_length * 2
            angles = precompute_freqs_cis(
                self.head_dim,
                longest,
                self.rope_theta,
                self.use_scaled_rope,
                device=Q.device,  # type: ignore[arg-type]
            )[position_ids]
            Q, K = apply_rotary_polar_compatible(Q.transpose(1, 2), K.transpose(1, 2), angles)
            Q, K = Q.transpose(1, 2), K.transpose(1, 2)
        elif self.rotary_emb is not None:
            if cos_cache is None or sin_cache is None:
                cos_cache, sin_cache = self.rotary_emb(V, position_ids)
            Q, K = apply_rotary_pos_emb(Q, K, cos_cache, sin_cache)
        return Q, K, cos_cache, sin_cache

    def prep_qkv_tensors(
        self,
        position_ids: Tensor,
        hidden_states: Tensor,
        past_key_value: Any,
        adapter_ids: Any = None,
        cos_cache: Tensor | None = None,
        sin_cache: Tensor | None = None,
        rmsnorm: Any = None,
        skip_rope: bool = False,
        residual: Any = None,
        use_polar_compatible_rope: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Any]:
        """Hidden [B, S, hidden] -> Q, K, V [B, H, S, D] (K and V with their own heads), cos, sin, residual."""
        Q, K, V, residual = self.get_qkv_proj()(
            hidden_states=hidden_states, rmsnorm=rmsnorm, adapter_ids=adapter_ids, residual=residual
        )
        norm = self.qk_norm if self.use_qk_norm else None
        if norm is not None and self.qk_norm_placement is QKNormPlacement.PRE_ROPE:
            Q, K = norm(Q), norm(K)
        batch, length, _ = hidden_states.shape
        after = self.post_transpose_layernorm
        Q = move_heads_front(Q, batch, length, self.num_heads, self.head_dim, self.q_layernorm, after)
        K = move_heads_front(K, batch, length, self.num_key_value_heads, self.head_dim, self.k_layernorm, after)
        V = move_heads_front(V, batch, length, self.num_key_value_heads, self.head_dim)
        if not skip_rope:
            Q, K, cos_cache, sin_cache = self.apply_rotary_embedding(
                Q, K, V, position_ids, cos_cache, sin_cache, use_polar_compatible_rope
            )
        if norm is not None and self.qk_norm_placement is QKNormPlacement.POST_ROPE:
            Q, K = norm(Q), norm(K)
        return Q, K, V, cos_cache, sin_cache, residual

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_value: Any = None,
        active_mask: Tensor | None = None,
        adapter_ids: Any = None,
        cos_cache: Tensor | None = None,
        sin_cache: Tensor | None = None,
        rmsnorm: Any = None,
        rotary_position_ids: Tensor | None = None,
        kv_mgr: Any = None,
        get_kv_per_layer: bool = False,
        update_kv_per_layer: bool = False,
        residual: Any = None,
        windowed_context_encoding_window_idx: int = -1,
        **kwargs: Any,
    ) -> NeuronAttentionBaseOutput:
        """One layer's attention: prefill without `past_key_value`, decode with it."""
        given = (attention_mask, position_ids, past_key_value, active_mask, adapter_ids, cos_cache, sin_cache, rmsnorm)
        given += (rotary_position_ids, kv_mgr, get_kv_per_layer, update_kv_per_layer, residual)  # type: ignore[assignment]
        if self.attention_chunk_size:
            return self.chunked_attention_forward(hidden_states, *given, **kwargs)
        given += (windowed_context_encoding_window_idx,)  # type: ignore[assignment]
        if self.sliding_window:
            return self.windowed_attention_forward(hidden_states, *given, **kwargs)
        return self.standard_causal_attention_forward(hidden_states, *given, **kwargs)

    def standard_causal_attention_forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Every earlier position is seen. Arguments as `forward`. Returns the input's dtype."""
        polar = kwargs.pop("use_polar_compatible_rope", False)
        rotation = {"skip_rope": False, "use_polar_compatible_rope": polar}
        out = self._attend(
            hidden_states.to(self.torch_dtype), self.attention_context_encode, rotation, **_named(args, kwargs)
        )
        return NeuronAttentionBaseOutput(out[0].to(hidden_states.dtype), *out[1:])

    def chunked_attention_forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Only positions of the same chunk are seen, and the cache holds one chunk. Arguments as `forward`."""
        rotation = {"use_polar_compatible_rope": kwargs.pop("use_polar_compatible_rope", False)}
        named = _named(args, kwargs)

        def prefill(Q: Tensor, K: Tensor, V: Tensor, q_len: int, bsz: int, mask: Tensor, *_: Any) -> Any:
            size: Any = self.attention_chunk_size
            out, K, V = self.attention_context_encode_chunked_attention(Q, K, V, q_len, bsz, mask, size)
            return out, *get_last_kv_chunk(size, named["position_ids"], K, V)

        return NeuronAttentionBaseOutput(*self._attend(hidden_states, prefill, rotation, **named))

    def windowed_attention_forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Only the last `sliding_window` positions are seen; the cache is a ring of one fewer. Arguments as `forward`.

        `use_polar_compatible_rope` has no effect here, as on the real stack.
        """
        kwargs.pop("use_polar_compatible_rope", None)
        named = _named(args, kwargs)

        def prefill(Q: Tensor, K: Tensor, V: Tensor, q_len: int, bsz: int, mask: Tensor, *rest: Any) -> Any:
            size: Any = self.sliding_window
            out, K, V = self.attention_context_encode_windowed_attention(Q, K, V, q_len, bsz, mask, size, *rest)
            return out, *get_last_kv_window(size, named["position_ids"], K, V)

        return NeuronAttentionBaseOutput(*self._attend(hidden_states, prefill, {}, **named))

    def _attend(
        self,
        hidden_states: Tensor,
        prefill: Callable[..., Any],
        rotation: dict[str, bool],
        *,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_value: Any = None,
        active_mask: Any = None,
        adapter_ids: Any = None,
        cos_cache: Any = None,
        sin_cache: Any = None,
        rmsnorm: Any = None,
        rotary_position_ids: Any = None,
        kv_mgr: Any = None,
        get_kv_per_layer: bool = False,
        update_kv_per_layer: bool = False,
        residual: Any = None,
        windowed_context_encoding_window_idx: int = -1,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """(hidden, (K, V) of these positions or the updated cache, cos, sin, residual).

        `rotation` goes to `prep_qkv_tensors`: the three kinds of attention pass different options to a port's override.
        """
        if windowed_context_encoding_window_idx >= 0:
            refuse("windowed_context_encoding_window_idx")
        batch, length, _ = hidden_states.shape
        if get_kv_per_layer:
            past_key_value = kv_mgr.get_kv_by_layer_id(**kwargs)
        Q, K, V, cos_cache, sin_cache, residual = self.prep_qkv_tensors(
            position_ids if rotary_position_ids is None else rotary_position_ids,
            hidden_states,
            past_key_value,
            adapter_ids=adapter_ids,
            cos_cache=cos_cache,
            sin_cache=sin_cache,
            rmsnorm=rmsnorm,
            residual=residual,
            **rotation,
        )
        if past_key_value is None:
            out, K, V = prefill(Q, K, V, length, batch, attention_mask, past_key_value, active_mask)
        else:
            out = self.attention_tokengen(Q, K, V, attention_mask, position_ids, past_key_value, active_mask, **kwargs)
            out = out.transpose(1, 2).contiguous()
        out = self.get_o_proj()(out.reshape(batch, length, self.num_heads * self.head_dim), adapter_ids=adapter_ids)
        kv: Any = (K, V)
        if update_kv_per_layer:
            kv = kv_mgr.update_kv_by_layer_id(kv_per_layer=kv, position_ids=position_ids, **kwargs)
        return out, kv, cos_cache, sin_cache, residual
