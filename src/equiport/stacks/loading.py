"""Adapters are found by name, by entry point or by file path; a user adds a stack without touching the engine."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from equiport.content import content_dir
from equiport.errors import EquiportError
from equiport.stacks.contract import StackAdapter

ENTRY_POINT_GROUP = "equiport.adapters"
ADAPTER_FILE = "adapter.py"


def bundled_adapters() -> tuple[str, ...]:
    """Names of the stacks whose adapter comes with equiport."""
    return tuple(sorted(path.parent.name for path in content_dir("adapters").glob(f"*/{ADAPTER_FILE}")))


def known_stacks() -> tuple[str, ...]:
    """Names that `load_adapter` takes: the bundled adapters and those of installed packages."""
    return tuple(sorted({*bundled_adapters(), *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))}))


def load_adapter(name_or_path: str | Path) -> StackAdapter:
    """A new adapter for a stack, by name (`nxdi`), or by the path of an adapter file or of the folder that holds one.

    An entry point of the group `equiport.adapters` names a `StackAdapter` class and wins over a bundled adapter of the
    same name.

    Raises:
        EquiportError: no such stack or file, the file does not import, or it does not define exactly one adapter class.
    """
    text = str(name_or_path)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == text:
            try:
                return _instance(point.load(), f"entry point {point.value}")
            except (ImportError, AttributeError) as fault:
                raise EquiportError(
                    f"the adapter does not load: {fault}",
                    where=f"entry point {point.value}",
                    remedy="Reinstall the package that offers it.",
                ) from fault
    if text in bundled_adapters():
        return _from_file(content_dir("adapters") / text / ADAPTER_FILE)
    path = Path(text).expanduser()
    if path.is_dir():
        path = path / ADAPTER_FILE
    if path.is_file():
        return _from_file(path.resolve())
    raise EquiportError(
        f"unknown stack {text!r}",
        field="target_stack",
        remedy=f"Known stacks: {', '.join(known_stacks()) or 'none'}; or give the path of an adapter file.",
    )


def _from_file(path: Path) -> StackAdapter:
    module = _import_adapter(path)
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, StackAdapter)
        and not inspect.isabstract(value)
        and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        names = ", ".join(value.__name__ for value in found) or "none"
        raise EquiportError(
            f"found {names} where exactly one complete StackAdapter class is wanted",
            where=path,
            remedy="Define one class that implements every abstract method of equiport.stacks.contract.StackAdapter.",
        )
    return _instance(found[0], str(path))


def _import_adapter(path: Path) -> ModuleType:
    # The folder becomes a package of its own, so that an adapter may keep helpers in sibling files.
    tag = hashlib.sha256(str(path.parent).encode()).hexdigest()[:8]
    package = f"equiport_adapter_{path.parent.name}_{tag}"
    name = f"{package}.{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    if package not in sys.modules:
        holder = ModuleType(package)
        holder.__path__ = [str(path.parent)]
        sys.modules[package] = holder
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EquiportError("not a Python file", where=path, remedy="An adapter is a .py file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as fault:
        del sys.modules[name]
        raise EquiportError(
            f"the adapter does not import: {type(fault).__name__}: {fault}", where=path, remedy="Correct the file."
        ) from fault
    return module


def _instance(cls: object, where: str) -> StackAdapter:
    if not (inspect.isclass(cls) and issubclass(cls, StackAdapter)):
        raise EquiportError("is not a StackAdapter class", where=where, remedy="Name the adapter class itself.")
    if inspect.isabstract(cls):
        lacking = ", ".join(sorted(cls.__abstractmethods__))
        raise EquiportError(f"lacks {lacking}", where=where, remedy="Implement the five methods of the contract.")
    return cls()
