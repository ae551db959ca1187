"""Builds a port's InferenceConfig from a HuggingFace folder, for a CPU run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from equiport.errors import EquiportError

from .classic_rope import classic_folder, with_classic_rope
from .old_names import note


def cpu_neuron_config(
    config_class: Any,
    causal_class: Any | None,
    *,
    dtype: torch.dtype,
    batch_size: int,
    seq_len: int,
    tp_degree: int,
    overrides: Mapping[str, Any],
) -> Any:
    """The port's own NeuronConfig subclass: several ports' decoder layers depend on what it sets (attn_cls among them).

    One model serves prefill and decode in CPU mode, so max_context_length is seq_len: with another value the masks of
    the two stages do not have the same width.
    """
    source = config_class if hasattr(config_class, "get_neuron_config_cls") else causal_class
    if source is None:
        raise EquiportError(
            f"{config_class.__name__} has no get_neuron_config_cls", remedy="Derive it from InferenceConfig."
        )
    settings = {
        "tp_degree": tp_degree,
        "batch_size": batch_size,
        "seq_len": seq_len,
        "max_context_length": seq_len,
        "torch_dtype": dtype,
        "on_cpu": True,
        "padding_side": "right",
        # Some ports sample on the device by default; what is compared here is the logits.
        "on_device_sampling_config": None,
        **overrides,
    }
    try:
        made_by = source.get_neuron_config_cls()
        experts = _expert_settings(config_class, made_by)
        made = (experts or made_by)(**settings)
    except (TypeError, ValueError, AssertionError, AttributeError) as fault:
        raise EquiportError(
            f"NeuronConfig of {config_class.__name__} refuses the settings: {type(fault).__name__}: {fault}",
            field="neuron_config",
            remedy="Check the settings and the port's get_neuron_config_cls.",
        ) from fault
    if experts is not None:
        note(made, f"{config_class.__name__} names no NeuronConfig class and imports {experts.__name__}: made by that")
    if settings["on_device_sampling_config"] is None and made.on_device_sampling_config is not None:
        # the port's own class puts sampling on the device in whatever it is given
        made.on_device_sampling_config = None
        note(made, f"{type(made).__name__} samples on the device by itself: switched off, logits are compared")
    return made


def _expert_settings(config_class: Any, made_by: Any) -> Any | None:
    """The stack's MoENeuronConfig, for a port that imports it and leaves the choice to whoever makes the settings."""
    if made_by.__name__ != "NeuronConfig" or "get_neuron_config_cls" in vars(config_class):
        return None
    offered = getattr(sys.modules.get(config_class.__module__), "MoENeuronConfig", None)
    return offered if isinstance(offered, type) and issubclass(offered, made_by) else None


def inference_config(config_class: Any, neuron_config: Any, hf_model_path: str | Path) -> Any:
    """The port's config, the way ports make it themselves: by the class's own `from_pretrained` where it has one, else
    (or where that fails, or does not take the NeuronConfig) by its constructor with NxDI's `load_pretrained_config`.

    Raises:
        EquiportError: no config.json, it is no JSON, or neither way finds the fields that the port wants.
    """
    folder = Path(hf_model_path)
    file = folder / "config.json"
    _check_json(file)
    config, first_fault = _by_from_pretrained(config_class, neuron_config, folder)
    if config is None:
        from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

        try:
            config = config_class(neuron_config, load_config=with_classic_rope(load_pretrained_config(str(folder))))
        except Exception as fault:
            raise _explained(first_fault or fault, file, config_class.__name__) from fault
    # The stack loads weights from this path when it exists, whatever the model was made with.
    config._name_or_path = str(folder)
    return config


def _by_from_pretrained(config_class: Any, neuron_config: Any, folder: Path) -> tuple[Any, Exception | None]:
    if not hasattr(config_class, "from_pretrained"):
        return None, None
    try:
        with classic_folder(folder) as readable:
            config = config_class.from_pretrained(str(readable), neuron_config=neuron_config)
    except Exception as fault:
        return None, fault
    settings = vars(getattr(config, "neuron_config", None) or object)
    kept = ("batch_size", "seq_len", "max_context_length", "torch_dtype", "on_cpu", "tp_degree")
    if any(settings.get(name) != getattr(neuron_config, name) for name in kept):
        return None, None
    return config, None


def hf_value(hf_model_path: str | Path, name: str) -> tuple[bool, Any]:
    """(whether it has one, the value) of an attribute of the folder's config as transformers loads it, defaults filled
    in: what NxDI's `load_pretrained_config` would have put into a port's config.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(hf_model_path))
    except Exception:  # an architecture that transformers does not know: then nothing can be supplied
        return False, None
    return hasattr(config, name), getattr(config, name, None)


def _check_json(file: Path) -> None:
    if not file.is_file():
        raise EquiportError("no such file", where=file, remedy="Give a HuggingFace model folder with a config.json.")
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise EquiportError(f"is no JSON: {fault}", where=file, remedy="Download the file again.") from fault


def _explained(fault: Exception, file: Path, class_name: str) -> EquiportError:
    if isinstance(fault, EquiportError):
        return fault
    text = str(fault)
    lacking = re.search(r"Config must define (\[.*\])", text) or re.search(r"has no attribute '(\w+)'", text)
    if lacking is None and isinstance(fault, KeyError):
        lacking = re.match(r"'(\w+)'", text)
    if lacking is not None:
        names = lacking.group(1).strip("[]").replace("'", "")
        return EquiportError(
            f"{class_name} needs {names}, which the config lacks", where=file, field=names, remedy="Add the field."
        )
    return EquiportError(
        f"{class_name} cannot be made from it: {type(fault).__name__}: {text}",
        where=file,
        remedy="Check that the config belongs to this port.",
    )
