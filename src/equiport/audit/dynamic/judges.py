"""The comparator that ran must be the one that was installed: its functions are remembered and looked at again."""

from __future__ import annotations

import builtins
import sys
from types import FunctionType
from typing import Any

import torch

_MODULES = (
    "equiport.compare", "equiport.port.translate_block_test", "equiport.stages.component_check", "torch.testing",
    "numpy.testing", "unittest.case",
)  # fmt: skip
_TENSOR = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__sub__", "__bool__", "abs", "max", "mean",
           "norm", "allclose", "equal", "isclose", "float", "item")  # fmt: skip
_TORCH = ("allclose", "equal", "isclose", "isnan", "isfinite", "abs", "max", "manual_seed")
_BUILTINS = ("all", "any", "abs", "max", "min", "sum", "isinstance", "float", "bool", "len", "sorted")

Print = tuple[int, int, int, str]


def remember() -> dict[str, Print]:
    """What every judging function is now, by name."""
    found: dict[str, Any] = {}
    for name, module in sorted(sys.modules.items()):
        if module is not None and name.startswith(_MODULES):
            found.update({f"{name}.{key}": value for key, value in vars(module).items() if callable(value)})
    found.update({f"torch.Tensor.{name}": getattr(torch.Tensor, name) for name in _TENSOR})
    found.update({f"torch.{name}": _behind_dynamo(getattr(torch, name)) for name in _TORCH})
    found.update({f"builtins.{name}": getattr(builtins, name) for name in _BUILTINS})
    prints = {name: _print(value) for name, value in found.items()}
    for name, value in found.items():
        if isinstance(value, type) and value.__module__.startswith("equiport"):
            for key, item in vars(value).items():
                if isinstance(item, FunctionType):
                    prints[f"{name}.{key}"] = _print(item)
    return prints


def _behind_dynamo(value: Any) -> Any:
    """The function itself, where torch has wrapped it: importing torch._dynamo, as some calls do, so replaces
    torch.manual_seed. The wrapper is known by its code, what it calls by its closure."""
    wrapper: Any = torch._disable_dynamo(len)
    code = getattr(value, "__code__", None)
    if code is None or code is not wrapper.__code__ or value.__closure__ is None:
        return value
    held = dict(zip(code.co_freevars, value.__closure__, strict=True))
    return held["fn"].cell_contents if "fn" in held else value


def _print(value: Any) -> Print:
    code = getattr(value, "__code__", None)
    return id(value), id(code), hash(code), repr(getattr(value, "__defaults__", None))[:200]


def changed(before: dict[str, Print]) -> list[str]:
    """Names that mean something else than they did."""
    now = remember()
    return sorted(name for name, what in before.items() if now.get(name) != what)
