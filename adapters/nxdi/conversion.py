"""What a port's conversion is given besides a checkpoint, so that it can be judged at all, and what is said of it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equiport.errors import EquiportError
from equiport.reference.key_layout import backbone_prefix, layout_of
from equiport.reference.model import skeleton
from equiport.reference.stored_names import loaded_names
from equiport.stacks.checkpoint import checkpoint_keys

_PREFIX, _NOTHING = "_STATE_DICT_MODEL_PREFIX", "\0"


@dataclass(frozen=True)
class Supply:
    """`separate`: tensors that share memory are copied. `prefix`: what the stack takes off names before the conversion
    is left on them. `names`: other names for stored tensors, to see whether the port reads those.
    """

    separate: bool = False
    prefix: str = ""
    names: Mapping[str, str] | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What is no fault where the port is served in another dtype than its checkpoint's."""
        text = (
            "the conversion gives views of one tensor, which the stack refuses where it does not cast them (a "
            "checkpoint in the dtype that is served): copied here"
        )
        return (text,) if self.separate else ()

    @property
    def faults(self) -> tuple[str, ...]:
        """What keeps the port from loading any checkpoint on this stack."""
        text = (
            f"the conversion looks for names with {self.prefix!r}, which the stack has taken off before: with this "
            "release the port loads no checkpoint. They were left on, to judge the rest"
        )
        return (text,) if self.prefix else ()


def next_supply(fault: BaseException | None, supply: Supply, causal: Any, folder: Path) -> Supply | None:
    """What to try after a load that failed with `fault`; None where nothing is known to help."""
    frames = traceback.extract_tb(fault.__traceback__) if fault is not None else []
    shared = isinstance(fault, RuntimeError) and any(frame.name == "check_for_duplicate_tensors" for frame in frames)
    if shared and not supply.separate:
        return replace(supply, separate=True)
    prefix = str(getattr(causal, _PREFIX, ""))
    stripped = prefix and any(key.startswith(prefix) for key in checkpoint_keys(folder))
    if isinstance(fault, KeyError) and stripped and not supply.prefix and supply.names is None:
        return replace(supply, prefix=prefix)
    return None


@contextmanager
def supplied(causal: Any, supply: Supply) -> Iterator[None]:
    """Convert with `supply` while the block lasts."""
    with ExitStack() as undo:
        if supply.prefix:
            _set(undo, causal, _PREFIX, _NOTHING)
        if supply.separate:
            convert = causal.get_state_dict
            _set(undo, causal, "get_state_dict", staticmethod(lambda *a, **k: _copied(convert(*a, **k))))
        if supply.names is not None:
            names, home = supply.names, sys.modules[_base(causal).__module__]
            read = home.load_state_dict
            _set(undo, home, "load_state_dict", lambda *a, **k: _renamed(read(*a, **k), names))
        yield


def explained(
    fault: EquiportError, causal: Any, folder: Path, loads: Callable[[Supply], BaseException | None]
) -> EquiportError:
    """The error of a load that lacks a key, with the layout that the port does read, where there is one.

    `loads` tries a supply and gives the cause of its failure.
    """
    if not isinstance(fault.__cause__, KeyError):
        return fault
    try:
        model = skeleton(folder)
    except EquiportError:
        return fault
    stored, prefix = checkpoint_keys(folder), backbone_prefix(model)
    own, usual = layout_of(stored, model), loaded_names(model, stored)
    if not prefix or own.added or not stored:
        return fault
    other = Supply(names=usual if own.dropped else {key: name.removeprefix(prefix) for key, name in usual.items()})
    failed = loads(other)
    further = next_supply(failed, other, causal, folder) if failed is not None else None
    if failed is not None and (further is None or loads(further) is not None):
        return fault
    words = f"with {prefix!r}" if own.dropped else f"without {prefix!r}"
    return EquiportError(
        f"{fault.what}. The port reads tensors whose names are stored {words}; here they are stored the other way",
        where=folder,
        remedy="transformers loads both layouts: store the weights in the other, or correct the port's "
        "convert_hf_to_neuron_state_dict.",
    )


def _renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in state.items()}


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Each tensor with memory of its own."""
    return {
        key: value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def _base(causal: Any) -> Any:
    """The stack's class that reads the checkpoint."""
    return next(cls for cls in reversed(causal.__mro__) if "get_state_dict" in vars(cls))


def _set(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    own = vars(owner)
    undo.callback(setattr, owner, name, own[name]) if name in own else undo.callback(delattr, owner, name)
    setattr(owner, name, value)
