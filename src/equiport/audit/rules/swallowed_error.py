"""Errors that do not surface."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.queries import compute_functions, in_any
from equiport.audit.rules.frame import in_forward, in_test
from equiport.audit.source import ParsedModule

_SUPPRESS = frozenset({"contextlib.suppress"})
_TRIES = tuple(kind for kind in (ast.Try, getattr(ast, "TryStar", None)) if kind is not None)


def check(module: ParsedModule) -> Iterator[Hit]:
    """try/except and suppress in tests; in ports, around what computes."""
    computing = compute_functions(module) if module.role is Role.PORT else set()
    for node in module.nodes:
        if module.role is Role.TEST:
            if isinstance(node, _TRIES) and not all(_raises(handler) for handler in node.handlers):
                yield Hit(node, "try/except in a test: errors must surface")
        elif module.role is Role.PORT and isinstance(node, _TRIES) and in_any(module, node, computing):
            for handler in node.handlers:
                if not _raises(handler) and _computes(node):
                    yield Hit(handler, "an error in what computes is swallowed", Severity.WARNING)
        where = module.role is Role.TEST or in_any(module, node, computing)
        if where and isinstance(node, ast.Call) and module.is_any(node.func, _SUPPRESS):
            yield Hit(node, "contextlib.suppress: errors must surface")


def _raises(handler: ast.ExceptHandler) -> bool:
    return any(
        isinstance(item, ast.Raise)
        or (isinstance(item, ast.Call) and ast.unparse(item.func) in ("pytest.fail", "self.fail"))
        for item in ast.walk(handler)
    )


def _computes(node: ast.AST) -> bool:
    """More than imports and prints: a value that something was called for is kept or returned."""
    return any(
        isinstance(item, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return))
        and item.value is not None
        and any(isinstance(part, ast.Call) for part in ast.walk(item.value))
        for item in getattr(node, "body", [])
    )


RULE = Rule(
    id="swallowed-error",
    severity=Severity.ERROR,
    title="errors are caught and dropped",
    why="A comparison that raised is then a pass, and a block that failed falls back to something else.",
    remedy="Remove the try/except; let errors surface directly.",
    check=check,
    bad=(
        in_test("    try:\n        out3 = target(x)\n    except Exception:\n        out3 = out1\n"),
        in_test("    import contextlib as c\n    with c.suppress(AssertionError):\n        assert 0\n"),
        in_forward(
            "        try:\n            return self.fused(x)\n        except Exception:\n"
            "            return self.plain(x)\n"
        ),
    ),
    good=(
        in_test("    with pytest.raises(ValueError):\n        target(None)\n"),
        in_test("    try:\n        target(x)\n    except RuntimeError as e:\n        pytest.fail(str(e))\n"),
        in_test("    try:\n        y = target(x)\n    finally:\n        target.train()\n"),
        in_forward(
            "        try:\n            return self.fused(x)\n        except RuntimeError as e:\n"
            "            raise ValueError from e\n"
        ),
        in_forward("        return x\n", head="try:\n    import nki\nexcept ImportError:\n    nki = None\n"),
    ),
)
