"""What the attention block returns, and the kinds it knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from torch import Tensor


class FlashAttentionStrategy(Enum):
    """Which kernel prefill takes; the stand-in has none of them."""

    NONE = 0
    UNSHARDED_KERNEL = 1
    SHARDED_KERNEL = 2
    CONTEXT_PARALLEL_KERNEL = 3
    STRIDED_CONTEXT_PARALLEL_KERNEL = 4


class QKNormPlacement(Enum):
    """Where `use_qk_norm` normalizes. (`q_layernorm` and `k_layernorm` always run before the rotation.)"""

    PRE_ROPE = 0
    POST_ROPE = 1


class EPDispatchOption(Enum):
    """Collectives of expert parallelism."""

    AR_AG = "AR_AG"
    RS_AG = "RS_AG"
    AG_AR = "AG_AR"


@dataclass(frozen=True)
class NeuronAttentionBaseOutput:
    """Unpacks to the first four fields; an index counts all six."""

    hidden_states: Tensor
    present_key_value: tuple[Tensor, Tensor]
    cos_cache: Tensor | None = None
    sin_cache: Tensor | None = None
    residual: Tensor | None = None
    attn_input_hidden_states: Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.hidden_states, self.present_key_value, self.cos_cache, self.sin_cache))

    def __getitem__(self, index: int) -> Any:
        return getattr(self, fields(self)[index].name)
