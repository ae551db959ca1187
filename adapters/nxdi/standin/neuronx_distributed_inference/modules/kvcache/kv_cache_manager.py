"""The key/value cache: one K and one V parameter per layer, [batch, heads of this rank, length, head_dim]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from neuronx_distributed._standin.missing import attribute_hook, refuse
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.utils import divide
from torch import Tensor, nn

from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.modules.attention.gqa import determine_sharding_strategy, get_shardable_head_counts
from neuronx_distributed_inference.modules.kvcache.utils import fill_prefix, get_kv_shapes, update_cache_const_indices

__getattr__ = attribute_hook(__name__)

KV_CACHE_PAD_FOR_SEQ_IDS_MASKING = 128


def _slice_kv_cacheline(padding_side: str, seq_len: int, cache: Tensor, transposed: bool) -> Tensor:
    """The first `seq_len` entries (or fewer) of a right-padded cache, the last ones of a left-padded one."""
    dim = 3 if transposed else 2
    length = min(seq_len, cache.shape[dim])
    return cache.narrow(dim, 0 if padding_side == "right" else cache.shape[dim] - length, length)


class KVCacheManager(nn.Module):
    """Reads and writes `past_key_values`, which alternates K and V, layer by layer.

    Without continuous batching row i of a call is row i of the cache, whatever `seq_ids` says. Prefill overwrites the
    leading entries of the rows and leaves the rest as it was.
    """

    def __init__(
        self,
        config: InferenceConfig,
        num_kv_head: int,
        global_rank: Any = None,
        attention_chunk_size: int | None = None,
        sliding_window: int | None = None,
        windowed_context_encoding_size: int | None = None,
        layer_to_cache_size_mapping: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        served = config.neuron_config
        self.config, self.neuron_config = config, served
        self.padding_side, self.is_continuous_batching = served.padding_side, served.is_continuous_batching
        self.num_cores_per_group = config.num_cores_per_group
        self.num_kv_head, self.global_rank = num_kv_head, global_rank
        self.batch_size, self.kv_cache_batch_size = served.batch_size, served.kv_cache_batch_size
        self.kv_cache_padding_size = served.kv_cache_padding_size
        self.attention_chunk_size, self.sliding_window = attention_chunk_size, sliding_window
        self.windowed_context_encoding_size = windowed_context_encoding_size
        self.is_medusa = self.is_kv_cache_tiled = self.k_cache_transposed = self.flash_decoding_enabled = False
        self.kv_quant_config, self.padded_layer_ids = None, []
        if windowed_context_encoding_size is not None:
            refuse("windowed_context_encoding_size")
        self.cache_dtype = served.torch_dtype if served.attention_dtype is None else served.attention_dtype
        self._init_kv_shape(config, layer_to_cache_size_mapping)
        layers = range(config.num_hidden_layers)
        if layer_to_cache_size_mapping:
            shapes = [(self.k_shapes[layer], self.v_shapes[layer]) for layer in layers]
        else:
            shapes = [(self.k_shape, self.v_shape) for _ in layers]
        self.past_key_values = nn.ParameterList(
            nn.Parameter(torch.zeros(shape, dtype=self.cache_dtype), requires_grad=False)
            for pair in shapes
            for shape in pair
        )

    def _init_kv_shape(self, config: InferenceConfig, layer_to_cache_size_mapping: Sequence[int] | None = None) -> None:
        """Set `k_shape` and `v_shape`, or `k_shapes` and `v_shapes` when the layers differ."""
        served = config.neuron_config
        batch = served.kv_cache_batch_size + served.kv_cache_padding_size
        heads, width = self._get_num_kv_heads_per_rank(config), self._get_hidden_dim_per_head(config)
        if layer_to_cache_size_mapping:
            pairs = [get_kv_shapes(length, batch, heads, width) for length in layer_to_cache_size_mapping]
            self.k_shapes, self.v_shapes = ([pair[side] for pair in pairs] for side in (0, 1))
            return
        length = served.max_length
        if self.attention_chunk_size and self.attention_chunk_size < length:
            length = self.attention_chunk_size
        elif self.sliding_window:
            length = self.sliding_window
        self.k_shape, self.v_shape = get_kv_shapes(length, batch, heads, width)

    def _get_num_kv_heads_per_rank(self, config: InferenceConfig) -> int:
        ranks = config.neuron_config.tp_degree
        strategy = determine_sharding_strategy(ranks, self.num_kv_head)
        _, heads = get_shardable_head_counts(ranks, config.num_attention_heads, self.num_kv_head, strategy)
        return divide(heads, ranks) if parallel_state.model_parallel_is_initialized() else heads

    def _get_hidden_dim_per_head(self, config: InferenceConfig) -> int:
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def _fetch_cache(self, idx: int, kvcache_buffer: Any = None) -> tuple[Tensor, Tensor]:
        """Whole K and V of layer `idx`, from the buffer (pairs, or flat) if there is one."""
        held: Any = self.past_key_values if kvcache_buffer is None else kvcache_buffer
        if kvcache_buffer is not None and len(held) == len(self.past_key_values) // 2 and len(held[0]) == 2:
            return held[idx][0], held[idx][1]
        if len(held) != len(self.past_key_values):
            raise ValueError(
                f"a kvcache_buffer holds {len(self.past_key_values) // 2} pairs or {len(self.past_key_values)} tensors,"
                f" not {len(held)}"
            )
        return held[2 * idx], held[2 * idx + 1]

    def get_kv_by_layer_id(
        self,
        idx: int,
        seq_len: int,
        skip_slice: bool = False,
        medusa_metadata: Any = None,
        kvcache_buffer: Any = None,
        seq_ids: Any = None,
        is_for_speculation: bool = False,
        windowed_context_encoding_window_idx: int = -1,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """K and V of layer `idx`, cut to `seq_len` entries (to the layer's own length when the layers differ)."""
        if is_for_speculation or windowed_context_encoding_window_idx >= 1:
            refuse("speculation or windowed context encoding")
        k_cache, v_cache = self._fetch_cache(idx, kvcache_buffer)
        if hasattr(self, "v_shapes"):
            seq_len = self.v_shapes[idx][2]
        if skip_slice:
            return k_cache, v_cache
        return (
            _slice_kv_cacheline(self.padding_side, seq_len, k_cache, False),
            _slice_kv_cacheline(self.padding_side, seq_len, v_cache, False),
        )

    def get_cache(
        self,
        seq_len: int,
        skip_slice: bool = False,
        kvcache_buffer: Any = None,
        seq_ids: Any = None,
        windowed_context_encoding_window_idx: int = -1,
        **kwargs: Any,
    ) -> list[list[Tensor]]:
        """[K, V] of every layer."""
        return [
            list(
                self.get_kv_by_layer_id(
                    idx=idx,
                    skip_slice=skip_slice,
                    seq_len=seq_len,
                    kvcache_buffer=kvcache_buffer,
                    seq_ids=seq_ids,
                    windowed_context_encoding_window_idx=windowed_context_encoding_window_idx,
                    **kwargs,
                )
            )
            for idx in range(len(self.past_key_values) // 2)
        ]

    def update_cache(
        self,
        is_for_context_encoding: bool,
        seq_ids: Tensor,
        position_ids: Tensor,
        new_key_values: Sequence[Any],
        seq_len: int,
        scatter_index: Any = None,
        kv_active_mask: Any = None,
        kvcache_buffer: Any = None,
        windowed_context_encoding_window_idx: int = -1,
        **kwargs: Any,
    ) -> list[Tensor]:
        """K and V of every layer after the write, flat: the caller stores them."""
        updated: list[Tensor] = []
        for idx, kv_per_layer in enumerate(new_key_values):
            updated += self.update_kv_by_layer_id(
                idx=idx,
                is_for_context_encoding=is_for_context_encoding,
                seq_ids=seq_ids,
                position_ids=position_ids,
                kv_per_layer=kv_per_layer,
                seq_len=seq_len,
                scatter_index=scatter_index,
                kv_active_mask=kv_active_mask,
                kvcache_buffer=kvcache_buffer,
                windowed_context_encoding_window_idx=windowed_context_encoding_window_idx,
                **kwargs,
            )
        return updated

    def update_kv_by_layer_id(
        self,
        idx: int,
        is_for_context_encoding: bool,
        seq_ids: Tensor,
        position_ids: Tensor,
        kv_per_layer: Any,
        seq_len: int,
        scatter_index: Any = None,
        kv_active_mask: Any = None,
        kvcache_buffer: Any = None,
        windowed_context_encoding_window_idx: int = -1,
        is_valid_window_kv: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """K and V of layer `idx` after the write of `kv_per_layer` [rows, H, positions, D].

        Raises:
            AssertionError: continuous batching prefills more than one sequence in a call.
        """
        if windowed_context_encoding_window_idx >= 0:
            refuse("windowed_context_encoding_window_idx")
        caches, latest = self._fetch_cache(idx, kvcache_buffer), kv_per_layer[:2]
        if is_for_context_encoding and self.is_continuous_batching:
            assert seq_ids.dim() == 1 and seq_ids.shape[0] == 1, "only supports single seq_id"
            k, v = (update_cache_const_indices(cache, new, seq_ids) for cache, new in zip(caches, latest, strict=True))
        elif is_for_context_encoding:
            k, v = (fill_prefix(cache, new) for cache, new in zip(caches, latest, strict=True))
        elif self.padding_side == "left":
            k, v = (torch.cat([cache[:, :, 1:], new], dim=2) for cache, new in zip(caches, latest, strict=True))
        elif self.batch_size < self.kv_cache_batch_size:
            k, v = (
                self._write_some_rows(cache, new, seq_ids, position_ids, seq_len - 1)
                for cache, new in zip(caches, latest, strict=True)
            )
        else:
            k, v = (
                torch.scatter(
                    cache,
                    2,
                    self._get_index_to_update_new_position(seq_ids, scatter_index, position_ids, new, False, idx),
                    new,
                )
                for cache, new in zip(caches, latest, strict=True)
            )
        return k, v

    def _write_some_rows(
        self, cache: Tensor, new: Tensor, seq_ids: Tensor, position_ids: Tensor, garbage: int
    ) -> Tensor:
        """Write `new` at the rows `seq_ids`; the other rows get zeros at the entry `garbage`."""
        rows = self.get_cache_update_index_for_seq_ids(seq_ids).long()
        where = torch.full((cache.shape[0], position_ids.shape[-1]), garbage, dtype=torch.long)
        where[rows] = position_ids.long()
        values = new.new_zeros((cache.shape[0], *new.shape[1:]))
        values[rows] = new
        return torch.scatter(cache, 2, where[:, None, :, None].expand(values.shape), values)

    def _get_index_to_update_new_position(
        self,
        seq_ids: Any,
        scatter_index: Any,
        position_ids: Tensor,
        full_k: Tensor,
        transposed: bool,
        layer_idx: int,
    ) -> Tensor:
        """Cache entry of each new position, expanded to `full_k`: modulo the chunk, or the window less one."""
        if self.attention_chunk_size:
            own = self.v_shapes[layer_idx][2] if hasattr(self, "v_shapes") else self.attention_chunk_size
            position_ids = position_ids % own
        elif self.sliding_window:
            position_ids = position_ids % (self.sliding_window - 1)
        view = (-1, 1, 1, position_ids.shape[-1]) if transposed else (-1, 1, position_ids.shape[-1], 1)
        return position_ids.view(view).expand_as(full_k)

    def get_cache_update_index_for_seq_ids(self, seq_ids: Tensor) -> Tensor:
        """Hook: the cache row of each sequence id; by default the id itself."""
        return seq_ids

    def get_rank(self, device: Any = None) -> Tensor:
        """This rank's number."""
        return self.global_rank.get_rank()
