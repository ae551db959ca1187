"""A bug of the corpus: what it does to a source model, on which family, where it sits, what its cause is called."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn


class BugOperator(ABC):
    """One kind of bug. Subclass it in `operators/`, one class a kind; `family` is a key of the corpus's configs.

    `component`: a part of the name of the component that holds the bug; several may be right, since a bug at a border
    is seen on either side. `causes`: the kinds of root cause that name it rightly. `control`: a correct rewrite, which
    must pass every gate.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    component: ClassVar[tuple[str, ...]] = ()
    causes: ClassVar[tuple[str, ...]] = ()
    control: ClassVar[bool] = False

    @abstractmethod
    def inject(self, model: nn.Module) -> None:
        """Put the bug into a live source model of the family; nothing outside this model may change."""


@dataclass(frozen=True)
class Named:
    """A module of a source model with its path."""

    path: str
    module: Any


def modules(model: nn.Module, *endings: str) -> Iterator[Named]:
    """Modules whose path ends with one of these, in forward order."""
    for path, module in model.named_modules():
        if path.endswith(endings):
            yield Named(path, module)


def wrap_forward(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """Let `wrapper(original, *args, **kwargs)` run in place of the module's forward."""
    original = module.forward
    module.forward = lambda *args, **kwargs: wrapper(original, *args, **kwargs)  # type: ignore[method-assign]


def scale_output(module: nn.Module, factor: float) -> None:
    """Multiply the module's first output."""
    edit_output(module, lambda out: out * factor)


def edit_output(module: nn.Module, edit: Callable[[Tensor], Tensor]) -> None:
    """Edit the module's first output tensor."""

    def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        return (edit(out[0]), *out[1:]) if isinstance(out, tuple) else edit(out)

    wrap_forward(module, wrapper)


def while_running(module: nn.Module, name: str, replacement: Callable[..., Any]) -> None:
    """While the module's forward runs, `name` of its own Python file is `replacement(original, *args, **kwargs)`.

    The file serves other models too, the reference among them: so it is put back when the forward ends.
    """
    file = sys.modules[type(module).__module__]

    def wrapper(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        original = getattr(file, name)

        def replaced(*inner: Any, **options: Any) -> Any:
            return replacement(original, *inner, **options)

        setattr(file, name, replaced)
        try:
            return forward(*args, **kwargs)
        finally:
            setattr(file, name, original)

    wrap_forward(module, wrapper)
