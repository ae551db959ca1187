"""Model construction helpers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from neuronx_distributed._standin.missing import attribute_hook

__getattr__ = attribute_hook(__name__)


@contextmanager
def init_on_device(
    device: torch.device, include_buffers: bool = False, force_custom_init_on_device: bool = False
) -> Iterator[None]:
    """Parameters made inside are made on `device` (`cpu` or `meta`)."""
    with torch.device(device):
        yield


def get_platform_lnc() -> int:
    """Logical cores per core: 1, as on the smallest platform."""
    return 1
