"""Data flow inside one file: from which sides a value derives. Flow-insensitive within a function: no order is needed
to say that no data of a side can have reached an expression.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field

from equiport.audit.names import BLOCK_TESTS, PREDICATES, STACK_ROOTS, TENSOR_COMPARATORS, VERDICTS, hf_kind
from equiport.audit.source import FunctionNode, ParsedModule, literal, parameters

Origins = frozenset[str]
NONE: Origins = frozenset()
REFERENCE, PORT, UNKNOWN, DRAWN, FILE, VERDICT, MEASURED, TOOLKIT = (
    "reference", "port", "unknown", "drawn", "file", "verdict", "measured", "toolkit",
)  # fmt: skip
READERS = frozenset({"torch.load", "numpy.load", "pickle.load", "pickle.loads", "json.load", "json.loads", "open",
                     "numpy.loadtxt", "joblib.load"})  # fmt: skip
_PURE = frozenset({"float", "clone", "detach", "to", "cpu", "contiguous", "double", "bfloat16", "half", "type", "numpy",
                   "view", "reshape", "squeeze", "unsqueeze", "flatten", "item", "copy", "data", "last_hidden_state",
                   "logits", "view_as", "type_as", "requires_grad_", "expand_as"})  # fmt: skip
_BUDGET = 150_000
_FILLING = frozenset({"append", "extend", "add", "update", "copy_", "insert", "setdefault", "add_", "fill_", "put"})


@dataclass
class Scope:
    """A function's (or the file's) names: what each is bound to, and which are parameters."""

    node: FunctionNode | ast.Module | ast.Lambda
    outer: Scope | None
    bound: dict[str, list[ast.expr]] = field(default_factory=lambda: defaultdict(list))
    params: frozenset[str] = frozenset()


class Flow:
    """Origins of expressions in one file. `origins(node)` is a set of: reference, port, unknown (a parameter nobody
    fills here), drawn (random), file, verdict (a comparator's), measured, toolkit, `local:Class`, `work:module.name`.
    """

    def __init__(self, module: ParsedModule) -> None:
        self.module = module
        self.scopes: dict[ast.AST, Scope] = {}
        self._memo: dict[ast.AST, Origins] = {}
        self._busy: set[object] = set()
        self._functions_busy: set[ast.AST] = set()
        self._cuts = self._steps = 0
        self._functions: dict[str, list[FunctionNode]] = defaultdict(list)
        self._classes = {node.name: node for node in module.classes}
        self._calls: dict[str, list[ast.Call]] = defaultdict(list)
        for function in module.functions:
            self._functions[function.name].append(function)
        for call in module.calls:
            name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            if name in self._functions:
                self._calls[name].append(call)
        self._bind_all()

    # scopes

    def scope_of(self, node: ast.AST) -> Scope:
        """The scope that an expression is evaluated in."""
        for outer in self.module.around(node):
            if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                return self._scope(outer)
        return self._scope(self.module.tree)

    def _scope(self, node: FunctionNode | ast.Lambda | ast.Module) -> Scope:
        if node not in self.scopes:
            if isinstance(node, ast.Module):
                self.scopes[node] = Scope(node, None)
            else:
                self.scopes[node] = Scope(node, self.scope_of(node), params=frozenset(parameters(node)))
        return self.scopes[node]

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
            self.scope_of(at).bound[target.id].append(value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            same = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
            for index, item in enumerate(target.elts):
                self._bind(item, value.elts[index] if same else value, at)  # type: ignore[attr-defined]
        elif isinstance(target, ast.Starred):
            self._bind(target.value, value, at)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
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

    # origins

    def origins(self, node: ast.AST | None) -> Origins:
        """From which sides an expression may derive."""
        if node is None or isinstance(node, ast.Constant):
            return NONE
        if node in self._memo:
            return self._memo[node]
        if node in self._busy:
            self._cuts += 1
            return NONE
        self._steps += 1
        if self._steps > _BUDGET:
            return frozenset({UNKNOWN})
        self._busy.add(node)
        before = self._cuts
        found = self._origins(node)
        self._busy.discard(node)
        if not self._busy or self._cuts == before:
            # what a cycle cut short is not kept
            self._memo[node] = found
        return found

    @property
    def exhausted(self) -> bool:
        """Whether the file was too tangled to be followed to its end."""
        return self._steps > _BUDGET

    def _origins(self, node: ast.AST) -> Origins:
        if isinstance(node, ast.Name):
            return self._of_name(node)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.Attribute):
            seen = self.module.dotted(node)
            return self._of_dotted(seen) if seen else self.origins(node.value)
        if isinstance(node, ast.Lambda):
            return self.origins(node.body)
        return frozenset().union(*(self.origins(child) for child in ast.iter_child_nodes(node)))

    def _of_name(self, node: ast.Name) -> Origins:
        found: set[str] = set()
        for value in self.bindings(node):
            found |= self.origins(value)
        scope: Scope | None = self.scope_of(node)
        while scope is not None and node.id not in scope.bound:
            if node.id in scope.params:
                return frozenset(found) | self._of_parameter(scope.node, node.id)
            scope = scope.outer
        if scope is not None and node.id in scope.params:
            found |= self._of_parameter(scope.node, node.id)
        if node.id in self._classes:
            found |= self.of_class(self._classes[node.id])
        elif node.id in self._functions:
            found |= frozenset().union(*(self.of_function(item) for item in self._functions[node.id]))
        return frozenset(found) | self._of_dotted(self.module.dotted(node))

    def _of_parameter(self, owner: ast.AST, name: str) -> Origins:
        """A fixture's value, the values of a parametrisation, or what the calls in this file pass."""
        if not isinstance(owner, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return frozenset({UNKNOWN})
        key = (owner, name)
        if key in self._busy:
            self._cuts += 1
            return NONE
        self._busy.add(key)
        try:
            return self._filled(owner, name)
        finally:
            self._busy.discard(key)

    def _filled(self, owner: FunctionNode, name: str) -> Origins:
        fixtures = [item for item in self._functions.get(name, ()) if is_fixture(self.module, item)]
        if fixtures:
            return frozenset().union(*(self.of_function(item) for item in fixtures))
        for decorator in owner.decorator_list:
            if isinstance(decorator, ast.Call) and getattr(decorator.func, "attr", "") == "parametrize":
                names = literal(decorator.args[0]) if decorator.args else None
                if isinstance(names, str) and name in [part.strip() for part in names.split(",")]:
                    return frozenset().union(*(self.origins(item) for item in decorator.args[1:]))
        if name in ("self", "cls"):
            return NONE
        order = parameters(owner)
        offset = 1 if order[:1] in (["self"], ["cls"]) else 0
        found: set[str] = set()
        calls = self._calls.get(owner.name, [])
        for call in calls:
            index = order.index(name) - offset
            for keyword in call.keywords:
                if keyword.arg in (name, None):
                    found |= self.origins(keyword.value)
            if 0 <= index < len(call.args):
                found |= self.origins(call.args[index])
        return frozenset(found) if calls else frozenset({UNKNOWN})

    def of_function(self, node: FunctionNode) -> Origins:
        """What a function gives back: its returned and yielded expressions."""
        if node in self._functions_busy:
            self._cuts += 1
            return NONE
        self._functions_busy.add(node)
        found: set[str] = set()
        for item in ast.walk(node):
            if isinstance(item, (ast.Return, ast.Yield, ast.YieldFrom)) and self.module.function_of(item) is node:
                found |= self.origins(item.value)
        self._functions_busy.discard(node)
        return frozenset(found)

    def of_class(self, node: ast.ClassDef) -> Origins:
        """What a class is made of: imported names that its body mentions, and itself as `local:Name`."""
        found = {f"local:{node.name}"}
        for item in ast.walk(node):
            if isinstance(item, (ast.Name, ast.Attribute)):
                found |= self._of_dotted(self.module.dotted(item))
                if isinstance(item, ast.Name) and item.id in self._classes and item.id != node.name:
                    found.add(f"local:{item.id}")
        return frozenset(found - {UNKNOWN})

    def _of_call(self, node: ast.Call) -> Origins:
        found = set(self.origins(node.func))
        if isinstance(node.func, ast.Name) and node.func.id == "open" and not self.module.dotted(node.func):
            found.add(FILE)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            found |= self.origins(argument)
        return frozenset(found)

    def _of_dotted(self, names: Origins) -> Origins:
        found: set[str] = set()
        for name in names:
            root = name.partition(".")[0]
            kind = hf_kind(name)
            if kind:
                found |= {REFERENCE} if kind in ("leaf", "block") else set()
            elif root == "transformers":
                continue
            elif name in TENSOR_COMPARATORS:
                found.add(MEASURED)
            elif name in VERDICTS or name in PREDICATES or name in BLOCK_TESTS:
                found.add(VERDICT)
            elif name in READERS:
                found.add(FILE)
            elif root in STACK_ROOTS:
                found.add(PORT)
            elif root == "equiport":
                found.add(TOOLKIT)
            elif self.module.work is not None and self.module.work.inside(name):
                found |= self._of_work(name)
            elif root == "torch" and name.rpartition(".")[2] in ("randn", "rand", "randint", "randn_like", "rand_like"):
                found.add(DRAWN)
            elif root not in _KNOWN:
                # an original source outside the work folder
                found.add(f"external:{root}")
        return frozenset(found)

    def _of_work(self, name: str) -> Origins:
        from equiport.audit.model import Role

        other = self.module.work.module(name) if self.module.work else None
        if other is None or other is self.module:
            return frozenset({UNKNOWN})
        if other.role in (Role.PORT, Role.PATCH):
            return frozenset({PORT})
        if other.path.name in ("conftest.py", "tensor_compare.py", "block_testing_utils.py"):
            return frozenset({UNKNOWN}) if other.path.name == "conftest.py" else frozenset({TOOLKIT})
        wanted = name.rpartition(".")[2]
        if wanted == other.name:
            return frozenset({f"work:{other.name}"})
        key = (other.path, wanted)
        if key in self._busy:
            self._cuts += 1
            return NONE
        self._busy.add(key)
        node = ast.copy_location(
            ast.Name(id=wanted, ctx=ast.Load()), other.tree.body[0] if other.tree.body else ast.Pass()
        )
        found = other.flow.of_module_name(node)
        self._busy.discard(key)
        return found | {f"work:{other.name}.{wanted}"}

    def of_module_name(self, node: ast.Name) -> Origins:
        """Origins of a name at the top level of this file, for a file that imports it."""
        return frozenset(item for item in self._of_name(node) if not item.startswith("local:"))

    # identity

    def root(self, node: ast.expr, depth: int = 0) -> ast.AST | str:
        """The call or name that a value is, read through names bound once and steps that keep the values."""
        if depth > 40:
            return node
        if isinstance(node, ast.Name):
            bound = self.bindings(node)
            if len(bound) == 1 and not isinstance(bound[0], (ast.GeneratorExp, ast.ListComp)):
                return self.root(bound[0], depth + 1)
            return f"name {node.id} of {id(self.scope_of(node))}"
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in _PURE:
                return self.root(node.func.value, depth + 1)
            if self.module.dotted(node.func) & {"copy.deepcopy", "copy.copy", "torch.clone", "torch.as_tensor"}:
                return self.root(node.args[0], depth + 1) if node.args else node
            return node
        if isinstance(node, ast.Attribute) and node.attr in _PURE:
            return self.root(node.value, depth + 1)
        if isinstance(node, ast.BinOp):
            keeps = {ast.Add: 0, ast.Sub: 0, ast.Mult: 1, ast.Div: 1}.get(type(node.op))
            if keeps is not None and literal(node.right) == keeps:
                return self.root(node.left, depth + 1)
        if isinstance(node, ast.Subscript):
            return f"{ast.dump(node.slice)} of {self._named(self.root(node.value, depth + 1))}"
        return node

    @staticmethod
    def _named(root: ast.AST | str) -> str:
        return root if isinstance(root, str) else f"node {id(root)}"

    def same(self, one: ast.expr, other: ast.expr) -> bool:
        """Whether two expressions are one value."""
        return self._named(self.root(one)) == self._named(self.root(other))

    # constants

    def number(self, node: ast.AST | None, depth: int = 0) -> float | None:
        """The number that an expression is known to be: literals, arithmetic on them, names bound to one value."""
        value = literal(node)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if depth > 20 or node is None:
            return None
        if isinstance(node, ast.Name):
            bound = self.bindings(node)
            numbers = [self.number(item, depth + 1) for item in bound]
            if numbers and all(item is not None for item in numbers):
                return max(item for item in numbers if item is not None)
            return self._imported_number(self.module.dotted(node), depth) if not bound else None
        if isinstance(node, ast.Attribute):
            return self._imported_number(self.module.dotted(node), depth)
        if isinstance(node, ast.BinOp):
            left, right = self.number(node.left, depth + 1), self.number(node.right, depth + 1)
            if left is None or right is None:
                return None
            try:
                if isinstance(node.op, ast.Mult):
                    return left * right
                if isinstance(node.op, ast.Add):
                    return left + right
                if isinstance(node.op, ast.Div):
                    return left / right
                if isinstance(node.op, ast.Sub):
                    return left - right
                if isinstance(node.op, ast.Pow) and abs(right) < 100:
                    value = left**right
                    return float(value) if isinstance(value, (int, float)) else None
            except (ArithmeticError, ValueError):
                return None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "float" and node.args:
            text = literal(node.args[0])
            try:
                return float(text) if isinstance(text, (str, int, float)) else None
            except ValueError:
                return None
        return None

    def _imported_number(self, names: Origins, depth: int) -> float | None:
        for name in sorted(names):
            other = self.module.work.module(name) if self.module.work else None
            if other is not None and other is not self.module:
                bound = other.flow._scope(other.tree).bound.get(name.rpartition(".")[2], [])
                numbers = [other.flow.number(item, depth + 1) for item in bound]
                if numbers and all(item is not None for item in numbers):
                    return max(item for item in numbers if item is not None)
        return None


_KNOWN = frozenset({
    "torch", "numpy", "pytest", "math", "copy", "os", "sys", "json", "pathlib", "typing", "random", "functools",
    "itertools", "dataclasses", "collections", "time", "logging", "warnings", "re", "inspect", "tempfile", "einops",
    "contextlib", "__future__", "abc", "enum", "types", "gc", "shutil", "subprocess", "safetensors", "scipy", "tqdm",
    "unittest", "argparse", "operator", "string", "statistics", "importlib", "pickle", "hypothesis", "io",
})  # fmt: skip


def is_fixture(module: ParsedModule, node: FunctionNode) -> bool:
    """Whether a function is a pytest fixture."""
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if "pytest.fixture" in module.dotted(target):
            return True
    return False


def on_reference_side(origins: Origins) -> bool:
    """Whether a value may come from the source model: from transformers, an outside file, or whoever calls."""
    return bool(origins & {REFERENCE, UNKNOWN, TOOLKIT}) or any(item.startswith("external:") for item in origins)


def on_port_side(origins: Origins) -> bool:
    """Whether a value may come from the port."""
    return bool(origins & {PORT, UNKNOWN, TOOLKIT}) or any(item.startswith("external:") for item in origins)


def made_here(origins: Origins) -> list[str]:
    """Classes and functions of the work folder that a value derives from."""
    return sorted(item.partition(":")[2] for item in origins if item.startswith(("local:", "work:")))
