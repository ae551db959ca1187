"""Outputs that depend on which tensor, or on how often."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.queries import compute_functions, in_any
from equiport.audit.rules.frame import in_forward
from equiport.audit.source import FunctionNode, ParsedModule, literal

_CACHING = frozenset({"functools.lru_cache", "functools.cache"})


def check(module: ParsedModule) -> Iterator[Hit]:
    """id(), data_ptr() and call counts in what the port computes."""
    if module.role is not Role.PORT:
        return
    computing = compute_functions(module)
    for call in module.calls:
        if in_any(module, call, computing):
            if isinstance(call.func, ast.Name) and call.func.id in ("id", "hash") and not module.defines(call.func.id):
                if _is_key(module, call):
                    yield Hit(call, f"{call.func.id}() of an object decides what is computed")
            elif isinstance(call.func, ast.Attribute) and call.func.attr in (
                "data_ptr",
                "storage_ptr",
                "untyped_storage",
            ):
                yield Hit(call, f"{call.func.attr}() of a tensor decides what is computed")
    for function in computing:
        cached = any(
            module.is_any(item.func if isinstance(item, ast.Call) else item, _CACHING)
            for item in function.decorator_list
        )
        if cached and _takes_tensor(function):
            yield Hit(function, "a cache keyed on the tensors' identity", Severity.WARNING)
        yield from _counted(module, function)


def _takes_tensor(function: FunctionNode) -> bool:
    return any(
        item.annotation is not None and "Tensor" in ast.dump(item.annotation)
        for item in (*function.args.args, *function.args.kwonlyargs)
    )


def _is_key(module: ParsedModule, call: ast.Call) -> bool:
    """Used to look something up, to compare, or kept; not printed."""
    for outer in module.around(call):
        if isinstance(outer, (ast.Subscript, ast.Compare, ast.Assign, ast.Dict, ast.Tuple, ast.Return, ast.If)):
            return True
        if isinstance(outer, ast.Call) and getattr(outer.func, "attr", "") in ("get", "setdefault", "pop", "add"):
            return True
        if isinstance(outer, (ast.stmt, ast.JoinedStr)):
            return False
    return False


def _counted(module: ParsedModule, function: ast.AST) -> Iterator[Hit]:
    """`self.calls += 1` and a branch on it in the same function."""
    counters = {
        node.target.attr: node
        for node in ast.walk(function)
        if isinstance(node, ast.AugAssign)
        and isinstance(node.target, ast.Attribute)
        and getattr(node.target.value, "id", "") == "self"
        and literal(node.value) == 1
    }
    for node in ast.walk(function):
        test = node.test if isinstance(node, (ast.If, ast.IfExp)) else None
        for item in ast.walk(test) if test is not None else ():
            if isinstance(item, ast.Attribute) and item.attr in counters and getattr(item.value, "id", "") == "self":
                yield Hit(counters[item.attr], f"what is computed depends on how often it was called ({item.attr})")
                return


RULE = Rule(
    id="stateful-cache",
    severity=Severity.ERROR,
    title="outputs depend on identity or on call counts",
    why="The second call, or the call on a device, then gives something else than the one that was tested.",
    remedy="Compute from the arguments' values; state goes into the KV cache.",
    check=check,
    bad=(
        in_forward("        if id(x) in self.seen:\n            return self.seen[id(x)]\n        return x\n"),
        in_forward("        return self.seen.get(x.data_ptr(), x)\n"),
        in_forward("        self.calls += 1\n        return x if self.calls < 3 else -x\n"),
    ),
    good=(
        in_forward("        self.cache[0] = x\n        return x\n"),
        in_forward("        return x if self.training else -x\n"),
        in_forward("        return x\n", body="    def load(self, t):\n        self.known[id(t)] = t\n"),
    ),
)
