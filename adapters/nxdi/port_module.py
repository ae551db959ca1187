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

from .old_names import adapt_old_names

_ENTERED: set[str] = set()  # folders of ports on sys.path


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
    _enter_own_package(path, [module for module, level in source.modules if level == 0])
    if any(level > 0 for _, level in source.modules):
        name, root = f"{root.name}.{name}", root.parent
        while (root / "__init__.py").is_file():
            name, root = f"{root.name}.{name}", root.parent
        _make_room(root / name.partition(".")[0])
    for folder in (str(root), str(path.parent)):
        _enter(folder)
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
    adapt_old_names(module)
    return module


def port_class(module: ModuleType, name: str, base: type | None = None) -> Any:
    """The class `name` of an imported port, checked to derive from `base`.

    Raises:
        EquiportError: no such class, or not of that kind.
    """
    found = getattr(module, name, None)
    if found is None:
        # the inner class of a library model that the port derives from: the port's file does not name it
        inner = [getattr(value, "_model_cls", None) for value in vars(module).values() if inspect.isclass(value)]
        found = next((value for value in inner if inspect.isclass(value) and value.__name__ == name), None)
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


def _enter_own_package(path: Path, imported: list[str]) -> None:
    """Ports that import their siblings by the name of their folder (`from src.rope import ...`) are run from the folder
    above it: that one is put on sys.path. A package of the same name, of another port, makes room.
    """
    package, root = path.parent, path.parent.parent
    while package.name:
        inside = [module for module in imported if module.partition(".")[0] == package.name]
        if any(_is_module(root.joinpath(*module.split("."))) for module in inside):
            break
        if not (package / "__init__.py").is_file() or package == root:
            return
        package, root = root, root.parent
    else:
        return
    _make_room(package)
    _enter(str(root))


def _enter(folder: str) -> None:
    """Put a port's folder in front of sys.path."""
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    _ENTERED.add(folder)


def _make_room(package: Path) -> None:
    """Forget modules of a package of this name that lies elsewhere, and the folders through which ports brought it: a
    package with an __init__.py anywhere on the path is found before one without.
    """
    for folder in [entry for entry in _ENTERED if entry in sys.path and entry != str(package.parent)]:
        if (Path(folder) / package.name).is_dir():
            sys.path.remove(folder)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package.name and not _belongs(module, package):
            del sys.modules[name]


def _is_module(target: Path) -> bool:
    return target.with_suffix(".py").is_file() or target.is_dir()


def _belongs(module: ModuleType, package: Path) -> bool:
    places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    return any(place and package in (Path(place).resolve(), *Path(place).resolve().parents) for place in places)


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
