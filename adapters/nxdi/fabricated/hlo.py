"""Functions that describe a device operation to the compiler, called on tensors: markers are served, others refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .symbol import FabricatedSymbol, KernelAbsentError, holds_tensor

# Borders of a module for the compiler: the operation hands its operands on.
MARKERS = ("AwsNeuronModuleMarkerStartForward", "AwsNeuronModuleMarkerEndForward")


class HloOperand:
    """What a description gets in place of a tensor: it can hand operands to a marker, and nothing else."""

    def __init__(self, name: str, values: tuple[Any, ...]) -> None:
        self._name, self._values = name, values
        self.scribe = self

    def tuple(self, *operands: HloOperand) -> HloOperand:
        """Several operands as one."""
        return HloOperand(self._name, tuple(value for operand in operands for value in operand._values))

    def CustomCall(self, *operands: HloOperand, custom_call_target: Any, **options: Any) -> HloOperand:
        """The operands of a marker. Raises KernelAbsentError for any other target."""
        target = custom_call_target
        name = repr(target).strip("<>").rpartition(".")[2] if isinstance(target, FabricatedSymbol) else str(target)
        if name not in MARKERS or options:
            raise KernelAbsentError(f"{self._name} ({name})")
        return self.tuple(*operands)

    def __getattr__(self, attribute: str) -> Any:
        raise KernelAbsentError(f"{self._name} ({attribute})")


def xla_hlo_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a description. Called without tensors it is the function; with tensors, only a marker is served.

    Raises:
        KernelAbsentError: (the decorated function) it describes a computation.
    """
    name = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not holds_tensor(args) and not holds_tensor(kwargs):
            return function(*args, **kwargs)
        if kwargs:
            raise KernelAbsentError(name)
        try:
            described = function(*(HloOperand(name, (arg,)) for arg in args))
        except (TypeError, AttributeError) as fault:
            raise KernelAbsentError(name) from fault
        if not isinstance(described, HloOperand):
            raise KernelAbsentError(name)
        values = described._values
        return values[0] if len(values) == 1 else values

    return call
