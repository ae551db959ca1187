"""What the stand-in says when it is asked for something it does not have.

The stand-in serves the part of the stack that dense decoder ports use. Anything else is refused by name: a module or a
symbol by `StandInMissing` (an `ImportError`), a configuration flag by `StandInRefused` (a `ValueError`). Nothing is
ever answered by an object that does nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NoReturn

from equiport.errors import EquiportError

PACKAGES = ("neuronx_distributed", "neuronx_distributed_inference")
WAYS_ON = (
    "Two ways on: give the real source folders with EQUIPORT_NXDI_SRC and EQUIPORT_NXD_SRC,"
    " or install neuronx_distributed and neuronx_distributed_inference"
)

_asked_for: list[str] = []


class StandInMissing(EquiportError, ImportError):
    """A module or symbol that the stand-in does not offer.

    It is an `ImportError`, so that `from x import y` fails with this line, and not an `AttributeError`, so that
    `hasattr` cannot turn a gap of the stand-in into a plain "no". A port that catches `ImportError` around an import
    takes its fallback here and not on the real stack: `missing_so_far` tells which names were asked for.
    """


class StandInRefused(StandInMissing, ValueError):
    """A configuration flag or call of the stack that the stand-in does not serve."""


def missing_so_far() -> tuple[str, ...]:
    """Every name this process was refused so far, in order: what a port with import fallbacks went without."""
    return tuple(_asked_for)


def missing(symbol: str) -> StandInMissing:
    """The error for `symbol` (dotted path of a module or of a name in a module). Recorded for `missing_so_far`."""
    _asked_for.append(symbol)
    return StandInMissing("not offered by the CPU stand-in of NxD Inference", where=symbol, remedy=WAYS_ON)


def refuse(what: str, reason: str = "") -> NoReturn:
    """Refuse the use of `what` (a flag with its value, or a call).

    Raises:
        StandInRefused: always.
    """
    _asked_for.append(what)
    text = f"not served by the CPU stand-in of NxD Inference{': ' + reason if reason else ''}"
    raise StandInRefused(text, where=what, remedy=WAYS_ON)


def refused_call(symbol: str, reason: str) -> Callable[..., NoReturn]:
    """A function that exists so that it can be imported, and is refused by name when it is called."""

    def call(*_args: Any, **_kwargs: Any) -> NoReturn:
        refuse(f"{symbol}()", reason)

    call.__name__ = call.__qualname__ = symbol.rpartition(".")[2]
    return call


def refuse_overrides(instance: object, base: type, *names: str) -> None:
    """Refuse a subclass of `base` that overrides one of `names`: methods that the stack calls in CPU mode, and the
    stand-in does not.

    Raises:
        StandInRefused: such an override would be passed over in silence.
    """
    for cls in type(instance).__mro__:
        if cls is base:
            return
        for name in names:
            if name in vars(cls):
                refuse(f"{cls.__name__}.{name}", f"it overrides {base.__name__}'s, which is not called")


def attribute_hook(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a stand-in module: a submodule that exists is imported, anything else is missing."""

    def __getattr__(name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            # Python's own probing (__path__, __wrapped__, ...) must keep working.
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        path = getattr(sys.modules.get(module), "__path__", None)
        full = f"{module}.{name}"
        if path is not None and PathFinder.find_spec(full, path) is not None:
            return importlib.import_module(full)
        raise missing(full)

    return __getattr__


class MissingModuleFinder:
    """Last of `sys.meta_path`: a submodule of the two packages that nothing else found is refused by name."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for foreign modules.

        Raises:
            StandInMissing: for a submodule of the stand-in's packages.
        """
        root, dot, _ = fullname.partition(".")
        if dot and root in PACKAGES and hasattr(sys.modules.get(root), "__equiport_standin__"):
            raise missing(fullname)
        return None


def install() -> None:
    """Put the finder at the end of `sys.meta_path`, once."""
    if MissingModuleFinder not in sys.meta_path:
        sys.meta_path.append(MissingModuleFinder)
