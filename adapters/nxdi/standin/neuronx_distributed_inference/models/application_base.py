"""A served model as the user holds it: its checkpoint, and its start on the CPU."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from neuronx_distributed._standin.missing import attribute_hook, refuse, refused_call
from neuronx_distributed.parallel_layers.parallel_state import initialize_model_parallel
from neuronx_distributed.trace.trace import get_sharded_checkpoint
from neuronx_distributed.utils.model_utils import init_on_device
from torch import nn

from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.modules.checkpoint import load_state_dict

__getattr__ = attribute_hook(__name__)

COMPILED_MODEL_FILE_NAME = "model.pt"


def normalize_path(path: str | os.PathLike[str]) -> str:
    """The path in its shortest form, with a slash at the end."""
    return os.path.join(os.path.normpath(path), "")


def is_compiled(model_path: str) -> bool:
    """Whether the folder (with its slash) holds a compiled model."""
    return os.path.isfile(model_path + COMPILED_MODEL_FILE_NAME)


class NeuronApplicationBase(nn.Module):
    """Loads a checkpoint through the port's own conversion. Compiling and the device need the real stack."""

    _STATE_DICT_MODEL_PREFIX = "model."
    _NEW_STATE_DICT_MODEL_PREFIX = ""
    _FUSED_PREFIX = ""

    def __init__(
        self, model_path: str, config: InferenceConfig | None = None, neuron_config: NeuronConfig | None = None
    ) -> None:
        super().__init__()
        model_path = normalize_path(model_path)
        if config is None:
            config = self.get_config_cls().load(model_path)
        if neuron_config is not None:
            config.neuron_config = neuron_config
        self.validate_config(config)
        self.config, self.neuron_config = config, config.neuron_config
        self.fused_spec_config = config.fused_spec_config
        self.on_device_sampling = self.neuron_config.on_device_sampling_config is not None
        self.model_path = model_path
        self.models: list[Any] = []
        self.traced_model = None
        self.is_compiled = is_compiled(model_path)
        self.is_loaded_to_neuron = False

    compile = refused_call("NeuronApplicationBase.compile", "it needs the compiler")  # type: ignore[assignment]
    load = refused_call("NeuronApplicationBase.load", "it needs a device")
    shard_weights = refused_call("NeuronApplicationBase.shard_weights", "it needs the compiler")
    save_quantized_state_dict = refused_call("NeuronApplicationBase.save_quantized_state_dict", "quantization")
    generate_quantized_state_dict = refused_call("NeuronApplicationBase.generate_quantized_state_dict", "quantization")

    def forward(self, **kwargs: Any) -> Any:
        """Hook: one call."""
        raise NotImplementedError("forward is not implemented")

    @classmethod
    def validate_config(cls, config: InferenceConfig) -> None:
        """Raises ValueError without a NeuronConfig."""
        if not hasattr(config, "neuron_config"):
            raise ValueError("Config must include a NeuronConfig")

    @classmethod
    def get_config_cls(cls) -> Any:
        """Hook: the class of the configuration."""
        raise NotImplementedError("get_config_cls is not implemented")

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        """The class of `neuron_config`."""
        return cls.get_config_cls().get_neuron_config_cls()

    def get_compiler_args(self) -> str | None:
        """Hook: compiler options; of no effect here."""
        return None

    @staticmethod
    def load_hf_model(model_path: str) -> Any:
        """Hook: the Hugging Face model of a path or name."""
        raise NotImplementedError("load_hf_model is not implemented")

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict: dict[str, Any], config: InferenceConfig) -> dict[str, Any]:
        """Hook: from the checkpoint's keys, less `model.`, to the port's."""
        return state_dict

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict: dict[str, Any]) -> None:
        """Hook: add the head of a checkpoint whose configuration ties it."""
        raise NotImplementedError("State-dict update not implemented")

    @classmethod
    def get_state_dict(cls, model_name_or_path: str, config: InferenceConfig) -> dict[str, Any]:
        """The checkpoint of a folder, a file or a hub name, converted by the port."""
        if os.path.isdir(model_name_or_path):
            found = load_state_dict(model_name_or_path)
        elif os.path.isfile(model_name_or_path):
            found = torch.load(model_name_or_path)
        else:
            with init_on_device(torch.device("cpu")):
                found = cls.load_hf_model(model_name_or_path).state_dict()
        old, new = cls._STATE_DICT_MODEL_PREFIX, cls._NEW_STATE_DICT_MODEL_PREFIX
        renamed: dict[str, Any] = {}
        for key, value in found.items():
            name = key.replace(old, new, 1) if key.startswith(old) else key
            if key.endswith(".weight_scale"):
                name = name.replace(".weight_scale", ".scale")
            renamed[name] = value
        converted = cls.convert_hf_to_neuron_state_dict(renamed, config)
        if getattr(config, "tie_word_embeddings", False):
            cls.update_state_dict_for_tied_weights(converted)
        if cls._FUSED_PREFIX:
            refuse(f"_FUSED_PREFIX={cls._FUSED_PREFIX!r}", "speculation")
        return converted

    def checkpoint_loader_fn(self, mmap: bool = False) -> dict[str, Any]:
        """The converted checkpoint, cast to the served dtype unless that is float32 or casting is off."""
        path = getattr(self.config, "_name_or_path", None)
        if path is None or not os.path.exists(path):
            path = self.model_path
        found = self.get_state_dict(path, self.config)
        dtype = self.neuron_config.torch_dtype
        if dtype == torch.float32 or self.neuron_config.cast_type != "config":
            return found
        for key, value in found.items():
            if not torch.is_floating_point(value) or value.dtype in (torch.float8_e4m3fn, dtype):
                continue
            if key.endswith("scale"):
                warnings.warn(f"Found {value.dtype} scales, skip converting to {dtype}", stacklevel=2)
                continue
            warnings.warn(f"Found {value.dtype} weights in checkpoint: {key}. Will convert to {dtype}", stacklevel=2)
            found[key] = value.to(dtype)
        return found

    def _start_groups(self) -> None:
        served = self.neuron_config
        if "WORLD_SIZE" in os.environ:
            assert int(os.environ["WORLD_SIZE"]) == served.world_size, (
                f"{os.environ['WORLD_SIZE']} processes run, NeuronConfig expects {served.world_size}"
            )
            torch.distributed.init_process_group("gloo")
        if not torch.distributed.is_initialized():
            if served.world_size != 1:
                raise RuntimeError("Please initialize parallel processing via 'torchrun'.")
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            os.environ["MASTER_PORT"] = os.environ.get("MASTER_PORT", "29500")
            torch.distributed.init_process_group(backend="gloo", world_size=1, rank=0)
        initialize_model_parallel(
            tensor_model_parallel_size=served.tp_degree,
            pipeline_model_parallel_size=served.pp_degree,
            expert_model_parallel_size=served.ep_degree,
            skip_collective_init=True,
        )

    def _build_and_load(self, model_cls: Any, config: InferenceConfig) -> nn.Module:
        model = model_cls(config)
        if self.neuron_config.torch_dtype == torch.bfloat16:
            model.bfloat16()
        weights = self.checkpoint_loader_fn()
        get_sharded_checkpoint(weights, model, torch.distributed.get_rank(), self.neuron_config.tp_degree)
        # As on the real stack: a weight that the checkpoint lacks stays random, without a word.
        model.load_state_dict(weights, strict=False)
        return model

    def to_cpu(self) -> None:
        """Start the process group (one rank, or the launcher's), build the model and load its weights.

        Raises:
            NotImplementedError: float16; bfloat16 on several ranks, which gloo cannot reduce.
            RuntimeError: several ranks without a launcher.
        """
        os.environ["NXD_CPU_MODE"] = "1"
        dtype = self.neuron_config.torch_dtype
        if dtype == torch.bfloat16 and self.neuron_config.tp_degree > 1:
            raise NotImplementedError("gloo does not reduce bfloat16: use float32 with several ranks")
        if dtype == torch.float16:
            raise NotImplementedError("float16 is not supported for CPU inference: use float32")
        self._start_groups()
        if self.neuron_config.is_continuous_batching:
            warnings.warn(f"continuous batching on the CPU holds {len(self.models)} copies of the model", stacklevel=2)
            for wrapper in self.models:
                wrapper.model = self._build_and_load(wrapper.model_cls, wrapper.config)
        else:
            # One model serves both stages, with the configuration as it was given.
            shared = self._build_and_load(self.models[0].model_cls, self.config)
            for wrapper in self.models:
                wrapper.model = shared
        self.eval()

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def reset(self) -> None:
        """Hook: start over with a new batch."""
