"""Sizes for flash decoding, which the stand-in itself does not serve."""

from __future__ import annotations

from neuronx_distributed._standin.missing import attribute_hook
from neuronx_distributed.parallel_layers.utils import divide

__getattr__ = attribute_hook(__name__)

EXTRA_RESERVED_SPACE = 128


def calculate_num_cores_per_group(num_attn_heads: int, num_kv_heads: int, tp_degree: int) -> int:
    """Ranks that share one key/value head."""
    return divide(min(tp_degree, num_attn_heads), num_kv_heads)


def get_cache_size(seq_len: int, num_cores_per_group: int, is_ctx: bool = False) -> int:
    """Cache entries a rank holds; decoding reserves 128 more."""
    return divide(seq_len, num_cores_per_group) + (0 if is_ctx else EXTRA_RESERVED_SPACE)
