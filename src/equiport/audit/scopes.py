"""Scopes of a file: what each name is bound to, and where."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field

from equiport.audit.source import FunctionNode, ParsedModule, parameters

_FILLING = frozenset({"append", "extend", "add", "update", "copy_", "insert", "setdefault", "add_", "fill_", "put"})


@dataclass
class Scope:
    """A function's (or the file's) names: what each is bound to, and which are parameters."""

    node: FunctionNode | ast.Module | ast.Lambda
    outer: Scope | None
    bound: dict[str, list[ast.expr]] = field(default_factory=lambda: defaultdict(list))
    bound_at: dict[str, list[tuple[ast.expr, ast.AST]]] = field(default_factory=lambda: defaultdict(list))
    params: frozenset[str] = frozenset()


class Scopes:
    """The scopes of one file."""

    def __init__(self, module: ParsedModule) -> None:
        self.module = module
        self._scopes: dict[ast.AST, Scope] = {}
        self._bind_all()

    def scope_of(self, node: ast.AST) -> Scope:
        """The scope that an expression is evaluated in."""
        for outer in self.module.around(node):
            if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                return self.of(outer)
        return self.of(self.module.tree)

    def of(self, node: FunctionNode | ast.Lambda | ast.Module) -> Scope:
        """The scope that a function, or the file, opens."""
        if node not in self._scopes:
            if isinstance(node, ast.Module):
                self._scopes[node] = Scope(node, None)
            else:
                self._scopes[node] = Scope(node, self.scope_of(node), params=frozenset(parameters(node)))
        return self._scopes[node]

    def _bind_all(self) -> None:
        for node in self.module.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._bind(target, node.value, node)
            elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None:
                self._bind(node.target, node.value, node)
            elif isinstance(node, (ast.For, ast.AsyncFor)):
                self._bind(node.target, node.iter, node)
            elif isinstance(node, ast.NamedExpr):
                self._bind(node.target, node.value, node)
            elif isinstance(node, ast.comprehension):
                self._bind(node.target, node.iter, node)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                self._bind(node.optional_vars, node.context_expr, node)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _FILLING:
                base = node.func.value
                if isinstance(base, ast.Name):
                    for argument in node.args:
                        self._bind(base, argument, node)

    def _bind(self, target: ast.expr, value: ast.expr, at: ast.AST) -> None:
        if isinstance(target, ast.Name):
            scope = self.scope_of(at)
            scope.bound[target.id].append(value)
            scope.bound_at[target.id].append((value, at))
        elif isinstance(target, (ast.Tuple, ast.List)):
            same = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
            for index, item in enumerate(target.elts):
                part = ast.Subscript(value=value, slice=ast.Constant(index), ctx=ast.Load())
                # items of a loop or a generator stand for each other; a starred name shifts the places
                whole = isinstance(at, (ast.For, ast.AsyncFor, ast.comprehension)) or _starred(target)
                self._bind(item, value.elts[index] if same else value if whole else part, at)  # type: ignore[attr-defined]
        elif (
            isinstance(target, ast.Starred) or isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name)
        ):
            self._bind(target.value, value, at)

    def bindings(self, name: ast.Name) -> list[ast.expr]:
        """What a name is bound to in the scope that owns it; empty for parameters and unknown names."""
        scope: Scope | None = self.scope_of(name)
        while scope is not None:
            if name.id in scope.bound:
                return scope.bound[name.id]
            if name.id in scope.params:
                return []
            scope = scope.outer
        return []

    def last(self, name: ast.Name) -> ast.expr | None:
        """What a name is bound to where it is read, if that is certain: once, or last in a block around the use."""
        scope: Scope | None = self.scope_of(name)
        while scope is not None and name.id not in scope.bound_at:
            if name.id in scope.params:
                return None
            scope = scope.outer
        if scope is None:
            return None
        bound = scope.bound_at[name.id]
        line = getattr(name, "lineno", 0)
        before = [(value, at) for value, at in bound if 0 < getattr(at, "lineno", 0) < line]
        if len(bound) == 1:
            value, at = bound[0]
        elif before:
            value, at = max(before, key=lambda item: getattr(item[1], "lineno", 0))
            around = {self.module.parents.get(outer) for outer in (name, *self.module.around(name))}
            if self.module.parents.get(at) not in around or self._other_branch(at, name):
                return None
        else:
            return None
        certain = isinstance(at, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) or len(bound) == 1
        return value if certain and not isinstance(at, (ast.AugAssign, ast.For, ast.Call, ast.comprehension)) else None

    def _other_branch(self, at: ast.AST, use: ast.AST) -> bool:
        """Whether both lie in different branches of one `if` or `try`."""
        around = self.module.parents.get(at)
        branches = [getattr(around, name, None) or [] for name in ("body", "orelse", "finalbody")]
        inside = {use, *self.module.around(use)}
        own = [branch for branch in branches if isinstance(branch, list) and at in branch]
        return bool(own) and not any(item in inside for item in own[0])


def _starred(target: ast.Tuple | ast.List) -> bool:
    return any(isinstance(item, ast.Starred) for item in target.elts)
