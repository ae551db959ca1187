"""Process groups: which ranks share a tensor, and which hold replicas of it.

Ranks are laid out [data, tensor], the tensor dimension contiguous. Pipeline, context and expert parallelism are
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from neuronx_distributed._standin.missing import attribute_hook, refuse

__getattr__ = attribute_hook(__name__)


@dataclass
class _Group:
    """One kind of group: this rank's process group, and the ranks of all of them."""

    own: ProcessGroup | None = None
    mesh: list[list[int]] | None = None


_world = _Group()
_tensor = _Group()
_data = _Group()
_expert = _Group()
_aot_mode = False
# Set by hand through the setters, in place of the group's own values.
_tensor_size: int | None = None
_tensor_rank: int | None = None


def _make(kind: _Group, mesh: list[list[int]]) -> None:
    kind.mesh = mesh
    for ranks in mesh:
        group = dist.new_group(ranks, backend="gloo")  # every rank takes part in making every group
        if dist.get_rank() in ranks:
            kind.own = group


def _own(kind: _Group, as_list: bool, name: str) -> Any:
    held = kind.mesh if as_list else kind.own
    assert held is not None, f"{name} parallel group is not initialized"
    return held


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    skip_collective_init: bool = False,
    lnc_size: int = 1,
    mesh_only: bool = False,
) -> None:
    """Make the groups over the existing default process group. A size larger than the world is cut to it.

    Raises:
        RuntimeError: the world size is not a multiple of the tensor size.
    """
    world = dist.get_world_size()
    for name, size in (
        ("pipeline_model_parallel_size", pipeline_model_parallel_size),
        ("context_parallel_size", context_parallel_size),
        ("expert_model_parallel_size", expert_model_parallel_size),
    ):
        if min(size, world) > 1:
            refuse(f"{name}={size}")
    if mesh_only:
        refuse("initialize_model_parallel(mesh_only=True)")
    tensor = min(tensor_model_parallel_size, world)
    if world % tensor:
        raise RuntimeError(f"the world size ({world}) is not a multiple of the tensor parallel size ({tensor})")
    ranks = list(range(world))
    _make(_world, [ranks])
    _make(_tensor, [ranks[start : start + tensor] for start in range(0, world, tensor)])
    _make(_data, [ranks[offset::tensor] for offset in range(tensor)])
    _make(_expert, [[rank] for rank in ranks])


def model_parallel_is_initialized() -> bool:
    """True once the tensor and data groups exist; ports build plain torch layers otherwise."""
    return _tensor.own is not None and _data.own is not None


def destroy_model_parallel() -> None:
    """Forget every group (the default process group stays)."""
    global _tensor_size, _tensor_rank
    for kind in (_world, _tensor, _data, _expert):
        kind.own = kind.mesh = None
    _tensor_size = _tensor_rank = None


def get_world_group(as_list: bool = False) -> Any:
    """The group of all ranks."""
    return _own(_world, as_list, "world")


def get_tensor_model_parallel_group(as_list: bool = False) -> Any:
    """This rank's tensor group, or all of them as lists of ranks."""
    return _own(_tensor, as_list, "intra_layer_model")


def get_tensor_model_parallel_replica_groups() -> list[list[int]]:
    """All tensor groups as lists of ranks."""
    return get_tensor_model_parallel_group(as_list=True)


def get_tensor_model_parallel_size() -> int:
    """Ranks in this rank's tensor group."""
    return _tensor_size if _tensor_size is not None else get_tensor_model_parallel_group().size()


def get_tensor_model_parallel_rank() -> int:
    """This rank's place in its tensor group."""
    return _tensor_rank if _tensor_rank is not None else get_tensor_model_parallel_group().rank()


def set_tensor_model_parallel_size(world_size: int) -> None:
    """Override the tensor group's size."""
    global _tensor_size
    _tensor_size = world_size


def set_tensor_model_parallel_rank(rank: int) -> None:
    """Override this rank's place in its tensor group."""
    global _tensor_rank
    _tensor_rank = rank


def get_data_parallel_group(as_list: bool = False) -> Any:
    """The ranks that hold the same shard as this one."""
    return _own(_data, as_list, "data")


def get_data_parallel_size() -> int:
    """Replicas of this rank's shard."""
    return get_data_parallel_group().size()


def get_data_parallel_rank() -> int:
    """This rank's place among the replicas of its shard."""
    return get_data_parallel_group().rank()


def get_pipeline_model_parallel_size() -> int:
    """Always 1: larger sizes are refused."""
    return 1


def get_context_model_parallel_size() -> int:
    """Always 1: larger sizes are refused."""
    return 1


def get_expert_model_parallel_size() -> int:
    """Always 1: larger sizes are refused."""
    return 1


def get_expert_model_parallel_group(as_list: bool = False) -> Any:
    """This rank alone: every rank holds a piece of all experts."""
    return _own(_expert, as_list, "expert model")


def set_aot_mode(mode: bool) -> None:
    """While set, layers leave their weights uninitialised."""
    global _aot_mode
    _aot_mode = mode


def get_aot_mode() -> bool:
    """Whether layers leave their weights uninitialised."""
    return _aot_mode
