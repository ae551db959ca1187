"""Parses audited files with `ast`; audited code is never imported. Names are resolved through import aliases."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from equiport.audit.model import Role

if TYPE_CHECKING:
    from equiport.audit.flow import Flow
    from equiport.audit.work import Work

MAX_BYTES = 10_000_000
_MAX_DEPTH = 220
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_NONE: frozenset[str] = frozenset()


@dataclass
class ParsedModule:
    """One file: its tree, imports by local name, and the folder around it. `opaque`: why it has no tree."""

    path: Path
    role: Role
    text: str
    tree: ast.Module
    opaque: str = ""
    work: Work | None = field(default=None, repr=False)
    _names: dict[ast.AST, frozenset[str]] | None = field(default=None, repr=False)

    def settle(self) -> None:
        """All files of the folder are known: from here on what a node stands for is remembered."""
        self._names = {}

    @property
    def name(self) -> str:
        """Module name as its neighbours import it."""
        return self.path.stem

    def line(self, number: int) -> str:
        """The text of a line, stripped, at most 160 characters."""
        lines = self._lines
        return lines[number - 1].strip()[:160] if 0 < number <= len(lines) else ""

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node, breadth first."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Node -> the node around it."""
        return {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    @cached_property
    def calls(self) -> tuple[ast.Call, ...]:
        """Every call."""
        return tuple(node for node in self.nodes if isinstance(node, ast.Call))

    @cached_property
    def functions(self) -> tuple[FunctionNode, ...]:
        """Every function and method, nested ones too."""
        return tuple(node for node in self.nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))

    @cached_property
    def classes(self) -> tuple[ast.ClassDef, ...]:
        """Every class, nested ones too."""
        return tuple(node for node in self.nodes if isinstance(node, ast.ClassDef))

    @cached_property
    def flow(self) -> Flow:
        """The data flow of this file."""
        from equiport.audit.flow import Flow

        return Flow(self)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around `node`, from the inside out."""
        while (node := self.parents.get(node, self.tree)) is not self.tree:
            yield node

    def function_of(self, node: ast.AST) -> FunctionNode | None:
        """The innermost function around `node`."""
        for outer in self.around(node):
            if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return outer
        return None

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """The innermost class around `node`."""
        return next((outer for outer in self.around(node) if isinstance(outer, ast.ClassDef)), None)

    @cached_property
    def imports(self) -> dict[str, frozenset[str]]:
        """Local name -> dotted names it may stand for, imports of every scope and branch, and plain aliases of them."""
        # while files that import each other are read, each shows its own names
        self.__dict__["imports"] = {}
        found: dict[str, set[str]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    local = alias.asname or alias.name.partition(".")[0]
                    found.setdefault(local, set()).add(alias.name if alias.asname else local)
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                for alias in node.names:
                    if alias.name == "*":
                        for name in self._starred(base):
                            found.setdefault(name, set()).update(self._through(f"{base}.{name}"))
                    else:
                        whole = join_dotted(base, alias.name)
                        found.setdefault(alias.asname or alias.name, set()).update(self._through(whole))
        frozen = {name: frozenset(values) for name, values in found.items()}
        self.__dict__["imports"] = frozen
        for _ in range(3):
            self._add_aliases(frozen)
        return frozen

    def _through(self, dotted: str) -> frozenset[str]:
        """What a name of a neighbouring file stands for, where that file only imported it."""
        base, _, name = dotted.rpartition(".")
        module = self.work.module(base) if self.work and base.strip(".") else None
        if module is None or module is self or module.opaque:
            return frozenset({dotted})
        return module.imports.get(name, frozenset({dotted}))

    def _starred(self, base: str) -> tuple[str, ...]:
        from equiport.audit.names import STARRED

        module = self.work.module(base) if self.work else None
        if module is not None and module is not self and not module.opaque:
            return tuple(exported(module))
        return STARRED.get(base, ())

    def _add_aliases(self, found: dict[str, frozenset[str]]) -> None:
        """`name = imported` (and pairs of them in a tuple) make `name` stand for the same."""
        for node in self.nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                for target, value in _pairs(node.targets[0], node.value):
                    if isinstance(target, ast.Name) and not isinstance(value, ast.Constant):
                        seen = self.dotted(value)
                        if seen:
                            found[target.id] = found.get(target.id, _NONE) | seen

    def dotted(self, node: ast.AST) -> frozenset[str]:
        """The dotted names that an expression may stand for; empty when it is no imported name.

        Follows attributes, `getattr` with a literal name, `import_module` and `__import__` with a literal name.
        """
        if self._names is None:
            return self._dotted(node)
        found = self._names.get(node)
        if found is None:
            found = self._names[node] = self._dotted(node)
        return found

    def _dotted(self, node: ast.AST) -> frozenset[str]:
        if isinstance(node, ast.Name):
            known = self.imports.get(node.id, _NONE)
            return _NONE if known and self._is_parameter(node) else known
        if isinstance(node, ast.Attribute):
            return frozenset().union(*(self._through(f"{base}.{node.attr}") for base in self.dotted(node.value)))
        if isinstance(node, ast.Call):
            return self._dynamic(node)
        if isinstance(node, ast.Subscript):
            return self._looked_up(node)
        if isinstance(node, ast.IfExp):
            return self.dotted(node.body) | self.dotted(node.orelse)
        if isinstance(node, ast.BoolOp):
            return frozenset().union(*(self.dotted(value) for value in node.values))
        return _NONE

    def _looked_up(self, node: ast.Subscript) -> frozenset[str]:
        """`sys.modules["x"]`, `vars(x)["y"]`, `x.__dict__["y"]` with a literal name."""
        name, base = literal(node.slice), node.value
        if not isinstance(name, str):
            return _NONE
        if isinstance(base, ast.Attribute) and base.attr == "__dict__":
            return frozenset(f"{item}.{name}" for item in self.dotted(base.value))
        if isinstance(base, ast.Call) and isinstance(base.func, ast.Name) and base.func.id == "vars" and base.args:
            return frozenset(f"{item}.{name}" for item in self.dotted(base.args[0]))
        return frozenset({name}) if "sys.modules" in self.dotted(base) else _NONE

    def _dynamic(self, node: ast.Call) -> frozenset[str]:
        text = literal(node.args[0]) if node.args else None
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) >= 2:
            name = literal(node.args[1])
            return frozenset(f"{base}.{name}" for base in self.dotted(node.args[0])) if isinstance(name, str) else _NONE
        if isinstance(text, str):
            if isinstance(node.func, ast.Name) and node.func.id == "__import__":
                return frozenset({text.partition(".")[0]})
            if "importlib.import_module" in self.dotted(node.func):
                return frozenset({text})
        return _NONE

    def _is_parameter(self, node: ast.Name) -> bool:
        for outer in self.around(node):
            if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and node.id in parameters(outer):
                return True
        return False

    def is_any(self, node: ast.AST, names: frozenset[str]) -> str:
        """The first of `names` that `node` stands for; builtins are named bare. Empty: none."""
        seen = self.dotted(node)
        if not seen and isinstance(node, ast.Name) and node.id in names and not self._is_parameter(node):
            return node.id if node.id not in self.imports and not self.defines(node.id) else ""
        return next((name for name in sorted(seen) if name in names), "")

    def defines(self, name: str) -> bool:
        """Whether a function or class of this name is defined anywhere in the file."""
        return name in self._defined

    @cached_property
    def _defined(self) -> frozenset[str]:
        return frozenset(node.name for node in (*self.functions, *self.classes))


def parameters(node: FunctionNode | ast.Lambda) -> list[str]:
    """Names of the parameters, in order; starred ones last."""
    a = node.args
    starred = [item.arg for item in (a.vararg, a.kwarg) if item]
    return [item.arg for item in (*a.posonlyargs, *a.args, *a.kwonlyargs)] + starred


def literal(node: ast.AST | None) -> object:
    """The value of a constant (also a negated number), else None."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        return -value if isinstance(value, (int, float)) else None
    return None


def keywords(module: ParsedModule, call: ast.Call) -> dict[str, ast.expr]:
    """Keyword arguments by name; `**` of a literal dict, also through a name, is spread out."""
    found: dict[str, ast.expr] = {}
    for item in call.keywords:
        if item.arg:
            found[item.arg] = item.value
            continue
        for value in [item.value] if not isinstance(item.value, ast.Name) else module.flow.scopes.bindings(item.value):
            if isinstance(value, ast.Dict):
                pairs = zip(value.keys, value.values, strict=True)
                found.update({str(literal(key)): part for key, part in pairs if isinstance(literal(key), str)})
            elif isinstance(value, ast.Call) and getattr(value.func, "id", "") == "dict":
                found.update({part.arg: part.value for part in value.keywords if part.arg})
    return found


def exported(module: ParsedModule) -> list[str]:
    """Names that `from module import *` gives, `__all__` set aside."""
    names: list[str] = list(module.imports)
    for node in module.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_")]


def join_dotted(base: str, name: str) -> str:
    """`base.name`, where base may be dots alone."""
    return f"{base}{name}" if not base or base.endswith(".") else f"{base}.{name}"


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
        yield from zip(target.elts, value.elts, strict=False)
    else:
        yield target, value


def parse(path: Path, role: Role) -> ParsedModule:
    """Parse a file; one that cannot be read as Python gives a module without a tree that says why. Never raises."""
    empty = ast.Module(body=[], type_ignores=[])
    try:
        if path.stat().st_size > MAX_BYTES:
            return ParsedModule(path, role, "", empty, f"is larger than {MAX_BYTES // 1_000_000} MB")
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return ParsedModule(path, role, "", empty, "is not UTF-8")
    except OSError as fault:
        return ParsedModule(path, role, "", empty, f"cannot be read: {fault.strerror}")
    return parse_text(text, path, role)


def parse_text(text: str, path: Path, role: Role) -> ParsedModule:
    """The same, from text."""
    empty = ast.Module(body=[], type_ignores=[])
    try:
        tree = ast.parse(text)
        if _depth(tree) > _MAX_DEPTH:
            return ParsedModule(path, role, text, empty, f"nests expressions deeper than {_MAX_DEPTH}")
    except SyntaxError as fault:
        return ParsedModule(path, role, text, empty, f"is not Python: {fault.msg} (line {fault.lineno})")
    except (RecursionError, MemoryError, ValueError) as fault:
        return ParsedModule(path, role, text, empty, f"cannot be parsed: {type(fault).__name__}")
    return ParsedModule(path, role, text, tree)


def _depth(tree: ast.AST) -> int:
    level: list[ast.AST] = [tree]
    depth = 0
    while level:
        depth += 1
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if depth > _MAX_DEPTH:
            break
    return depth
