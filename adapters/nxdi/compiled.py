"""A compiled folder: what it was compiled with, by the stack's public API; loading it needs a Neuron device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from equiport.errors import EquiportError
from equiport.stacks.contract import NotOffered, StackStatus, Tier

from .port_module import import_port, port_class

SETTINGS_FILE = "neuron_config.json"


def split_reference(reference: str, flag: str) -> tuple[Path, str]:
    """`FILE:CLASS` in two.

    Raises:
        EquiportError: it is not of that form.
    """
    file, _, name = reference.rpartition(":")
    if not file or not name.isidentifier():
        raise EquiportError(f"{reference!r} is not FILE:CLASS", where=flag, remedy="For example port.py:NeuronXModel.")
    return Path(file), name


def rebuild_config(compiled_folder: Path, config_class_of: str) -> Any:
    """The port's InferenceConfig, NeuronConfig included, from the folder's neuron_config.json (`InferenceConfig.load`).

    Raises:
        EquiportError: no such file, no JSON, or the config class does not take what it holds.
    """
    file = compiled_folder / SETTINGS_FILE
    if not file.is_file():
        raise EquiportError("no such file", where=file, remedy="Give the folder that model.compile() wrote.")
    modeling_file, name = split_reference(config_class_of, "--config-class")
    config_class = port_class(import_port(modeling_file), name)
    try:
        return config_class.load(str(compiled_folder))
    except Exception as fault:
        raise EquiportError(
            f"{name} cannot be rebuilt from it: {type(fault).__name__}: {fault}",
            where=file,
            remedy="Use the port and the stack's version that it was compiled with.",
        ) from fault


def load_compiled(compiled_folder: Path, model_class_of: str, config: Any, status: StackStatus) -> Any:
    """The compiled model, on the device.

    Raises:
        NotOffered: there is no device here.
    """
    if status.tier is not Tier.DEVICE:
        raise NotOffered(
            f"a compiled model needs a Neuron device, here the tier is {status.tier.value} ({status.why})",
            where=compiled_folder,
            remedy="Run where the device is.",
        )
    # Left over from a CPU-mode stage, it would keep the model off the device.
    os.environ.pop("NXD_CPU_MODE", None)
    modeling_file, name = split_reference(model_class_of, "--model-class")
    model = port_class(import_port(modeling_file), name)(str(compiled_folder), config)
    model.load(str(compiled_folder))
    return model
