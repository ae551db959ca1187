"""Data flow inside one file: from which sides a value derives. Flow-insensitive within a function: no order is needed
to say that no data of a side can have reached an expression.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable

from equiport.audit.names import BLOCK_TESTS, PREDICATES, STACK_ROOTS, TENSOR_COMPARATORS, VERDICTS, hf_kind
from equiport.audit.scopes import Scope, Scopes
from equiport.audit.source import FunctionNode, ParsedModule, literal, parameters

Origins = frozenset[str]
#: a class of the source that is no leaf: what a port must not contain
SOURCE_BLOCK = "source-block"
NONE: Origins = frozenset()
REFERENCE, PORT, UNKNOWN, DRAWN, FILE, VERDICT, MEASURED, TOOLKIT = (
    "reference", "port", "unknown", "drawn", "file", "verdict", "measured", "toolkit",
)  # fmt: skip
READERS = frozenset({"torch.load", "numpy.load", "pickle.load", "pickle.loads", "json.load", "json.loads", "open",
                     "numpy.loadtxt", "joblib.load"})  # fmt: skip
_BUDGET = 150_000


class Flow:
    """Origins of expressions in one file. `origins(node)` is a set of: reference, port, unknown (a parameter nobody
    fills here), drawn (random), file, verdict (a comparator's), measured, toolkit, `local:Class`, `work:module.name`.
    """

    def __init__(self, module: ParsedModule) -> None:
        self.module = module
        self.scopes = Scopes(module)
        # final, of this round, and the best so far
        self._memo: dict[object, Origins] = {}
        self._round: dict[object, Origins] = {}
        self._known: dict[object, Origins] = {}
        self._busy: set[object] = set()
        self._in_circles: set[object] = set()
        self._grown, self._steps = False, 0
        self._module_names: dict[str, ast.Name] = {}
        self._functions: dict[str, list[FunctionNode]] = defaultdict(list)
        self._classes = {node.name: node for node in module.classes}
        self._calls: dict[str, list[ast.Call]] = defaultdict(list)
        for function in module.functions:
            self._functions[function.name].append(function)
        for call in module.calls:
            name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
            if name in self._functions:
                self._calls[name].append(call)

    def origins(self, node: ast.AST | None) -> Origins:
        """From which sides an expression may derive."""
        if node is None or isinstance(node, ast.Constant):
            return NONE
        return self._solve(node, lambda: self._origins(node))

    def _solve(self, key: object, compute: Callable[[], Origins]) -> Origins:
        """The least fixed point: what is cut short in a circle is evaluated again until nothing grows."""
        if key in self._memo:
            return self._memo[key]
        if key in self._round:
            return self._round[key]
        if key in self._busy:
            self._in_circles.add(key)
            return self._known.get(key, NONE)
        self._steps += 1
        if self._steps > _BUDGET:
            return frozenset({UNKNOWN})
        outermost = not self._busy
        while True:
            self._busy.add(key)
            found = compute()
            self._busy.discard(key)
            if found != self._known.get(key, NONE):
                self._known[key] = found
                self._grown = self._grown or key in self._in_circles
            self._round[key] = found
            if not outermost:
                return found
            again, self._grown = self._grown, False
            if not again or self._steps > _BUDGET:
                break
            self._round.clear()
        self._memo.update(self._round)
        self._round.clear()
        self._in_circles.clear()
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
        if isinstance(node, ast.Subscript):
            parts = self.returned_parts(node)
            if parts:
                return frozenset().union(*(self.origins(part) for part in parts))
        return frozenset().union(*(self.origins(child) for child in ast.iter_child_nodes(node)))

    def _of_name(self, node: ast.Name) -> Origins:
        found: set[str] = set()
        for value in self.scopes.bindings(node):
            found |= self.origins(value)
        scope: Scope | None = self.scopes.scope_of(node)
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
        return self._solve((owner, name), lambda: self._filled(owner, name))

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
        return self._solve(("function", node), lambda: self._returned(node))

    def _returned(self, node: FunctionNode) -> Origins:
        found: set[str] = set()
        for item in ast.walk(node):
            if isinstance(item, (ast.Return, ast.Yield, ast.YieldFrom)) and self.module.function_of(item) is node:
                found |= self.origins(item.value)
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
        given: set[str] = set()
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            given |= self.origins(argument)
        roots = {name.partition(".")[0] for name in self.module.dotted(node.func)}
        if FILE in given and not roots & {"torch", "numpy", "json", "pickle"}:
            # a config that was read, and what is built from it, is no stored result
            given.discard(FILE)
        return frozenset(found | given)

    def _of_dotted(self, names: Origins) -> Origins:
        found: set[str] = set()
        for name in names:
            root = name.partition(".")[0]
            kind = hf_kind(name)
            if kind:
                found |= {REFERENCE} if kind == "leaf" else {REFERENCE, SOURCE_BLOCK} if kind == "block" else set()
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
        return self._solve((other.path, wanted), lambda: other.flow.of_module_name(wanted)) | {
            f"work:{other.name}.{wanted}"
        }

    def of_module_name(self, name: str) -> Origins:
        """Origins of a name at the top level of this file, for a file that imports it."""
        if name not in self._module_names:
            # located at the file's end, so that every binding counts
            self._module_names[name] = ast.Name(id=name, ctx=ast.Load())
        return frozenset(item for item in self.origins(self._module_names[name]) if not item.startswith("local:"))

    def returned_parts(self, node: ast.Subscript) -> list[ast.expr]:
        """`f(...)[1]` of a function of this file that returns tuples, or of a fixture: the second element of each."""
        index, call = literal(node.slice), node.value
        if isinstance(call, ast.Name):
            bound = self.scopes.bindings(call)
            call = bound[0] if len(bound) == 1 else call
        return self._tuple_parts(call, index, 0) if isinstance(index, int) else []

    def _tuple_parts(self, value: ast.expr | None, index: int, depth: int) -> list[ast.expr]:
        """Elements at `index` of the tuples that a call of a function of this file gives, or a fixture's value."""
        name = value.func if isinstance(value, ast.Call) else value
        functions = self._functions.get(name.id, []) if isinstance(name, ast.Name) else []
        if not isinstance(value, ast.Call):
            functions = [item for item in functions if is_fixture(self.module, item)]
        if depth > 4:
            return []
        parts: list[ast.expr] = []
        for function in functions:
            for item in ast.walk(function):
                if isinstance(item, (ast.Return, ast.Yield)) and self.module.function_of(item) is function:
                    found = item.value
                    if isinstance(found, (ast.Tuple, ast.List)) and -len(found.elts) <= index < len(found.elts):
                        parts.append(found.elts[index])
                        continue
                    deeper = self._tuple_parts(found, index, depth + 1)
                    if not deeper:
                        return []
                    parts += deeper
        return parts


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
