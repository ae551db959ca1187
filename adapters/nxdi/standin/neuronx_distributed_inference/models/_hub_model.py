"""What the stack's own decoders share: two norms around attention and MLP, an embedding and a head."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding
from torch import Tensor, nn

from neuronx_distributed_inference.models._base_model import NeuronBaseModel
from neuronx_distributed_inference.models.config import InferenceConfig


class HubDecoderLayer(nn.Module):
    """Pre-norm layer around `self_attn` and `mlp`, which are made by the subclass and return tuples."""

    self_attn: nn.Module
    mlp: nn.Module

    def __init__(self, config: Any, norm: Any) -> None:
        super().__init__()
        self.config, self.neuron_config, self.hidden_size = config, config.neuron_config, config.hidden_size
        self.input_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)

    def _run_mlp(self, hidden_states: Tensor, padding_mask: Any) -> Tensor:
        return self.mlp(hidden_states)[0]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_value: Any = None,
        padding_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """(hidden [B, S, hidden], (K, V), cos, sin, None)."""
        attended, kv, cos, sin = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_value=past_key_value,
            **kwargs,
        )
        hidden_states = hidden_states + attended
        hidden_states = hidden_states + self._run_mlp(self.post_attention_layernorm(hidden_states), padding_mask)
        return hidden_states, kv, cos, sin, None


class HubModel(NeuronBaseModel):
    """Embedding, layers of `_layer_cls`, a norm of `_norm()` and a head; `_padded` ones fit any number of ranks."""

    _layer_cls: Any
    _padded = False

    @staticmethod
    def _norm() -> Any:
        raise NotImplementedError

    def setup_attr_for_model(self, config: InferenceConfig) -> None:
        """Sizes."""
        served, described = config.neuron_config, config
        self.on_device_sampling = served.on_device_sampling_config is not None
        self.tp_degree, self.max_batch_size, self.buckets = served.tp_degree, served.max_batch_size, served.buckets
        self.hidden_size = described.hidden_size
        self.num_attention_heads = described.num_attention_heads
        self.num_key_value_heads = described.num_key_value_heads

    def init_model(self, config: InferenceConfig) -> None:
        """Layers. The head of a model that is not padded stays float32."""
        dtype = config.neuron_config.torch_dtype
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        sizes = config.vocab_size, config.hidden_size
        self.embed_tokens = ParallelEmbedding(
            *sizes, self.padding_idx, dtype=dtype, shard_across_embedding=True, pad=self._padded
        )
        self.layers = nn.ModuleList(self._layer_cls(config, idx) for idx in range(config.num_hidden_layers))
        self.norm = self._norm()(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = ColumnParallelLinear(
            *sizes[::-1],
            bias=False,
            gather_output=not self.on_device_sampling,
            pad=self._padded,
            dtype=dtype if self._padded else torch.float32,
        )


def ranks(served: Any) -> Tensor:
    """The ranks' numbers, as checkpoints hold them."""
    return torch.arange(served.tp_degree, dtype=torch.int32)


def stack_experts(
    state_dict: dict[str, Any], source: str, target: str, count: int, names: tuple[str, str, str], pad: int = 0
) -> None:
    """Move `count` experts' gate, up and down weights, in place, into one gate_up [E, in, 2·inner] and one down.

    `names` are those of gate, up and down below `<source>.experts.<e>`; `pad` zeros are added to the inner width.
    """
    gate, up, down = (
        torch.stack([state_dict.pop(f"{source}.experts.{expert}.{name}.weight").T for expert in range(count)])
        for name in names
    )
    grow = torch.nn.functional.pad
    both = torch.cat([grow(gate, (0, pad)), grow(up, (0, pad))], dim=2)
    state_dict[f"{target}.expert_mlps.mlp_op.gate_up_proj.weight"] = both.contiguous()
    state_dict[f"{target}.expert_mlps.mlp_op.down_proj.weight"] = grow(down, (0, 0, 0, pad)).contiguous()
