"""Imports a port's modeling file under its own module name, as its users and its patches do."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from equiport.errors import EquiportError
from equiport.stacks.source_reading import read_source


def import_port(modeling_file: str | Path) -> ModuleType:
    """The module of a modeling file. Its folder is put on sys.path; a file with relative imports is imported through
    its package. A module that is loaded already (and maybe patched) is given as it is; one of another folder that
    bears the same name makes room.

    Raises:
        EquiportError: the file is absent, is not Python, or does not import (file and line are named).
    """
    path = Path(modeling_file).expanduser().resolve()
    source = read_source(path)
    name, root = path.stem, path.parent
    if any(level > 0 for _, level in source.modules):
        name, root = f"{root.name}.{name}", root.parent
        while (root / "__init__.py").is_file():
            name, root = f"{root.name}.{name}", root.parent
    for folder in (str(root), str(path.parent)):
        if folder in sys.path:
            sys.path.remove(folder)
        sys.path.insert(0, folder)
    loaded = sys.modules.get(name)
    if loaded is not None and _file_of(loaded) == path:
        return loaded
    if loaded is not None:
        _forget(name, source_folder=path.parent)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
        if _file_of(module) != path:
            module = _import_by_path(name, path)
    except EquiportError:
        raise
    except Exception as fault:
        sys.modules.pop(name, None)
        line = _line_in(path, fault)
        raise EquiportError(
            f"does not import: {type(fault).__name__}: {fault}",
            where=f"{path}:{line}" if line else path,
            remedy="Correct the port, or install what it imports.",
        ) from fault
    sys.modules.setdefault(path.stem, module)
    return module


def port_class(module: ModuleType, name: str, base: type | None = None) -> Any:
    """The class `name` of an imported port, checked to derive from `base`.

    Raises:
        EquiportError: no such class, or not of that kind.
    """
    found = getattr(module, name, None)
    if not inspect.isclass(found):
        own = [
            key for key, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        raise EquiportError(
            f"has no class {name!r}",
            where=_file_of(module),
            remedy=f"Classes that it defines: {', '.join(own) or 'none'}.",
        )
    if base is not None and not issubclass(found, base):
        raise EquiportError(
            f"class {name!r} does not derive from {base.__name__}",
            where=_file_of(module),
            remedy="Name the right class of the port.",
        )
    return found


def _file_of(module: ModuleType) -> Path:
    return Path(getattr(module, "__file__", None) or ".").resolve()


def _forget(name: str, source_folder: Path) -> None:
    old = _file_of(sys.modules.pop(name)).parent
    if old == source_folder or old == Path(".").resolve():
        return
    # Siblings of the other port would be found in its stead.
    for key, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) and _file_of(module).parent == old:
            del sys.modules[key]


def _import_by_path(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EquiportError("is not a Python file", where=path, remedy="Give the port's modeling file (.py).")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _line_in(path: Path, fault: BaseException) -> int | None:
    lines = [frame.lineno for frame in traceback.extract_tb(fault.__traceback__) if Path(frame.filename) == path]
    return lines[-1] if lines else None
