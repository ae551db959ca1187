"""Names of the closed packages that can be imported, decorated with and subclassed, but never computed with.

A port and the open packages below it name hundreds of symbols of the closed toolchain at import time; on a CPU almost
none of them is called. Each is stood for by a `FabricatedSymbol`, which raises as soon as a tensor reaches it: a kernel
that would have run on a device is never skipped in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from equiport.errors import EquiportError


class KernelAbsentError(EquiportError):
    """A symbol of a closed package was asked to compute."""

    def __init__(self, symbol: str, doing: str = "was called on a tensor") -> None:
        super().__init__(
            f"{symbol} {doing}, and its package is not installed here",
            field=symbol,
            remedy="Switch the kernel off in NeuronConfig for the CPU run, or run where the Neuron SDK is installed.",
        )


def holds_tensor(value: Any, depth: int = 0) -> bool:
    """Whether a tensor is in `value` or, a few levels deep, in its containers."""
    if isinstance(value, torch.Tensor):
        return True
    if depth > 4:
        return False
    if isinstance(value, Mapping):
        return any(holds_tensor(item, depth + 1) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(holds_tensor(item, depth + 1) for item in value)
    return False


class FabricatedBase:
    """What a class gets as its base when it derives from a fabricated symbol."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bases = [base.__name__ for base in type(self).__mro__ if base.__dict__.get("_fabricated_from")]
        raise KernelAbsentError(" / ".join(bases) or type(self).__name__, "was instantiated")


class FabricatedSymbol:
    """Stands for one dotted name of a closed package.

    Attribute, index and call (without tensors) give another symbol; called with one function or class it is a decorator
    and gives that back; as a base class it is `FabricatedBase`. Anything that asks it for a value raises
    `KernelAbsentError` naming it.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<fabricated {self._name}>"

    def __getattr__(self, attribute: str) -> FabricatedSymbol:
        if attribute.startswith("__") and attribute.endswith("__"):
            raise AttributeError(attribute)
        return FabricatedSymbol(f"{self._name}.{attribute}")

    def __getitem__(self, index: Any) -> FabricatedSymbol:
        return FabricatedSymbol(self._name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if holds_tensor(args) or holds_tensor(kwargs):
            raise KernelAbsentError(self._name)
        if len(args) == 1 and not kwargs and (inspect.isfunction(args[0]) or inspect.isclass(args[0])):
            return args[0]
        return FabricatedSymbol(self._name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        made = type(self._name.rsplit(".", 1)[-1], (FabricatedBase,), {"_fabricated_from": self._name})
        return (made,)

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __subclasscheck__(self, subclass: type) -> bool:
        return False

    def __or__(self, other: Any) -> FabricatedSymbol:
        return self

    __ror__ = __or__

    def __bool__(self) -> bool:
        raise KernelAbsentError(self._name, "was asked for a truth value")

    def __iter__(self) -> Iterator[Any]:
        raise KernelAbsentError(self._name, "was iterated over")

    def __copy__(self) -> FabricatedSymbol:
        return self

    def __deepcopy__(self, memo: Mapping[int, Any]) -> FabricatedSymbol:
        return self


def kernel_decorator(name: str) -> Callable[..., Any]:
    """A `jit`-like decorator: a decorated kernel becomes a symbol that bears the kernel's own name.

    Unlike other fabricated decorators it does not give the function back: its body is written for the device's
    language, and running it on tensors would give a wrong answer or a confusing error.
    """

    def decorate(*args: Any, **kwargs: Any) -> Any:
        if holds_tensor(args) or holds_tensor(kwargs):
            raise KernelAbsentError(name)
        if args and isinstance(args[0], FabricatedSymbol):
            return args[0]
        if args and callable(args[0]):
            return FabricatedSymbol(f"{getattr(args[0], '__module__', name)}.{getattr(args[0], '__name__', 'kernel')}")
        return decorate

    return decorate
