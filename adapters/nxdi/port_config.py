"""Builds a port's InferenceConfig from a HuggingFace folder, for a CPU run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from equiport.errors import EquiportError


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
        **overrides,
    }
    try:
        return source.get_neuron_config_cls()(**settings)
    except (TypeError, ValueError, AssertionError, AttributeError) as fault:
        raise EquiportError(
            f"NeuronConfig of {config_class.__name__} refuses the settings: {type(fault).__name__}: {fault}",
            field="neuron_config",
            remedy="Check the settings and the port's get_neuron_config_cls.",
        ) from fault


def inference_config(config_class: Any, neuron_config: Any, hf_model_path: str | Path) -> Any:
    """The port's config: the constructor with NxDI's load_pretrained_config, as integration tests of ports make it;
    where that lacks a field and the class has a from_pretrained of its own, that.

    Raises:
        EquiportError: no config.json, it is no JSON, or neither way finds the fields that the port wants.
    """
    folder = Path(hf_model_path)
    file = folder / "config.json"
    _check_json(file)
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    try:
        config = config_class(neuron_config, load_config=_with_classic_rope(load_pretrained_config(str(folder))))
    except Exception as fault:
        if not hasattr(config_class, "from_pretrained"):
            raise _explained(fault, file, config_class.__name__) from fault
        try:
            config = config_class.from_pretrained(str(folder), neuron_config=neuron_config)
        except Exception:
            raise _explained(fault, file, config_class.__name__) from fault
    # The stack loads weights from this path when it exists, whatever the model was made with.
    config._name_or_path = str(folder)
    return config


def _check_json(file: Path) -> None:
    if not file.is_file():
        raise EquiportError("no such file", where=file, remedy="Give a HuggingFace model folder with a config.json.")
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise EquiportError(f"is no JSON: {fault}", where=file, remedy="Download the file again.") from fault


def _with_classic_rope(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """transformers 5 keeps rope settings in `rope_parameters`; ports, written for 4.57, read the two former fields."""

    def load_config(config: Any) -> None:
        load(config)
        rope = config.__dict__.get("rope_parameters")
        if not isinstance(rope, Mapping) or "rope_theta" not in rope:
            return
        config.__dict__.setdefault("rope_theta", rope["rope_theta"])
        if "rope_scaling" not in config.__dict__:
            scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
            config.__dict__["rope_scaling"] = None if scaling.get("rope_type") in (None, "default") else scaling

    return load_config


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
