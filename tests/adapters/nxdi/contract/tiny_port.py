"""A small port, written as ports are: it can be told to make the mistakes that the stack does not catch."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
from neuronx_distributed_inference.modules.attention.attention_base import NeuronAttentionBase
from neuronx_distributed_inference.modules.attention.utils import RotaryEmbedding
from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm
from torch import Tensor, nn


class TinyInferenceConfig(InferenceConfig):
    def get_required_attributes(self) -> list[str]:
        return ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "rope_theta"]

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        return NeuronConfig


class TinyAttention(NeuronAttentionBase):
    def __init__(self, config: Any, layer: int) -> None:
        head_dim = config.hidden_size // config.num_attention_heads
        # `rope_by_layer` asks for a base of its own in each layer: the stack hands the first one's table on.
        base = config.rope_theta * (10.0**layer if getattr(config, "rope_by_layer", False) else 1.0)
        super().__init__(
            config=config,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=head_dim,
            rotary_emb=RotaryEmbedding(head_dim, config.max_position_embeddings, base),
            sliding_window=getattr(config, "sliding_window", None),
            attention_chunk_size=getattr(config, "attention_chunk_size", None),
        )


class TinyLayer(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.config = config
        self.self_attn = TinyAttention(config, layer)
        self.up = ColumnParallelLinear(config.hidden_size, config.intermediate_size, gather_output=False)
        self.down = RowParallelLinear(config.intermediate_size, config.hidden_size, input_is_parallel=True)
        self.norm = CustomRMSNorm(config.hidden_size)
        self.norm_2 = CustomRMSNorm(config.hidden_size)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_value: Any = None,
        **kwargs: Any,
    ) -> Any:
        if getattr(self.config, "drop_tables", False):
            kwargs.update(cos_cache=None, sin_cache=None)
        attended, kv, cos, sin = self.self_attn(
            hidden_states=self.norm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_value=past_key_value,
            **kwargs,
        )
        hidden_states = hidden_states + attended
        out = self.down(torch.relu(self.up(self.norm_2(hidden_states))))
        if getattr(self.config, "row_of_the_batch", False):
            out = out[0]
        result = (hidden_states + out, kv, cos, sin, None)
        return result[:4] if getattr(self.config, "four_outputs", False) else result


class TinyModel(NeuronBaseModel):
    def setup_attr_for_model(self, config: Any) -> None:
        self.on_device_sampling = config.neuron_config.on_device_sampling_config is not None
        self.tp_degree = config.neuron_config.tp_degree
        self.hidden_size = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.max_batch_size = config.neuron_config.max_batch_size
        self.buckets = config.neuron_config.buckets
        self.sliding_window = getattr(config, "sliding_window", None)
        self.attention_chunk_size = getattr(config, "attention_chunk_size", None)

    def init_model(self, config: Any) -> None:
        self.embed_tokens = ParallelEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        if getattr(config, "learned_positions", False):
            self.embed_tokens = WithPositions(self.embed_tokens, config)
        self.layers = nn.ModuleList(TinyLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = CustomRMSNorm(config.hidden_size)
        self.lm_head = ColumnParallelLinear(
            config.hidden_size, config.vocab_size, bias=False, gather_output=not self.on_device_sampling
        )


class ScaledModel(TinyModel):
    """Scales the embeddings where the stack lets it, before the first layer."""

    def process_sequence_parallel_hidden_states(
        self, inputs_embeds: Tensor, seq_length: int, active_block_table: Any = None
    ) -> Tensor:
        scaled = inputs_embeds * self.hidden_size**0.5 + seq_length
        return super().process_sequence_parallel_hidden_states(scaled, seq_length, active_block_table)


class WithPositions(nn.Module):
    """Absolute positions added in the embedding, which is never told the positions: it counts from 0."""

    def __init__(self, table: nn.Module, config: Any) -> None:
        super().__init__()
        self.table = table
        self.positions = ParallelEmbedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) + self.positions(torch.arange(ids.shape[1])[None])


class TinyForCausalLM(NeuronBaseForCausalLM):
    _model_cls = TinyModel

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict: dict[str, Any], config: Any) -> dict[str, Any]:
        return state_dict

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict: dict[str, Any]) -> None:
        state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()

    @classmethod
    def get_config_cls(cls) -> type[TinyInferenceConfig]:
        return TinyInferenceConfig


class ScaledForCausalLM(TinyForCausalLM):
    _model_cls = ScaledModel
