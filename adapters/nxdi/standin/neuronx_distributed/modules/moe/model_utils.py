"""Activations of experts, kinds of gated units, and the stack's constants."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from neuronx_distributed._standin.missing import attribute_hook
from neuronx_distributed.utils.model_utils import get_platform_lnc

__getattr__ = attribute_hook(__name__)

# By name. "gelu" is the exact one; an activation that is not here cannot be an expert's.
ACT2FN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "leaky_relu": F.leaky_relu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}

# The share of experts that a call would load, from which on all of them are run.
DEFAULT_SELECTIVE_LOADING_THRESHOLD = 1.0
DEFAULT_BLOCK_SIZE = 512
DEFAULT_SKIP_MODE = (False, False)
DEFAULT_LNC_SIZE = get_platform_lnc()
DEFAULT_PADDING_VALUE = -1
DEFAULT_HIDDEN_ACT_SCALING_FACTOR = 1.702


class GLUType(Enum):
    """How gate and up are joined: act(s·gate)·(up+b), or gate·act(s·gate)·(up+b)."""

    GLU = "glu"
    SWIGLU = "swiglu"

    @classmethod
    def validate(cls, glu_type: Any) -> GLUType:
        """The kind of that name; None is "glu". Raises ValueError for another name."""
        if isinstance(glu_type, cls):
            return glu_type
        names = [kind.value for kind in cls]
        if glu_type is not None and glu_type not in names:
            raise ValueError(f"glu_type={glu_type} is none of {names}")
        return cls(glu_type or "glu")


class ACTFunc(Enum):
    """Activations by the number that kernels know them by."""

    SILU = 0
    GELU = 1
    GELU_TANH_APPROX = 2
    SIGMOID = 3
    RELU = 4
    TANH = 5
    LEAKY_RELU = 6

    @property
    def id(self) -> int:
        """The number."""
        return self.value

    @property
    def name_str(self) -> str:
        """The name that configurations use."""
        return self.name.lower()

    @classmethod
    def validate(cls, act_func: Any) -> ACTFunc:
        """The activation of that name; None is the sigmoid. Raises ValueError for another name or type."""
        if isinstance(act_func, cls):
            return act_func
        if act_func is None:
            return cls.SIGMOID
        for member in cls:
            if act_func == member.name_str:
                return member
        raise ValueError(f"act_func={act_func!r} is none of {[member.name_str for member in cls]}")


def create_spmd_ranks(model_state_dict: dict[str, Any], prefix: str, world_size: int) -> None:
    """Put the ranks' numbers under `<prefix>spmd_rank.rank`."""
    model_state_dict[f"{prefix}spmd_rank.rank"] = torch.arange(world_size, dtype=torch.int32)
