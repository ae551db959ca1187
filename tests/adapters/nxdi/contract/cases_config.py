"""Configurations: flags and what follows from them, attributes, files."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from registry import case, outcome
from world import described, served


def _plain(config: Any) -> dict[str, Any]:
    from neuronx_distributed_inference.models.config import to_dict

    return to_dict(config)


FLAGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "sizes": {"batch_size": 3, "seq_len": 64, "max_context_length": 32, "torch_dtype": "float32"},
    "lengths": {"seq_len": 64, "max_length": 48, "max_context_length": 40, "n_positions": 50, "n_active_tokens": 7},
    "batches": {"batch_size": 4, "ctx_batch_size": 1, "max_batch_size": 6, "is_continuous_batching": True},
    "ranks": {"tp_degree": 8, "local_ranks_size": 4},
    "dtypes": {"torch_dtype": torch.bfloat16, "attention_dtype": "float32", "cast_type": "as-declared"},
    "sampling": {"on_device_sampling_config": {"top_k": 5, "do_sample": True}, "output_logits": True},
    "buckets": {"enable_bucketing": True, "context_encoding_buckets": [64, 32], "seq_len": 64},
    "long": {"seq_len": 40000, "logical_nc_config": 2},
    "kernels off": {"attn_kernel_enabled": False, "mlp_kernel_enabled": False, "qkv_kernel_enabled": False},
    "unknown": {"no_such_flag": 3},
    "fused": {"fused_qkv": True, "vocab_parallel": True, "rpl_reduce_dtype": "float32", "qk_layernorm": True},
}


@case
def flags() -> dict[str, Any]:
    from neuronx_distributed_inference.models.config import NeuronConfig

    return {name: _plain(NeuronConfig(**{**given})) for name, given in FLAGS.items()}


@case
def flags_that_exclude_each_other() -> dict[str, Any]:
    from neuronx_distributed_inference.models.config import NeuronConfig

    bad: dict[str, dict[str, Any]] = {
        "context longer than the cache": {"seq_len": 8, "max_context_length": 9},
        "bucket too long": {"seq_len": 8, "context_encoding_buckets": [9]},
        "decode bucket too long": {"seq_len": 8, "token_generation_buckets": [9]},
        "dtype": {"torch_dtype": "int7"},
        "cast": {"cast_type": "sometimes"},
        "attention dtype": {"torch_dtype": "float32", "attention_dtype": "bfloat16"},
    }
    return {name: outcome(lambda given=given: NeuronConfig(**given)) for name, given in bad.items()}


@case
def sampling_data() -> dict[str, Any]:
    from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig

    return {"default": _plain(OnDeviceSamplingConfig()), "given": _plain(OnDeviceSamplingConfig(top_k=9, dynamic=True))}


@case
def attributes() -> dict[str, Any]:
    from neuronx_distributed_inference.models.config import InferenceConfig

    class Mapped(InferenceConfig):
        attribute_map = {"n_embd": "hidden_size"}

        def get_required_attributes(self) -> list[str]:
            return ["n_embd", "vocab_size"]

    class Derived(InferenceConfig):
        def load_config(self) -> None:
            self.hidden_size, self.heads = 8, 2

        def add_derived_config(self) -> None:
            self.num_cores_per_group = 1
            self.head_dim = self.hidden_size // self.heads

    def load(config: Any) -> None:
        config.hidden_size, config.vocab_size = 4, 5

    mapped = Mapped(served(), load_config=load)
    mapped.n_embd = 12
    derived = Derived(served(), hidden_size=16)
    return {
        "both names": [mapped.n_embd, mapped.hidden_size, "n_embd" in vars(mapped)],
        "required": outcome(lambda: Mapped(served(), hidden_size=3)),
        "required met": outcome(lambda: Mapped(served(), hidden_size=3, vocab_size=3)),
        "a keyword wins": [derived.hidden_size, derived.head_dim],
        "metadata": InferenceConfig(served(), metadata={"a": 1}).metadata,
        "default": [InferenceConfig(served()).num_cores_per_group, InferenceConfig(served()).fused_spec_config],
        "text": described(text_config="t").get_text_config(),
        "itself": described().get_text_config().vocab_size,
        "chunk of None": outcome(lambda: described(attention_chunk_size=None)),
        "chunk and left padding": outcome(lambda: described(served(padding_side="left"), attention_chunk_size=4)),
        "no from_pretrained": outcome(lambda: InferenceConfig.from_pretrained),
        "neuron class": InferenceConfig.get_neuron_config_cls().__name__,
    }


@case
def files() -> dict[str, Any]:
    from neuronx_distributed_inference.models.config import InferenceConfig

    with tempfile.TemporaryDirectory() as folder:
        written = described(
            served(torch_dtype=torch.bfloat16, on_device_sampling_config={"top_k": 3}), a_list=[1, {"b": 2}]
        )
        written.save(f"{folder}/deep")
        read = InferenceConfig.load(f"{folder}/deep", vocab_size=99)
    return {
        "json": written.to_json_string(),
        "read": read.to_json_string(),
        "dtype": str(read.neuron_config.torch_dtype),
        "sampling": type(read.neuron_config.on_device_sampling_config).__name__,
        "classes": _plain({"c": [InferenceConfig], "d": torch.float16}),
    }


@case
def from_hugging_face() -> dict[str, Any]:
    """Under transformers 4.57 the attributes are the configuration's own."""
    import transformers
    from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
    kinds: dict[str, Any] = {
        "llama": transformers.LlamaConfig(**sizes, rope_theta=5e5),
        "llama3": transformers.LlamaConfig(**sizes, rope_theta=5e5, rope_scaling=llama3),
        "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61),
        "gemma3": transformers.Gemma3TextConfig(**sizes, rope_theta=1e6, rope_local_base_freq=1e4),
        "phi": transformers.PhiConfig(**sizes, partial_rotary_factor=0.5),
        "llava": transformers.LlavaConfig(),
    }
    out: dict[str, Any] = {}
    for name, config in kinds.items():
        found = InferenceConfig(served(), load_config=load_pretrained_config(hf_config=config))
        values = {key: value for key, value in vars(found).items() if key not in ("neuron_config", "rope_parameters")}
        out[name] = {key: str(value) for key, value in values.items()}
        names = ("hidden_size", "num_hidden_layers", "rope_theta", "rope_scaling", "rope_local_base_freq")
        names += ("output_attentions", "pad_token_id", "partial_rotary_factor", "tie_word_embeddings")
        out[f"{name} read"] = [getattr(found, key, "absent") for key in names]
    with tempfile.TemporaryDirectory() as folder:
        kinds["llama"].save_pretrained(folder)
        from_folder = InferenceConfig(served(), load_config=load_pretrained_config(folder))
        out["folder"] = [from_folder.hidden_size, from_folder.rope_theta, from_folder.model_type]
    half = transformers.LlamaConfig(**sizes, dtype="float16")
    given, left = served(), NeuronConfig()
    InferenceConfig(given, load_config=load_pretrained_config(hf_config=half))
    InferenceConfig(left, load_config=load_pretrained_config(hf_config=half))
    out["dtype"] = [str(given.torch_dtype), str(left.torch_dtype)]
    out["neither"] = outcome(lambda: InferenceConfig(served(), load_config=load_pretrained_config()))
    out["both"] = outcome(lambda: InferenceConfig(served(), load_config=load_pretrained_config("x", half)))
    return out


@case
def buckets() -> dict[str, Any]:
    from neuronx_distributed_inference.modules import autobucketing

    out: dict[str, Any] = {
        f"{low} {high}": autobucketing.generate_buckets(low, high)
        for low, high in ((128, 128), (128, 4096), (64, 1000))
    }
    for name, flags in {
        "off": {"seq_len": 512},
        "on": {"seq_len": 512, "max_context_length": 256, "enable_bucketing": True},
        "given": {
            "seq_len": 512,
            "enable_bucketing": True,
            "context_encoding_buckets": [64],
            "token_generation_buckets": [32],
        },
    }.items():
        config = described(served(**flags))
        out[name] = [autobucketing.generate_buckets_for_cte(config), autobucketing.generate_buckets_for_tkg(config)]
    return out
