"""Padding of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from neuronx_distributed._standin.missing import attribute_hook
from torch import Tensor

__getattr__ = attribute_hook(__name__)


def pad_with_first_batchline(unpadded_tensor: Tensor, target_shape: Sequence[int]) -> Tensor:
    """Repeat row 0 up to `target_shape[0]` rows."""
    more = target_shape[0] - unpadded_tensor.shape[0]
    return torch.cat([unpadded_tensor, unpadded_tensor[:1].expand(more, *unpadded_tensor.shape[1:])])
