"""The work folder: all audited files together, what each is for, and who imports whom."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from equiport.audit.model import Role, Sample
from equiport.audit.names import STACK_ROOTS, TOOLKIT_FILES
from equiport.audit.source import ParsedModule, parse, parse_text
from equiport.errors import EquiportError

_SKIPPED = {"__pycache__", ".git", ".venv", "node_modules", "site-packages", ".ipynb_checkpoints"}


@dataclass
class Work:
    """The parsed files, and by module name."""

    root: Path
    modules: tuple[ParsedModule, ...]
    by_name: dict[str, ParsedModule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for module in self.modules:
            module.work = self
            if module.name not in self.by_name or module.role is Role.PORT:
                self.by_name[module.name] = module

    def module(self, dotted: str) -> ParsedModule | None:
        """The audited file that a dotted name (of a module, or of something in it) lies in."""
        if dotted.partition(".")[0] in _INSTALLED:
            return None
        parts = dotted.lstrip(".").split(".")
        for length in range(len(parts), 0, -1):
            found = self.by_name.get(parts[length - 1])
            if found is not None:
                return found
        return None

    def inside(self, dotted: str) -> bool:
        """Whether a dotted name lies in the work folder."""
        return dotted.startswith(".") or self.module(dotted) is not None


_INSTALLED = frozenset({"transformers", "torch", "numpy", "equiport", "pytest", *STACK_ROOTS})


def python_files(path: Path) -> list[Path]:
    """The Python files to audit: the file itself, or those of a folder, caches and environments left out.

    Raises:
        EquiportError: no such path, or no Python file in it: never clean.
    """
    if path.is_file():
        if path.suffix != ".py":
            raise EquiportError("is no Python file", where=path, remedy="Give a .py file or a folder that holds some.")
        return [path]
    if not path.is_dir():
        raise EquiportError("no such file or folder", where=path, remedy="Check the path.")
    found = [
        file
        for file in sorted(path.rglob("*.py"))
        if not _SKIPPED & set(file.relative_to(path).parts) and (file.is_file() or file.is_symlink())
    ]
    if not found:
        raise EquiportError("holds no Python file", where=path, remedy="Give the folder of a port or of its tests.")
    return found


def read_work(files: Iterable[Path], root: Path) -> Work:
    """Parse the files."""
    return _with_roles(root, tuple(parse(file, Role.SUPPORT) for file in files))


def sample_work(sample: Sample) -> tuple[Work, ParsedModule]:
    """The folder that a rule's sample describes, and the sample in it."""
    texts: Mapping[str, str] = {sample.file: sample.code, **sample.beside}
    root = Path("sample")
    work = _with_roles(root, tuple(parse_text(text, root / name, Role.SUPPORT) for name, text in texts.items()))
    return work, work.modules[0]


def _with_roles(root: Path, modules: tuple[ParsedModule, ...]) -> Work:
    for module in modules:
        module.role = role_of(module)
    work = Work(root, modules)
    for module in modules:
        # names that star imports bring are known only now
        module.__dict__.pop("imports", None)
    waiting = [module for module in modules if module.role is Role.PORT]
    while waiting:
        for names in waiting.pop().imports.values():
            for other in filter(None, map(work.module, names)):
                if other.role is Role.SUPPORT and other.path.name not in TOOLKIT_FILES:
                    # what a port imports is part of the port
                    other.role = Role.PORT
                    waiting.append(other)
    everything = [module.imports for module in modules]
    for module, _ in zip(modules, everything, strict=True):
        module.settle()
    return work


def role_of(module: ParsedModule) -> Role:
    """Test by its name, patch by its folder, port by its name or by the serving stack that it imports."""
    name = module.path.name
    if name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py":
        return Role.TEST
    if module.path.parent.name == "patches":
        return Role.PATCH
    if name == "nxdi_block.py" or name.startswith(("modeling_", "neuron_")):
        return Role.PORT
    if _is_script(module):
        return Role.SUPPORT
    roots = {dotted.partition(".")[0] for names in module.imports.values() for dotted in names}
    return Role.PORT if roots & STACK_ROOTS else Role.SUPPORT


def _is_script(module: ParsedModule) -> bool:
    """Has an `if __name__ == "__main__"`: compiles or measures a port, and is none, unless a port imports it."""
    return any(
        isinstance(node, ast.If) and any(getattr(item, "id", "") == "__name__" for item in ast.walk(node.test))
        for node in module.tree.body
    )
