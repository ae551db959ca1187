"""Reads a port's source by AST, without importing it: imports, classes, and the sibling files they come from."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from equiport.errors import EquiportError


@dataclass(frozen=True)
class ImportedName:
    """`from module import original as ...` (original set) or `import module` (original empty); `level` counts dots."""

    module: str
    original: str
    level: int


@dataclass(frozen=True)
class SourceFile:
    """One parsed file: `imports` by local name, `classes` by name, in the order of the file."""

    path: Path
    imports: dict[str, ImportedName]
    classes: dict[str, ast.ClassDef]
    modules: tuple[tuple[str, int], ...]

    def sibling(self, module: str, level: int) -> Path | None:
        """The file of this port's own folder (or, for a relative import, package) that `module` names, if it is one."""
        base = self.path.parent
        for _ in range(max(level - 1, 0)):
            base = base.parent
        target = base.joinpath(*module.split(".")) if module else base
        for candidate in (target.with_suffix(".py"), target / "__init__.py"):
            if candidate.is_file() and candidate != self.path:
                return candidate
        return None


def read_source(path: str | Path) -> SourceFile:
    """Parse one Python file.

    Raises:
        EquiportError: the file is absent, unreadable or not Python.
    """
    path = Path(path)
    if path.is_dir() or not path.exists():
        kind = "is a folder" if path.is_dir() else "no such file"
        raise EquiportError(kind, where=path, remedy="Give the path of the port's modeling file.")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except SyntaxError as fault:
        raise EquiportError(
            f"is not Python: {fault.msg} (line {fault.lineno})", where=path, remedy="Correct the file."
        ) from fault
    except (OSError, UnicodeDecodeError, ValueError) as fault:
        raise EquiportError(
            f"cannot be read: {fault}", where=path, remedy="Check its permissions and encoding (UTF-8)."
        ) from fault
    imports: dict[str, ImportedName] = {}
    modules: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules.append((alias.name, 0))
                local = alias.asname or alias.name.partition(".")[0]
                imports[local] = ImportedName(alias.name if alias.asname else local, "", 0)
        elif isinstance(node, ast.ImportFrom):
            modules.append((node.module or "", node.level))
            for alias in node.names:
                imports[alias.asname or alias.name] = ImportedName(node.module or "", alias.name, node.level)
                if not node.module:
                    modules.append((alias.name, node.level))
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return SourceFile(path, imports, classes, tuple(modules))


def with_siblings(path: str | Path) -> Iterator[SourceFile]:
    """The file, then every file of its own folder that it imports, directly or through another; each once."""
    waiting, seen = [Path(path)], set()
    while waiting:
        current = waiting.pop(0)
        if current.resolve() in seen:
            continue
        seen.add(current.resolve())
        source = read_source(current)
        yield source
        for module, level in source.modules:
            found = source.sibling(module, level)
            if found is not None:
                waiting.append(found)
