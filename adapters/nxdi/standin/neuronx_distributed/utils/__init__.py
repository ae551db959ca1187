"""Where the process runs."""

import os

import torch

from neuronx_distributed._standin.missing import attribute_hook
from neuronx_distributed.utils.utils import hardware

__all__ = ["cpu_mode", "get_device", "hardware", "mark_step", "master_print"]
__getattr__ = attribute_hook(__name__)


def cpu_mode() -> bool:
    """True when NXD_CPU_MODE holds a positive number (`to_cpu` sets it); ports choose their norm class by it."""
    return int(os.environ.get("NXD_CPU_MODE", "0")) > 0


def get_device() -> torch.device:
    """The CPU: the stand-in has no other device."""
    return torch.device("cpu")


def mark_step() -> None:
    """A step boundary on a device; eager CPU execution has none."""


def master_print(msg: object) -> None:
    """Print on rank 0."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(msg)
