"""DeepSeek's rotation: adjacent pairs, plain or stretched as YaRN does."""

from __future__ import annotations

import math
from typing import Any

import torch
from neuronx_distributed._standin.missing import attribute_hook
from torch import Tensor, nn

__getattr__ = attribute_hook(__name__)


def yarn_find_correction_dim(
    num_rotations: float, dim: int, base: float = 10000, max_position_embeddings: int = 2048
) -> float:
    """The place in the head whose wave turns `num_rotations` times over the context."""
    return dim * math.log(max_position_embeddings / (num_rotations * 2 * math.pi)) / (2 * math.log(base))


def yarn_find_correction_range(
    low_rot: float, high_rot: float, dim: int, base: float = 10000, max_position_embeddings: int = 2048
) -> tuple[int, int]:
    """First and last place between the two numbers of turns, within the head."""
    first, last = (yarn_find_correction_dim(turns, dim, base, max_position_embeddings) for turns in (low_rot, high_rot))
    return max(math.floor(first), 0), min(math.ceil(last), dim - 1)


def yarn_get_mscale(scale: float = 1, mscale: float = 1) -> float:
    """0.1 · mscale · ln(scale) + 1, and 1 for a context that is not stretched."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def yarn_linear_ramp_mask(min: float, max: float, dim: int) -> Tensor:
    """[dim] float32: 0 up to `min`, 1 from `max` on, linear between."""
    wide = max - min if max != min else 0.001
    return ((torch.arange(dim, dtype=torch.float32) - min) / wide).clamp(0, 1)


class DeepseekV3RotaryEmbedding(nn.Module):
    """cos and sin [seq_len, dim], each half of the width the same, in the input's dtype."""

    _mscale: float | None = None

    def __init__(
        self, dim: int, max_position_embeddings: int = 2048, base: float = 10000, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.dim, self.max_position_embeddings, self.base = dim, max_position_embeddings, base
        self.inv_freq = 1.0 / self._waves(device)

    def _waves(self, device: Any) -> Tensor:
        steps = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device)
        return self.base ** (steps / self.dim)

    def get_freqs_table(self, device: Any, seq_len: int) -> Tensor:
        """Angles [seq_len, dim / 2], float32."""
        return torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), self.inv_freq.to(device))

    def forward(self, x: Tensor, seq_len: Any = None, freqs: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The tables of `seq_len` positions, or of the angles that are given."""
        angles = self.get_freqs_table(x.device, seq_len) if freqs is None else freqs
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        if self._mscale is not None:
            cos, sin = cos * self._mscale, sin * self._mscale
        return cos.to(x.dtype), sin.to(x.dtype)


class DeepseekV3YarnRotaryEmbedding(DeepseekV3RotaryEmbedding):
    """Long waves are stretched by `scaling_factor`; the tables are scaled by the ratio of the two mscales."""

    def __init__(
        self,
        dim: int,
        max_position_embeddings: int = 2048,
        base: float = 10000,
        device: torch.device | None = None,
        scaling_factor: float = 1.0,
        original_max_position_embeddings: int = 4096,
        beta_fast: float = 32,
        beta_slow: float = 1,
        mscale: float = 1,
        mscale_all_dim: float = 0,
    ) -> None:
        super().__init__(dim, max_position_embeddings, base, device)
        self.scaling_factor, self.original_max_position_embeddings = scaling_factor, original_max_position_embeddings
        self.beta_fast, self.beta_slow = beta_fast, beta_slow
        self.mscale, self.mscale_all_dim = mscale, mscale_all_dim
        self._mscale = float(yarn_get_mscale(scaling_factor, mscale) / yarn_get_mscale(scaling_factor, mscale_all_dim))

    def get_freqs_table(self, device: Any, seq_len: int) -> Tensor:
        """Angles [seq_len, dim / 2], float32."""
        plain, stretched = 1.0 / self._waves(device), 1.0 / (self.scaling_factor * self._waves(device))
        bounds = yarn_find_correction_range(
            self.beta_fast, self.beta_slow, self.dim, self.base, self.original_max_position_embeddings
        )
        kept = 1.0 - yarn_linear_ramp_mask(*bounds, self.dim // 2).to(device)
        freqs = stretched * (1 - kept) + plain * kept
        return torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), freqs)


def rotate_fn(x: Tensor) -> Tensor:
    """(a, b) -> (-b, a) of each adjacent pair."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def apply_rotary_pos_emb(q: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor) -> Tensor:
    """Turn `q` by the first row's positions: those of the other rows of the batch are not read."""
    turned = [table.chunk(2, dim=-1)[0][position_ids].repeat_interleave(2, dim=-1)[0] for table in (cos, sin)]
    return (q * turned[0] + rotate_fn(q) * turned[1]).to(q.dtype)
