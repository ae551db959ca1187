"""From a Hugging Face configuration to the attributes of an `InferenceConfig`.

The real stack pins transformers 4.57. Under a later one its view is restored: `rope_theta` and `rope_scaling` beside
each other, and the base attributes that were dropped since.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from neuronx_distributed._standin.missing import attribute_hook
from transformers import AutoConfig, PretrainedConfig

from neuronx_distributed_inference.models.config import InferenceConfig, to_torch_dtype

__getattr__ = attribute_hook(__name__)

# Attributes that every configuration of transformers 4.57 has.
_BASE_ATTRIBUTES: dict[str, Any] = {
    "add_cross_attention": False,
    "bos_token_id": None,
    "chunk_size_feed_forward": 0,
    "eos_token_id": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "pad_token_id": None,
    "return_dict": True,
    "sep_token_id": None,
    "tie_word_embeddings": True,
    "torchscript": False,
    "use_bfloat16": False,
}


def _with_rope_of_4_57(values: dict[str, Any]) -> None:
    """Add `rope_theta`, `rope_scaling` (and a second base) to `values`, in place, from `rope_parameters`."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    if "full_attention" in rope or "sliding_attention" in rope:  # one set for each kind of layer
        local = (rope.get("sliding_attention") or {}).get("rope_theta")
        if local is not None:
            values.setdefault("rope_local_base_freq", local)
        rope = rope.get("full_attention") or {}
    if "rope_theta" in rope:
        values.setdefault("rope_theta", rope["rope_theta"])
    if "partial_rotary_factor" in rope:
        values.setdefault("partial_rotary_factor", rope["partial_rotary_factor"])
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    values.setdefault("rope_scaling", None if scaling.get("rope_type", "default") == "default" else scaling)


def _attributes(config: PretrainedConfig) -> dict[str, Any]:
    values = config.to_dict()
    if "rope_parameters" in values:
        _with_rope_of_4_57(values)
        for key, value in _BASE_ATTRIBUTES.items():
            values.setdefault(key, value)
    if config.transformers_version is not None:
        values["transformers_version"] = config.transformers_version
    for key, value in values.items():
        if isinstance(getattr(config, key, None), PretrainedConfig):
            values[key] = SimpleNamespace(**value)
            if config.transformers_version is not None:
                values[key].transformers_version = config.transformers_version
    return values


def load_pretrained_config(
    model_path_or_name: str | os.PathLike[str] | None = None, hf_config: PretrainedConfig | None = None
) -> Callable[[InferenceConfig], None]:
    """A `load_config` hook. The checkpoint's dtype becomes the served one, unless that was given.

    The hook raises:
        ValueError: both or neither of the arguments were given.
    """

    def load_config(self: InferenceConfig) -> None:
        if (model_path_or_name is None) == (hf_config is None):
            raise ValueError('Please provide only one of "model_path_or_name" or "hf_config"')
        config: Any = hf_config if model_path_or_name is None else AutoConfig.from_pretrained(model_path_or_name)
        values = _attributes(config)
        names = ("dtype", "torch_dtype")
        dtype = next((values[name] for name in names if values.get(name) is not None), None)
        if dtype is not None:
            for name in names:
                values.pop(name, None)
            served = self.neuron_config
            if served is not None and not served.overrides_torch_dtype:
                served.torch_dtype = dtype if isinstance(dtype, torch.dtype) else to_torch_dtype(dtype)
        vars(self).update(values)
        if hasattr(config, "attribute_map"):
            self.attribute_map = config.attribute_map

    return load_config
