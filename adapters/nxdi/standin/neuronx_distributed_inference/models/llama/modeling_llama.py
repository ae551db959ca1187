"""Llama, and the blocks of it that other ports reuse."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from neuronx_distributed._standin.missing import attribute_hook, refuse
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_distributed.utils import cpu_mode
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
from neuronx_distributed_inference.modules.attention.attention_base import NeuronAttentionBase
from neuronx_distributed_inference.modules.attention.utils import RotaryEmbedding
from neuronx_distributed_inference.modules.custom_calls import CustomRMSNorm
from neuronx_distributed_inference.modules.flashdecode.utils import calculate_num_cores_per_group
from neuronx_distributed_inference.utils.distributed import get_tp_group

__all__ = [
    "Llama3RotaryEmbedding",
    "LlamaInferenceConfig",
    "NeuronLlamaAttention",
    "NeuronLlamaDecoderLayer",
    "NeuronLlamaForCausalLM",
    "NeuronLlamaMLP",
    "NeuronLlamaModel",
    "calculate_num_cores_per_group",
    "convert_state_dict_to_fused_qkv",
    "get_rmsnorm_cls",
]
__getattr__ = attribute_hook(__name__)


def get_rmsnorm_cls(
    hidden_size: int | None = None, unpadded_hidden_size: int | None = None, eps: float = 1e-5
) -> nn.Module:
    """A norm of that width (an instance, in spite of the name): Hugging Face's in CPU mode, the device's otherwise."""
    assert hidden_size is not None and hidden_size > 0, f"{hidden_size} has to be positive"
    if unpadded_hidden_size:
        refuse(f"get_rmsnorm_cls(unpadded_hidden_size={unpadded_hidden_size})", "padded hidden sizes")
    return LlamaRMSNorm(hidden_size, eps) if cpu_mode() else CustomRMSNorm(hidden_size, eps)


def convert_state_dict_to_fused_qkv(llama_state_dict: dict[str, Any], cfg: InferenceConfig) -> dict[str, Any]:
    """Join each layer's q, k and v weights (not biases) into Wqkv, in place."""
    for layer in range(cfg.num_hidden_layers):
        prefix = f"layers.{layer}.self_attn"
        parts = [llama_state_dict.pop(f"{prefix}.{name}_proj.weight") for name in "qkv"]
        llama_state_dict[f"{prefix}.Wqkv.weight"] = torch.cat(parts)
    return llama_state_dict


class LlamaInferenceConfig(InferenceConfig):
    """What a Llama is."""

    def get_required_attributes(self) -> list[str]:
        """Sizes, norm, activation and rotation."""
        sizes = ["hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id"]
        return [*sizes, "vocab_size", "max_position_embeddings", "rope_theta", "rms_norm_eps", "hidden_act"]

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        """The general class."""
        return NeuronConfig


class NeuronLlamaMLP(nn.Module):
    """down(act(gate(x)) * up(x)); returns (output, None). Its layers pad, so they run in eval mode alone."""

    def __init__(self, config: InferenceConfig, tensor_model_parallel_group: Any = None) -> None:
        super().__init__()
        served = config.neuron_config
        self.config, self.neuron_config, self.tp_degree = config, served, served.tp_degree
        group = get_tp_group(config) if tensor_model_parallel_group is None else tensor_model_parallel_group
        self.tensor_model_parallel_group, self.mlp_cp_degree = group, 1
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.act_fn = ACT2FN[config.hidden_act]
        self.rms_norm_eps = config.rms_norm_eps
        self.sequence_parallel_enabled = self.mlp_kernel_enabled = self.quantized_mlp_kernel_enabled = False
        self.sequence_dimension = None
        bias = getattr(config, "mlp_bias", False)
        if not parallel_state.model_parallel_is_initialized():
            self.gate_proj: nn.Module = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
            self.up_proj: nn.Module = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
            self.down_proj: nn.Module = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)
            return
        options: dict[str, Any] = {"bias": bias, "dtype": served.torch_dtype, "pad": True}
        options["tensor_model_parallel_group"] = group
        sizes = self.hidden_size, self.intermediate_size
        self.gate_proj = ColumnParallelLinear(*sizes, gather_output=False, **options)
        self.up_proj = ColumnParallelLinear(*sizes, gather_output=False, **options)
        self.down_proj = RowParallelLinear(
            *sizes[::-1], input_is_parallel=True, reduce_dtype=served.rpl_reduce_dtype, **options
        )

    def replace_prefixes(self, old_prefix: str, new_prefix: str, model_state_dict: dict[str, Any]) -> None:
        """Add a copy of every key that contains `old_prefix` under its new name; the old key stays."""
        renamed = {
            key.replace(old_prefix, new_prefix): copy.deepcopy(value)
            for key, value in model_state_dict.items()
            if old_prefix in key
        }
        model_state_dict.update(renamed)

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> bool:
        """Bring `<layer>.mlp.*` to this block's names, and pad the weights (not the biases)."""
        parts = prefix.split(".")
        own, layer = ".".join(parts[:-1]), ".".join(parts[:-2])
        for name in ("down_proj", "gate_proj", "up_proj"):
            self.replace_prefixes(f"{layer}.mlp.{name}", f"{own}.{name}", model_state_dict)
        for name in ("gate_proj", "up_proj", "down_proj"):
            projection = getattr(self, name)
            if hasattr(projection, "preshard_hook"):
                projection.preshard_hook(model_state_dict, f"{own}.{name}.weight")
        return True

    def forward(
        self, x: Tensor, rmsnorm: Any = None, residual: Any = None, adapter_ids: Any = None
    ) -> tuple[Tensor, None]:
        """[B, S, hidden] -> ([B, S, hidden], None).

        Raises:
            AssertionError: a norm or a residual, which only a kernel fuses.
        """
        assert rmsnorm is None and residual is None
        return self._native_mlp(x, adapter_ids=adapter_ids), None

    def _native_mlp(self, x: Tensor, adapter_ids: Any = None) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Llama3RotaryEmbedding(RotaryEmbedding):
    """cos and sin [B, S, dim] with Llama-3 scaling: long waves are stretched by `factor`, medium ones in part."""

    def __init__(
        self,
        dim: int,
        max_position_embeddings: int = 131072,
        base: float = 500000.0,
        factor: float = 8.0,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        original_max_position_embeddings: int = 8192,
    ) -> None:
        super().__init__(dim, max_position_embeddings, base)
        self.factor = factor
        self.low_freq_factor, self.high_freq_factor = low_freq_factor, high_freq_factor
        self.old_context_len = original_max_position_embeddings

    def get_inv_freqs(self, device: torch.device | None = None) -> Tensor:
        """Frequencies [dim / 2], float32."""
        steps = torch.arange(0, self.dim, 2, dtype=torch.float, device=device)
        freqs = 1.0 / (self.base ** (steps / self.dim))
        wavelength = 2 * math.pi / freqs
        share = self.old_context_len / wavelength - self.low_freq_factor
        share = share / (self.high_freq_factor - self.low_freq_factor)
        medium = (1 - share) * freqs / self.factor + share * freqs
        scaled = torch.where(wavelength > self.old_context_len / self.low_freq_factor, freqs / self.factor, medium)
        return torch.where(wavelength < self.old_context_len / self.high_freq_factor, freqs, scaled)


class NeuronLlamaAttention(NeuronAttentionBase):
    """Llama's attention."""

    def __init__(self, config: InferenceConfig, tensor_model_parallel_group: Any = None) -> None:
        bias = getattr(config, "attention_bias", False)
        super().__init__(
            config=config,
            tensor_model_parallel_group=tensor_model_parallel_group,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
            rotary_emb=self.get_rope(config=config),
            num_cores_per_group=config.num_cores_per_group,
            qkv_bias=bias,
            o_bias=bias,
            rms_norm_eps=config.rms_norm_eps,
            attention_chunk_size=getattr(config, "attention_chunk_size", None),
            sliding_window=getattr(config, "sliding_window", None),
        )

    def get_rope(self, config: InferenceConfig) -> nn.Module:
        """The rotation that `rope_scaling` asks for.

        Raises:
            StandInRefused: a kind other than none and llama3.
        """
        sizes: dict[str, Any] = {
            "dim": getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
            "max_position_embeddings": config.max_position_embeddings,
            "base": config.rope_theta,
        }
        scaling = getattr(config, "rope_scaling", None)
        if scaling is None:
            return RotaryEmbedding(**sizes)
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind != "llama3":
            refuse(f"rope_scaling of type {kind!r} in NeuronLlamaAttention", "the stack borrows Hugging Face's module")
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return Llama3RotaryEmbedding(**sizes, **{name: scaling[name] for name in names})


class NeuronLlamaDecoderLayer(nn.Module):
    """norm, attention, norm, MLP, around a residual stream."""

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        if config.neuron_config.attn_cls != "NeuronLlamaAttention":
            refuse(f"NeuronConfig(attn_cls={config.neuron_config.attn_cls!r})")
        self.config, self.neuron_config, self.hidden_size = config, config.neuron_config, config.hidden_size
        self.self_attn = NeuronLlamaAttention(config=config)
        self.init_mlp(config)
        self.input_layernorm = get_rmsnorm_cls(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = get_rmsnorm_cls(config.hidden_size, eps=config.rms_norm_eps)

    def init_mlp(self, config: InferenceConfig) -> None:
        """Build the MLP."""
        ready = parallel_state.model_parallel_is_initialized()
        self.mlp = NeuronLlamaMLP(config, parallel_state.get_tensor_model_parallel_group() if ready else None)

    def get_mlp(self) -> nn.Module:
        """The MLP."""
        return self.mlp

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_value: Any = None,
        adapter_ids: Any = None,
        rotary_position_ids: Any = None,
        residual: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """(hidden, (K, V), cos, sin, None)."""
        attended = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_value=past_key_value,
            adapter_ids=adapter_ids,
            rmsnorm=None,
            rotary_position_ids=rotary_position_ids,
            residual=residual,
            **kwargs,
        )
        hidden_states = hidden_states + attended.hidden_states
        out, _ = self.get_mlp()(self.post_attention_layernorm(hidden_states), rmsnorm=None, adapter_ids=adapter_ids)
        return hidden_states + out, attended.present_key_value, attended.cos_cache, attended.sin_cache, None


class NeuronLlamaModel(NeuronBaseModel):
    """Llama's embedding, layers, norm and head."""

    def setup_attr_for_model(self, config: InferenceConfig) -> None:
        """Sizes."""
        served = config.neuron_config
        self.on_device_sampling = served.on_device_sampling_config is not None
        self.tp_degree, self.max_batch_size, self.buckets = served.tp_degree, served.max_batch_size, served.buckets
        self.hidden_size = config.hidden_size
        self.num_attention_heads, self.num_key_value_heads = config.num_attention_heads, config.num_key_value_heads
        self.sliding_window = getattr(config, "sliding_window", None)

    def init_model(self, config: InferenceConfig) -> None:
        """Layers; plain torch ones without a parallel state."""
        served = config.neuron_config
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        if parallel_state.model_parallel_is_initialized():
            self.embed_tokens: nn.Module = ParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                self.padding_idx,
                dtype=served.torch_dtype,
                shard_across_embedding=not served.vocab_parallel,
                sequence_dimension=self.sequence_dimension,
                pad=True,
                tensor_model_parallel_group=get_tp_group(config),
                use_spmd_rank=served.vocab_parallel,
            )
            self.lm_head: nn.Module = ColumnParallelLinear(
                config.hidden_size,
                config.vocab_size,
                gather_output=not self.on_device_sampling,
                dtype=served.torch_dtype,
                bias=False,
                pad=True,
                tensor_model_parallel_group=get_tp_group(config),
            )
        else:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.layers = nn.ModuleList(NeuronLlamaDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = get_rmsnorm_cls(config.hidden_size, eps=config.rms_norm_eps)
        self.attention_chunk_size = getattr(config, "attention_chunk_size", None)


class NeuronLlamaForCausalLM(NeuronBaseForCausalLM):
    """Llama as it is served."""

    _model_cls = NeuronLlamaModel

    @staticmethod
    def load_hf_model(model_path: str, **kwargs: Any) -> Any:
        """Hugging Face's Llama."""
        return LlamaForCausalLM.from_pretrained(model_path, **kwargs)

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict: dict[str, Any], config: InferenceConfig) -> dict[str, Any]:
        """Add the ranks; fuse q, k and v if asked."""
        served = config.neuron_config
        for layer in range(config.num_hidden_layers):
            state_dict[f"layers.{layer}.self_attn.rank_util.rank"] = torch.arange(served.tp_degree, dtype=torch.int32)
        if served.fused_qkv:
            state_dict = convert_state_dict_to_fused_qkv(state_dict, config)
        if served.vocab_parallel:
            state_dict["embed_tokens.rank_util.rank"] = torch.arange(served.local_ranks_size, dtype=torch.int32)
        state_dict["rank_util.rank"] = torch.arange(served.tp_degree, dtype=torch.int32)
        return state_dict

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict: dict[str, Any]) -> None:
        """The head is a copy of the embedding."""
        state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()

    @classmethod
    def get_config_cls(cls) -> type[LlamaInferenceConfig]:
        """Llama's configuration."""
        return LlamaInferenceConfig
