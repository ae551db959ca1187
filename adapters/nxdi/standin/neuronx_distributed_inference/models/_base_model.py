"""The model that ports subclass: embedding, layers, norm and head, around masks and a cache."""

from __future__ import annotations

import logging
from typing import Any

import torch
from neuronx_distributed._standin.missing import refuse, refuse_overrides
from neuronx_distributed.parallel_layers.layers import SPMDRank
from neuronx_distributed.parallel_layers.mappings import _gather_along_dim
from torch import Tensor, nn

from neuronx_distributed_inference.models._masks import AttentionMasks
from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.modules.generation.sampling import create_sampler, mask_padded_logits
from neuronx_distributed_inference.modules.kvcache.kv_cache_manager import KVCacheManager
from neuronx_distributed_inference.utils.distributed import get_tp_group


class NeuronBaseModel(AttentionMasks):
    """One model for both stages. Ports fill in `setup_attr_for_model` and `init_model`."""

    # What setup_attr_for_model and init_model set.
    embed_tokens: Any
    hidden_size: int
    layers: Any
    lm_head: Any
    norm: Any
    num_key_value_heads: int
    on_device_sampling: bool

    def __init__(self, config: InferenceConfig, optimize_inference: bool = True) -> None:
        super().__init__()
        refuse_overrides(self, NeuronBaseModel, "_sample_on_device", "_process_non_eagle3_hidden_states")
        served = config.neuron_config
        self.config, self.neuron_config = config, served
        self.sampler: Any = None
        self.kv_mgr: Any = None
        self.batch_size, self.vocab_size = served.batch_size, config.vocab_size
        self.n_positions, self.n_active_tokens = served.n_positions, served.n_active_tokens
        self.max_length, self.padding_side = served.max_length, served.padding_side
        self.prefix_size = self.speculation_length = 0
        self.sequence_parallel_enabled = self.is_block_kv_layout = self.is_prefix_caching = False
        self.is_eagle3_draft = False
        self.sequence_dimension = 1
        self.rank_util = SPMDRank(world_size=served.tp_degree)
        self.num_cores_per_group = config.num_cores_per_group
        self.attention_chunk_size: int | None = None
        self.sliding_window: int | None = None
        self.layer_to_cache_size_mapping: list[int] | None = None
        self.has_mixed_attn = False
        self.windowed_context_encoding_size = None

        self.setup_attr_for_model(config)
        self.init_model(config)
        if self.attention_chunk_size and self.attention_chunk_size >= served.seq_len:
            logging.warning(
                f"attention_chunk_size {self.attention_chunk_size} covers seq_len: attention is not chunked"
            )
            self.attention_chunk_size = None
            self.has_mixed_attn = False
        if optimize_inference:
            self.init_inference_optimization(config)
        self.sliced_hidden = False

    def setup_attr_for_model(self, config: InferenceConfig) -> None:
        """Hook: set on_device_sampling, tp_degree, hidden_size, num_attention_heads, num_key_value_heads,
        max_batch_size and buckets."""
        raise NotImplementedError("setup_attr_for_model() is not implemented")

    def init_model(self, config: InferenceConfig) -> None:
        """Hook: build embed_tokens, layers, norm and lm_head."""
        raise NotImplementedError("init_model() is not implemented")

    def init_inference_optimization(self, config: InferenceConfig) -> None:
        """Build the sampler, if sampling is on, and the cache."""
        if self.on_device_sampling:
            group = getattr(getattr(self, "lm_head", None), "tensor_parallel_group", None)
            self.sampler = create_sampler(config.neuron_config, None if group is None else group.size())
        self.kv_mgr = KVCacheManager(
            config,
            num_kv_head=self.num_key_value_heads,
            global_rank=self.rank_util,
            attention_chunk_size=self.attention_chunk_size,
            sliding_window=self.sliding_window,
            windowed_context_encoding_size=self.windowed_context_encoding_size,
            layer_to_cache_size_mapping=self.layer_to_cache_size_mapping,
        )

    def get_input_embeddings(self) -> nn.Module:
        """The embedding."""
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding."""
        self.embed_tokens = value

    def encode_vision_to_input(self, inputs_embeds: Tensor, vision_embeddings: Tensor, vision_mask: Tensor) -> Tensor:
        """Hook: put an image's embeddings in the prompt's."""
        raise NotImplementedError("encode_vision_to_input() is not implemented")

    def process_sequence_parallel_hidden_states(
        self, inputs_embeds: Tensor, seq_length: int, active_block_table: Any = None
    ) -> Tensor:
        """Hook: what becomes of the embeddings [B, S, hidden] before the first layer. Here they stay as they are."""
        return inputs_embeds

    def set_none_if_empty(self, param: Any) -> Any:
        """None for a tensor without elements: how an absent optional argument arrives."""
        return None if torch.is_tensor(param) and param.numel() == 0 else param

    def _is_context_encoding(self, input_ids: Tensor) -> bool:
        return input_ids.shape[-1] > 1 and input_ids.shape[-1] != self.speculation_length

    def _is_for_speculation(self, input_ids: Tensor) -> bool:
        return input_ids.shape[-1] == self.speculation_length

    def _local_mask(self, attention_mask: Tensor, position_ids: Tensor, prefill: bool) -> Tensor | None:
        size = self.attention_chunk_size or self.sliding_window
        if not size:
            return None
        kind = "chunked" if self.attention_chunk_size else "windowed"
        if prefill:
            return getattr(self, f"_create_{kind}_attn_mask_cte")(attention_mask, size)
        return getattr(self, f"_create_{kind}_attn_mask_tkg")(attention_mask, size, position_ids)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        seq_ids: Tensor,
        sampling_params: Tensor,
        prev_hidden: Any = None,
        adapter_ids: Any = None,
        accepted_indices: Any = None,
        current_length: Any = None,
        medusa_mask: Any = None,
        scatter_index: Any = None,
        slot_mapping: Any = None,
        active_block_table: Any = None,
        num_queries: Any = None,
        computed_context_lens: Any = None,
        tile_q_indices: Any = None,
        tile_block_tables: Any = None,
        tile_masks: Any = None,
        inputs_embeds: Any = None,
        kv_cache: Any = None,
        active_mask: Any = None,
        rotary_position_id: Any = None,
        vision_embeddings: Any = None,
        vision_mask: Any = None,
        deepstack_vision_embeds: Any = None,
    ) -> list[Tensor]:
        """[logits [B, 1, V] float32 (or tokens), K and V of every layer].

        Prefill takes the hidden state of each row where `position_ids` is largest (the first such place); for left
        padding, the last one.
        """
        given = self.set_none_if_empty
        if given(deepstack_vision_embeds) is not None:
            refuse("deepstack_vision_embeds", "multimodal prompts")
        prefill = self._is_context_encoding(input_ids)
        hidden_states, updated_kv_cache = self.get_model_output(
            input_ids=input_ids,
            seq_ids=seq_ids,
            attention_mask=self.create_attn_mask(attention_mask, prefill, False, position_ids=position_ids),
            position_ids=position_ids,
            active_mask=None,
            inputs_embeds=given(inputs_embeds),
            adapter_ids=given(adapter_ids),
            prev_hidden=given(prev_hidden),
            tile_q_indices=given(tile_q_indices),
            tile_block_tables=given(tile_block_tables),
            tile_masks=given(tile_masks),
            num_queries=given(num_queries),
            is_for_context_encoding=prefill,
            scatter_index=given(scatter_index),
            kvcache_buffer=given(kv_cache),
            is_for_speculation=False,
            active_block_table=given(active_block_table),
            kv_active_mask=None,
            update_cache=True,
            rotary_position_ids=given(rotary_position_id),
            vision_embeddings=given(vision_embeddings),
            vision_mask=given(vision_mask),
            deepstack_vision_embeds=None,
            local_attn_mask=self._local_mask(attention_mask, position_ids, prefill),
            padding_mask=self.create_padding_mask(position_ids),
        )
        if not self.sliced_hidden:
            hidden_states = self._last_of_each_row(hidden_states, position_ids)
        logits = self.lm_head(hidden_states).float()
        if hasattr(self.lm_head, "pad_size"):
            logits = self._mask_padded_vocabulary(logits)
        result = logits
        if self.on_device_sampling:
            tokens = self.sampler(logits[:, -1, :], sampling_params, rank_id=self.rank_util.get_rank())
            result = tokens.to(torch.int32)
        outputs = [result]
        if self.neuron_config.output_logits:
            outputs.append(_gather_along_dim(logits, partition_dim=2, process_group=get_tp_group(self.config)))
        return outputs + list(updated_kv_cache)

    def _last_of_each_row(self, hidden_states: Tensor, position_ids: Tensor) -> Tensor:
        rows = hidden_states.shape[0]
        if self.padding_side == "left":
            index = torch.full((rows, 1), hidden_states.shape[1] - 1, device=hidden_states.device)
        elif position_ids.shape[-1] == 1:
            return hidden_states
        else:
            index = torch.max(position_ids, dim=1, keepdim=True).indices
        return torch.gather(hidden_states, 1, index.unsqueeze(1).expand(rows, 1, self.hidden_size))

    def _mask_padded_vocabulary(self, logits: Tensor) -> Tensor:
        rank, ranks = torch.tensor(0, dtype=torch.int32), 1
        if not self.lm_head.gather_output:
            rank, ranks = self.rank_util.get_rank(), self.lm_head.tensor_parallel_group.size()
        return mask_padded_logits(logits, rank, ranks, pad_size=self.lm_head.pad_size)

    def get_model_output(
        self,
        input_ids: Any = None,
        seq_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        active_mask: Any = None,
        inputs_embeds: Any = None,
        prev_hidden: Any = None,
        adapter_ids: Any = None,
        rotary_position_ids: Any = None,
        update_cache: bool = False,
        is_for_context_encoding: bool = False,
        vision_embeddings: Any = None,
        vision_mask: Any = None,
        deepstack_vision_embeds: Any = None,
        local_attn_mask: Any = None,
        windowed_context_encoding_window_idx: int = -1,
        padding_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """(normed hidden [B, S, hidden], the updated cache, flat).

        The embedding is called with the token ids alone. cos and sin that one layer returns are given to the next, so
        that a rotation which differs from layer to layer becomes the first layer's.
        """
        length = input_ids.shape[1]
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if vision_embeddings is not None and vision_mask is not None and is_for_context_encoding:
            vision_embeddings = vision_embeddings.to(self.neuron_config.torch_dtype)
            inputs_embeds = self.encode_vision_to_input(inputs_embeds, vision_embeddings, vision_mask)
        if position_ids is None:
            start = 0 if past_key_values is None else past_key_values[0][1].shape[2]
            position_ids = torch.arange(start, start + length, dtype=torch.long, device=input_ids.device)
        position_ids = position_ids.view(-1, length).long()
        cache_size = self.attention_chunk_size or self.sliding_window or self.n_positions
        if not is_for_context_encoding:
            past_key_values = self.kv_mgr.get_cache(
                seq_ids=seq_ids,
                seq_len=cache_size,
                is_for_context_encoding=is_for_context_encoding,
                windowed_context_encoding_window_idx=windowed_context_encoding_window_idx,
                **kwargs,
            )
        if self.attention_chunk_size and not self.has_mixed_attn:
            attention_mask, local_attn_mask = local_attn_mask, None
        hidden_states = self.process_sequence_parallel_hidden_states(
            inputs_embeds, length, kwargs.get("active_block_table")
        )
        cos_cache, sin_cache, residual = None, None, None
        new_key_values: tuple[Any, ...] = ()
        for idx, layer in enumerate(self.layers):
            outputs = layer(
                hidden_states,
                seq_ids=seq_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_value=None if past_key_values is None else past_key_values[idx],
                active_mask=active_mask,
                adapter_ids=adapter_ids,
                cos_cache=cos_cache,
                sin_cache=sin_cache,
                rotary_position_ids=rotary_position_ids,
                kv_mgr=self.kv_mgr,
                get_kv_per_layer=False,
                update_kv_per_layer=False,
                idx=idx,
                is_for_context_encoding=is_for_context_encoding,
                seq_len=cache_size,
                residual=residual,
                local_mask=local_attn_mask,
                windowed_context_encoding_window_idx=windowed_context_encoding_window_idx,
                padding_mask=padding_mask,
                **kwargs,
            )
            hidden_states, residual = outputs[0], outputs[4]
            new_key_values += (outputs[1],)
            cos_cache, sin_cache = outputs[2:4]
        if not update_cache:
            return self.norm(hidden_states), new_key_values
        updated = self.kv_mgr.update_cache(
            is_for_context_encoding=is_for_context_encoding,
            seq_ids=seq_ids,
            position_ids=position_ids,
            new_key_values=new_key_values,
            seq_len=cache_size,
            windowed_context_encoding_window_idx=windowed_context_encoding_window_idx,
            **kwargs,
        )
        return self.norm(hidden_states), updated
