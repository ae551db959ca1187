"""The list of contract cases."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MODULES = (
    "cases_layers",
    "cases_functions",
    "cases_attention",
    "cases_projections",
    "cases_cache",
    "cases_config",
    "cases_model",
    "cases_traps",
    "cases_startup",
    "cases_moe",
    "cases_hub",
)

CaseFunction = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One case; a `fresh` one has a process of its own."""

    name: str
    run: CaseFunction
    fresh: bool = False


_cases: dict[str, Case] = {}


def case(function: CaseFunction | None = None, *, fresh: bool = False) -> Any:
    """Register a function; with `fresh` it gets a process of its own."""

    def register(run: CaseFunction) -> CaseFunction:
        name = f"{run.__module__.removeprefix('cases_')}.{run.__name__}"
        _cases[name] = Case(name, run, fresh)
        return run

    return register if function is None else register(function)


def outcome(call: Callable[[], Any]) -> str:
    """The kind of error that `call` ends with, or "no error"."""
    try:
        call()
    except Exception as error:  # the kind is the answer
        return type(error).__name__
    return "no error"


def load_cases() -> None:
    """Import the case modules. They import the stack inside their functions alone."""
    for module in MODULES:
        importlib.import_module(module)


def cases() -> list[Case]:
    """All cases."""
    return list(_cases.values())
