"""Rotary angles and rotation in the interleaved ("polar") layout: the pair of a feature is its neighbour."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from neuronx_distributed._standin.missing import attribute_hook

__getattr__ = attribute_hook(__name__)

ROPE_DEFAULTS = {
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}


def apply_scaling(freqs: Tensor, **kwargs: Any) -> Tensor:
    """Llama-3 frequency scaling of `freqs` [n]: long waves are stretched by `factor`, medium ones in part."""
    settings = {**ROPE_DEFAULTS, **kwargs}
    factor, low, high = settings["factor"], settings["low_freq_factor"], settings["high_freq_factor"]
    context = settings["original_max_position_embeddings"]
    wavelength = 2 * math.pi / freqs
    share = (context / wavelength - low) / (high - low)
    medium = (1 - share) * freqs / factor + share * freqs
    scaled = torch.where(wavelength > context / low, freqs / factor, medium)
    return torch.where(wavelength < context / high, freqs, scaled)


def precompute_freqs_cis(
    dim: int, end: int, theta: float = 10000.0, use_scaled: bool = False, device: Any = None, **kwargs: Any
) -> Tensor:
    """Angles [end, dim / 2], float32: position times frequency (not complex numbers, in spite of the name)."""
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2, device=device)[: dim // 2].float() / dim))
    if use_scaled:
        freqs = apply_scaling(freqs, **kwargs)
    return torch.outer(torch.arange(end, device=freqs.device, dtype=torch.float32), freqs)


def apply_rotary_polar_compatible(query: Tensor, key: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate neighbouring feature pairs of `query` and `key` [B, S, H, D] by `freqs_cis` [B, S, D / 2].

    Raises:
        ValueError: the angles are not float32.
    """
    if freqs_cis.dtype != torch.float32:
        raise ValueError(f"the angles must be float32, got {freqs_cis.dtype}")
    cos, sin = freqs_cis.cos().unsqueeze(2), freqs_cis.sin().unsqueeze(2)

    def turn(x: Tensor) -> Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return pairs.flatten(-2).type_as(x)

    return turn(query), turn(key)
