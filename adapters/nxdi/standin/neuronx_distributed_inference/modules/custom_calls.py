"""Operations that are fused calls on the device."""

from __future__ import annotations

import torch
from neuronx_distributed._standin.missing import attribute_hook
from torch import Tensor, nn

__getattr__ = attribute_hook(__name__)


class CustomRMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, all in float32, returned in the input's dtype.

    Without `hidden_size` the weight (ones) is made by the first call, at that input's width: a second input of
    another width then fails.
    """

    def __init__(self, hidden_size: int | None = None, eps: float = 1e-6) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.weight = nn.Parameter(torch.ones(hidden_size)) if hidden_size is not None else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        x = hidden_states.to(torch.float32)
        if self.weight is None:
            self.weight = nn.Parameter(torch.ones(x.shape[-1], dtype=x.dtype, device=x.device))
        mean_square = x.pow(2).mean(dim=-1, keepdim=True)
        return (x * torch.rsqrt(mean_square + self.variance_epsilon) * self.weight).to(hidden_states.dtype)


def neuron_cumsum(input: Tensor) -> Tensor:
    """Running sum over the last dimension of [rows, n]."""
    return torch.cumsum(input, dim=1)
