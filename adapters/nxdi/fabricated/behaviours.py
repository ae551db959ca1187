"""The few symbols of the closed packages that need a real behaviour for a CPU run, by dotted name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .hlo import xla_hlo_call
from .symbol import FabricatedBase, kernel_decorator

VERSION = "0.0.0+fabricated"


class RmsNorm:
    """torch_neuronx.xla_impl.ops.RmsNorm: ports reach it through CustomRMSNorm, some of them in CPU mode too."""

    @staticmethod
    def apply(hidden: Tensor, weight: Tensor, eps: float, dim: int) -> Tensor:
        """Root-mean-square norm of `hidden` over `dim`, computed in float32, times `weight`; dtype of `hidden`."""
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(dim=dim, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(hidden.dtype)


class _Identity:
    """Marks a module's border for the compiler; has no effect on values."""

    @staticmethod
    def apply(*values: Any) -> Any:
        return values[0] if len(values) == 1 else values


class ModuleMarkerStart(_Identity):
    """torch_neuronx marker, identity."""


class ModuleMarkerEnd(_Identity):
    """torch_neuronx marker, identity."""


class MpDeviceLoader(FabricatedBase):
    """Base class of a data loader that a CPU run never makes."""

    _fabricated_from = "torch_xla.distributed.parallel_loader.MpDeviceLoader"


class ZeroRedundancyOptimizer(FabricatedBase):
    """Base class of an optimizer that inference never makes."""

    _fabricated_from = "torch_xla.distributed.zero_redundancy_optimizer.ZeroRedundancyOptimizer"


def _cpu(*_args: Any, **_kwargs: Any) -> torch.device:
    return torch.device("cpu")


def _zero(*_args: Any, **_kwargs: Any) -> int:
    return 0


def _one(*_args: Any, **_kwargs: Any) -> int:
    return 1


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _true(*_args: Any, **_kwargs: Any) -> bool:
    return True


def _trn1(*_args: Any, **_kwargs: Any) -> str:
    return "trn1"


def _getenv_as(name: str, kind: Any, default: Any = None) -> Any:
    import os

    return kind(os.environ[name]) if name in os.environ else default


BEHAVIOURS: dict[str, Any] = {
    "torch_neuronx.xla_impl.ops.RmsNorm": RmsNorm,
    "torch_neuronx.xla_impl.base.xla_hlo_call": xla_hlo_call,
    "torch_neuronx.xla_impl.ops.xla_hlo_call": xla_hlo_call,
    "torch_neuronx.xla_impl.ops.nki_jit": kernel_decorator("torch_neuronx.xla_impl.ops.nki_jit"),
    "torch_neuronx.xla_impl.ops.ModuleMarkerStart": ModuleMarkerStart,
    "torch_neuronx.xla_impl.ops.ModuleMarkerEnd": ModuleMarkerEnd,
    "torch_neuronx.utils.get_platform_target": _trn1,
    "torch_neuronx.utils.utils.get_platform_target": _trn1,
    "nki.jit": kernel_decorator("nki.jit"),
    "neuronxcc.nki.jit": kernel_decorator("neuronxcc.nki.jit"),
    "torch_xla.core.xla_model.xla_device": _cpu,
    "torch_xla.core.xla_model.get_ordinal": _zero,
    "torch_xla.core.xla_model.get_local_ordinal": _zero,
    "torch_xla.core.xla_model.xrt_world_size": _one,
    "torch_xla.core.xla_model.is_master_ordinal": _true,
    "torch_xla.core.xla_model.mark_step": _nothing,
    "torch_xla.core.xla_model.rendezvous": _nothing,
    "torch_xla.core.xla_model.master_print": print,
    "torch_xla.device": _cpu,
    "torch_xla.runtime.global_ordinal": _zero,
    "torch_xla.runtime.local_ordinal": _zero,
    "torch_xla.runtime.world_size": _one,
    "torch_xla.utils.utils.getenv_as": _getenv_as,
    "torch_xla.distributed.parallel_loader.MpDeviceLoader": MpDeviceLoader,
    "torch_xla.distributed.zero_redundancy_optimizer.ZeroRedundancyOptimizer": ZeroRedundancyOptimizer,
}
