"""Standalone monkey patches (seed 003): applied before the port is instantiated, idempotent, port files untouched."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from equiport.errors import EquiportError
from equiport.stacks.contract import StackAdapter

_PREFIX = "apply_"


@dataclass(frozen=True)
class AppliedPatch:
    """One patch file that was applied: its functions, and the attributes of the port's classes that it changed."""

    file: Path
    functions: tuple[str, ...]
    changed: tuple[str, ...]


def patch_files(folder: Path) -> list[Path]:
    """The patch files of a folder, by name; those that begin with an underscore are helpers."""
    return sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))


def apply_patches(adapter: StackAdapter, modeling_file: Path, folder: Path) -> list[AppliedPatch]:
    """Apply every `apply_*()` of every patch file, twice: the second time must change nothing.

    Raises:
        EquiportError: no such folder, a file without an `apply_*` function, a patch that raises, changes nothing, or is
            not idempotent.
    """
    if not folder.is_dir():
        raise EquiportError("no such folder", where=folder, field="--patches-dir", remedy="Check the path.")
    port = adapter.import_port(modeling_file)
    return [_apply(path, port) for path in patch_files(folder)]


def _apply(path: Path, port: ModuleType) -> AppliedPatch:
    functions = _functions(path)
    if not functions:
        raise EquiportError(
            f"has no {_PREFIX}*() function",
            where=path,
            remedy=f"Name the patch's entry point {_PREFIX}<component>_patch.",
        )
    before = _surface(port)
    _call(path, functions)
    once = _surface(port)
    _call(path, functions)
    twice = _surface(port)
    changed = tuple(sorted(key for key in once if once[key] is not before.get(key)))
    if not changed:
        raise EquiportError(
            "changes no class of the port", where=path, remedy="Patch the class that the modeling file defines."
        )
    again = sorted(key for key in twice if twice[key] is not once.get(key))
    if again:
        raise EquiportError(
            f"is not idempotent: a second call changes {again[0]} again",
            where=path,
            remedy='Return at once when getattr(TargetClass, "_patched", False) is set.',
        )
    return AppliedPatch(path, tuple(name for name, _ in functions), changed)


def _functions(path: Path) -> list[tuple[str, Callable[[], None]]]:
    spec = importlib.util.spec_from_file_location(f"equiport_patch_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise EquiportError("is no Python file", where=path, remedy="Give a .py file.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise EquiportError(f"does not import: {error}", where=path, remedy="Mend the patch.") from error
    return [
        (name, function)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if name.startswith(_PREFIX) and function.__module__ == module.__name__
    ]


def _call(path: Path, functions: list[tuple[str, Callable[[], None]]]) -> None:
    for name, function in functions:
        try:
            function()
        except Exception as error:
            raise EquiportError(
                f"{name}() raises {type(error).__name__}: {error}", where=path, remedy="Mend the patch."
            ) from error


def _surface(port: ModuleType) -> dict[str, Any]:
    """Every attribute of the port's module and of the classes in it, but the guards: `Class.attribute` -> object."""
    found: dict[str, Any] = dict(vars(port))
    for name, value in vars(port).items():
        if inspect.isclass(value):
            found.update({f"{name}.{key}": item for key, item in vars(value).items() if not key.startswith("_patched")})
    return found
