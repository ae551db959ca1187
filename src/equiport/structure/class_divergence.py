"""Where a modeling file picks another class on the CPU than on the device: found by AST, resolved through imports.

What the CPU stages then test is not what runs on the device, so such components need a second test (seed 003).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from equiport.errors import EquiportError

_CPU_SWITCHES = {"cpu_mode", "on_cpu", "NXD_CPU_MODE"}
_KERNEL_ROOTS = {"nki", "nkilib", "neuronxcc", "torch_neuronx"}
_DEPTH = 3


@dataclass(frozen=True)
class ClassDivergence:
    """One branch: `kind` is factory, ternary, if, table, conditional import or kernel import."""

    kind: str
    file: str
    line: int
    where: str
    cpu_class: str
    device_class: str
    recommendation: str = "Write a second test for the device class: the CPU stages run the other one."


def detect_class_divergence(modeling_file: Path, roots: Sequence[Path] = ()) -> tuple[ClassDivergence, ...]:
    """All CPU/device branches of the file, and those behind names it imports from files beside it or below `roots`.

    Raises:
        EquiportError: the file is unreadable or no Python.
    """
    return tuple(_scan(modeling_file, tuple(roots), names=None, depth=0, seen=set()))


def parse_python(path: Path) -> ast.Module:
    """The AST of a Python file.

    Raises:
        EquiportError: unreadable, not UTF-8, or a syntax error (with its line).
    """
    try:
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except SyntaxError as error:
        raise EquiportError(
            f"does not parse: {error.msg} (line {error.lineno})", where=path, remedy="Mend it."
        ) from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise EquiportError(f"cannot be read: {error}", where=path, remedy="Check the path.") from None


def _scan(
    path: Path, roots: tuple[Path, ...], names: set[str] | None, depth: int, seen: set[Path]
) -> Iterator[ClassDivergence]:
    if path in seen or depth > _DEPTH:
        return
    seen.add(path)
    tree = parse_python(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp) and _mentions_cpu(node.test):
            yield _branch("ternary", path, tree, node, node.body, node.orelse, node.test)
        elif isinstance(node, ast.If) and _mentions_cpu(node.test):
            kind = "conditional import" if _only_imports(node.body) else "if"
            for cpu, device in _paired(node, _following(tree, node)):
                yield _branch(kind, path, tree, node, cpu, device, node.test)
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict) and _mentions_cpu(node.slice):
            choices = {
                ast.unparse(key): value for key, value in zip(node.value.keys, node.value.values, strict=True) if key
            }
            yield _branch("table", path, tree, node, choices.get("True"), choices.get("False"), node.slice)
        elif names is None and isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from _kernel_import(path, tree, node)
    for module, imported in _imports(tree):
        found = _locate(path, module, roots)
        if found is not None:
            yield from (item for item in _scan(found, roots, imported, depth + 1, seen) if _within(item, imported))


def _within(item: ClassDivergence, imported: set[str]) -> bool:
    return item.where.split(".")[0] in imported


def _mentions_cpu(test: ast.expr) -> bool:
    for node in ast.walk(test):
        if isinstance(node, ast.Name) and node.id in _CPU_SWITCHES:
            return True
        if isinstance(node, ast.Attribute) and node.attr in _CPU_SWITCHES:
            return True
        if isinstance(node, ast.Constant) and node.value in _CPU_SWITCHES:
            return True
    return False


def _negated(test: ast.expr) -> bool:
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def _branch(
    kind: str,
    path: Path,
    tree: ast.Module,
    node: ast.AST,
    first: ast.AST | None,
    second: ast.AST | None,
    test: ast.expr,
) -> ClassDivergence:
    cpu, device = (second, first) if _negated(test) else (first, second)
    where = _owner(tree, node)
    if kind in ("if", "ternary") and _is_return(tree, node):
        kind = "factory"
    return ClassDivergence(kind, path.name, getattr(node, "lineno", 0), where, _class_of(cpu), _class_of(device))


def _class_of(node: ast.AST | None) -> str:
    if node is None:
        return "(nothing)"
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return ", ".join(alias.name for alias in node.names)
    if isinstance(node, (ast.Return, ast.Assign, ast.AnnAssign, ast.Expr)) and node.value is not None:
        return _class_of(node.value)
    if isinstance(node, ast.Call):
        return ast.unparse(node.func)
    return ast.unparse(node).splitlines()[0][:120]


def _paired(node: ast.If, following: list[ast.stmt]) -> list[tuple[ast.AST | None, ast.AST | None]]:
    def choices(body: list[ast.stmt]) -> dict[str, ast.AST]:
        found: dict[str, ast.AST] = {}
        for statement in body:
            if isinstance(statement, ast.Return):
                found["return"] = statement
            elif isinstance(statement, (ast.Import, ast.ImportFrom)):
                for alias in statement.names:
                    found[alias.asname or alias.name] = statement
            elif isinstance(statement, ast.Assign) and isinstance(statement.value, (ast.Call, ast.Name, ast.Attribute)):
                found[ast.unparse(statement.targets[0])] = statement
        return found

    first, second = choices(node.body), choices(node.orelse or following)
    keys = [key for key in first if key in second] or list(first)[:1] or list(second)[:1]
    return [(first.get(key), second.get(key)) for key in keys]


def _following(tree: ast.Module, node: ast.If) -> list[ast.stmt]:
    """Statements after an `if` without else that returns: they are its else."""
    for parent in ast.walk(tree):
        body = getattr(parent, "body", None)
        if isinstance(body, list) and node in body:
            return body[body.index(node) + 1 :] if any(isinstance(item, ast.Return) for item in node.body) else []
    return []


def _only_imports(body: list[ast.stmt]) -> bool:
    return bool(body) and all(isinstance(item, (ast.Import, ast.ImportFrom)) for item in body)


def _is_return(tree: ast.Module, node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return any(isinstance(item, ast.Return) for item in node.body)
    return any(isinstance(parent, ast.Return) and parent.value is node for parent in ast.walk(tree))


def _owner(tree: ast.Module, node: ast.AST) -> str:
    line = getattr(node, "lineno", 0)
    owners: list[ast.AST] = [
        item
        for item in ast.walk(tree)
        if isinstance(item, (ast.ClassDef, ast.FunctionDef)) and item.lineno <= line <= (item.end_lineno or 0)
    ]
    owners.sort(key=lambda item: getattr(item, "lineno", 0))
    return ".".join(item.name for item in owners if isinstance(item, (ast.ClassDef, ast.FunctionDef))) or "(module)"


def _kernel_import(path: Path, tree: ast.Module, node: ast.Import | ast.ImportFrom) -> Iterator[ClassDivergence]:
    module = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
    if module.split(".")[0] in _KERNEL_ROOTS:
        names = ", ".join(alias.name for alias in node.names)
        yield ClassDivergence(
            "kernel import", path.name, node.lineno, _owner(tree, node), "(plain PyTorch path)", f"{module}: {names}"
        )


def _imports(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield "." * node.level + node.module, {alias.name for alias in node.names}


def _locate(path: Path, module: str, roots: tuple[Path, ...]) -> Path | None:
    """The file of an imported module: beside the importing one, or below a root."""
    relative = Path(*module.lstrip(".").split("."))
    for root in [path.parent, *roots]:
        candidate = root / relative.with_suffix(".py")
        if candidate.is_file():
            return candidate
    return None
