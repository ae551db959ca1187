"""What a model is (`InferenceConfig`) and how it is served (`NeuronConfig`)."""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from neuronx_distributed._standin.missing import attribute_hook, refuse
from neuronx_distributed.modules.moe.moe_configs import BlockwiseMatmulConfig, RouterConfig

from neuronx_distributed_inference.models._flags import DEFAULTS, derive, refuse_unserved

__getattr__ = attribute_hook(__name__)

CONFIG_FILE = "neuron_config.json"
# Widths of one rank's piece of an expert that kernels ask for.
SHARD_ON_INTERMEDIATE_DIMENSION_PER_TP = 256
MOE_TKG_MK_INTERMEDIATE_PER_TP = 128
_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


class IncompatibleConfigError(ValueError):
    """Two flags that exclude each other."""


def to_torch_dtype(dtype_str: str) -> torch.dtype:
    """The dtype of that name. Raises AssertionError for an unknown one."""
    assert dtype_str in _DTYPES, f"Unsupported dtype: {dtype_str}"
    return getattr(torch, dtype_str)


def to_dict(obj: Any) -> Any:
    """`obj` as JSON-able values: attributes as dicts, classes by module and name, dtypes by name."""
    if type(obj) is dict:
        return {key: to_dict(value) for key, value in obj.items()}
    if type(obj) is list:
        return [to_dict(value) for value in obj]
    if inspect.isclass(obj):
        return {"__module__": obj.__module__, "__name__": obj.__name__}
    if hasattr(obj, "__dict__"):
        return to_dict(dict(vars(obj)))
    return str(obj).removeprefix("torch.") if type(obj) is torch.dtype else obj


class OnDeviceSamplingConfig:
    """How a device samples; data alone (a model that is built with it on is greedy or refused)."""

    def __init__(self, **kwargs: Any) -> None:
        defaults: dict[str, Any] = {
            "do_sample": False,
            "top_k": 1,
            "top_p": 1.0,
            "temperature": 1.0,
            "dynamic": False,
            "deterministic": False,
            "global_topk": 256,
            "on_device_sampling_config": True,
            "top_k_kernel_enabled": False,
            "sampling_dp_degree": 1,
        }
        for name, value in defaults.items():
            setattr(self, name, kwargs.get(name, value))


class NeuronConfig:
    """How a model is served: sizes, dtypes and flags. A flag that needs the device or the real stack is refused.

    An unknown keyword is passed over with a warning, as on the real stack.

    Raises:
        StandInRefused: a flag that the stand-in does not serve has another value than its default.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.overrides_torch_dtype = kwargs.pop("overrides_torch_dtype", True) if "torch_dtype" in kwargs else False
        values = {name: kwargs.pop(name, default) for name, default in DEFAULTS.items()}
        if isinstance(values["on_device_sampling_config"], dict):
            values["on_device_sampling_config"] = OnDeviceSamplingConfig(**values["on_device_sampling_config"])
        for name in ("torch_dtype", "rpl_reduce_dtype", "attention_dtype"):
            if isinstance(values[name], str):
                values[name] = to_torch_dtype(values[name])
        refuse_unserved(values)
        derive(values)
        vars(self).update(values)
        if kwargs:
            logging.warning(f"NeuronConfig init: Unexpected keyword arguments: {kwargs}")

    def __getattr__(self, name: str) -> Any:
        # Only what is not set comes here.
        if name == "logical_neuron_cores":
            return self.logical_nc_config
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def is_mlp_quantized(self) -> bool:
        """Always False: quantization is refused."""
        return False


class MoENeuronConfig(NeuronConfig):
    """How a mixture of experts is served. Affinities of the chosen experts are normalized unless it is disabled.

    Raises:
        StandInRefused: expert parallelism, hybrid sharding, shared experts in sequence parallel.
    """

    def __init__(self, capacity_factor: float | None = None, glu_mlp: bool = True, **kwargs: Any) -> None:
        self.capacity_factor = None if capacity_factor is None else float(capacity_factor)
        self.glu_mlp = glu_mlp
        defaults: dict[str, Any] = {
            "glu_type": "glu",
            "hidden_act_scaling_factor": 1.0,
            "hidden_act_bias": 0.0,
            "gate_clamp_upper_limit": None,
            "gate_clamp_lower_limit": None,
            "up_clamp_upper_limit": None,
            "up_clamp_lower_limit": None,
            "use_index_calc_kernel": False,
            "moe_mask_padded_tokens": False,
            "early_expert_affinity_modulation": False,
            "fused_shared_experts": False,
            "shared_experts_sequence_parallel_enabled": False,
            "return_expert_index": False,
            "return_router_logits": False,
            "hybrid_sharding_config": None,
            "moe_tp_degree": 1,
            "moe_ep_degree": 1,
            "transpose_shared_experts_weights": False,
        }
        for name, default in defaults.items():
            setattr(self, name, kwargs.pop(name, default))
        if self.hybrid_sharding_config is not None or self.moe_ep_degree > 1:
            refuse("MoENeuronConfig(hybrid_sharding_config or moe_ep_degree)", "expert parallelism")
        if self.shared_experts_sequence_parallel_enabled:
            refuse("MoENeuronConfig(shared_experts_sequence_parallel_enabled=True)", "sequence parallelism")
        self.normalize_top_k_affinities = not kwargs.pop("disable_normalize_top_k_affinities", False)
        blocks, router = kwargs.pop("blockwise_matmul_config", {}), kwargs.pop("router_config", None)
        self.blockwise_matmul_config = BlockwiseMatmulConfig.from_kwargs(**blocks) if type(blocks) is dict else blocks
        # A RouterConfig that is given as such is passed over, as on the stack: only a dict or the loose keywords count.
        self.router_config = RouterConfig(**router) if type(router) is dict else RouterConfig.from_kwargs(**kwargs)
        super().__init__(**kwargs)


class InferenceConfig:
    """What a model is. Attributes come from `load_config`, then from keywords; `attribute_map` renames both ways."""

    attribute_map: dict[str, str] = {}

    def __init__(
        self,
        neuron_config: NeuronConfig,
        fused_spec_config: Any = None,
        load_config: Callable[[InferenceConfig], None] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if fused_spec_config is not None:
            refuse("fused_spec_config", "speculation")
        self.neuron_config = neuron_config
        self.fused_spec_config = fused_spec_config
        if load_config is None:
            self.load_config()
        else:
            load_config(self)
        self.metadata = metadata
        for key, value in kwargs.items():
            setattr(self, key, value)
        self.add_derived_config()
        self.validate_config()

    def __setattr__(self, key: str, value: Any) -> None:
        names = super().__getattribute__("attribute_map")
        super().__setattr__(names.get(key, key), value)

    def __getattribute__(self, key: str) -> Any:
        read = super().__getattribute__
        return read(key if key == "attribute_map" else read("attribute_map").get(key, key))

    def load_config(self) -> None:
        """Hook: set the attributes, when no `load_config` is given."""

    def add_derived_config(self) -> None:
        """Hook: set what follows from the attributes."""
        self.num_cores_per_group = 1

    def get_required_attributes(self) -> list[str]:
        """Hook: the attributes without which the configuration is invalid."""
        return []

    def validate_config(self) -> None:
        """Raises AssertionError when a required attribute is absent."""
        absent = [name for name in self.get_required_attributes() if not hasattr(self, name)]
        assert not absent, f"Config must define {absent}"
        chunk = getattr(self, "attention_chunk_size", self.neuron_config.seq_len)
        if chunk < self.neuron_config.seq_len and self.neuron_config.padding_side != "right":
            raise ValueError("chunked attention needs padding_side='right'")

    def get_text_config(self) -> Any:
        """The language model's part of a multimodal configuration, or the whole."""
        text = getattr(self, "text_config", None)
        return self if text is None else text

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        """Hook: the class of `neuron_config`."""
        return NeuronConfig

    def to_json_string(self) -> str:
        """Every attribute, `neuron_config` too, sorted."""
        return json.dumps(to_dict(self), indent=2, sort_keys=True)

    def to_json_file(self, json_file: str | os.PathLike[str]) -> None:
        """Write `to_json_string`."""
        with open(json_file, "w", encoding="utf-8") as stream:
            stream.write(self.to_json_string() + "\n")

    def save(self, model_path: str | os.PathLike[str]) -> None:
        """Write neuron_config.json into the folder, which is made if it is absent."""
        os.makedirs(model_path, exist_ok=True)
        self.to_json_file(os.path.join(model_path, CONFIG_FILE))

    @classmethod
    def load(cls, model_path: str | os.PathLike[str], **kwargs: Any) -> InferenceConfig:
        """Read neuron_config.json from the folder; keywords win over it."""
        return cls.from_json_file(os.path.join(model_path, CONFIG_FILE), **kwargs)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str], **kwargs: Any) -> InferenceConfig:
        """Read a file that `to_json_file` wrote; keywords win over it."""
        with open(json_file, encoding="utf-8") as stream:
            return cls.from_json_string(stream.read(), **kwargs)

    @classmethod
    def from_json_string(cls, json_string: str, **kwargs: Any) -> InferenceConfig:
        """Rebuild from `to_json_string`; keywords win over it."""
        values = {**json.loads(json_string), **kwargs}
        if isinstance(values.get("neuron_config"), dict):
            values["neuron_config"] = cls.get_neuron_config_cls()(**values["neuron_config"])
        return cls(**values)
