"""NaN and errors that are removed before they are seen."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.flow import PORT, VERDICT
from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.queries import compute_functions, in_any
from equiport.audit.rules.frame import in_forward, in_test
from equiport.audit.source import ParsedModule

_REPLACING = frozenset({"torch.nan_to_num", "numpy.nan_to_num", "torch.nan_to_num_"})
_TESTING = frozenset({"torch.isnan", "torch.isinf", "torch.isfinite", "numpy.isnan", "numpy.isfinite", "math.isnan"})
_CLAMPING = frozenset({"clamp", "clip", "clamp_", "clamp_max", "minimum"})
_FILLING = frozenset({"torch.where", "numpy.where"})


def check(module: ParsedModule) -> Iterator[Hit]:
    """nan_to_num, where(isnan), nanmean; errors that are clamped before they are judged."""
    if module.role not in (Role.TEST, Role.PORT):
        return
    computing = compute_functions(module) if module.role is Role.PORT else set()
    for call in module.calls:
        if module.role is Role.PORT and not in_any(module, call, computing):
            continue
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        soft = Severity.NOTE if module.role is Role.PORT else None
        if (
            module.is_any(call.func, _REPLACING)
            or method in ("nan_to_num", "nan_to_num_")
            or (module.is_any(call.func, _FILLING) or method == "masked_fill")
            and _asks_nan(module, call.args)
        ):
            yield Hit(call, "NaN becomes a number", soft)
        elif module.role is Role.TEST and method in ("nanmean", "nansum", "nanmedian"):
            yield Hit(call, f"{method} leaves NaN out")
        elif module.role is Role.TEST and method in _CLAMPING and _is_error(module, call):
            yield Hit(call, "the error is clamped before it is judged")


def _asks_nan(module: ParsedModule, arguments: list[ast.expr]) -> bool:
    return any(
        isinstance(item, ast.Call)
        and (module.is_any(item.func, _TESTING) or getattr(item.func, "attr", "") in ("isnan", "isinf"))
        for argument in arguments[:1]
        for item in ast.walk(argument)
    )


def _is_error(module: ParsedModule, call: ast.Call) -> bool:
    operands = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    for operand in [*operands, *call.args[:1]]:
        for item in ast.walk(operand):
            if isinstance(item, ast.BinOp) and isinstance(item.op, ast.Sub) and PORT in module.flow.origins(item):
                return True
        if VERDICT in module.flow.origins(operand):
            return True
    return False


RULE = Rule(
    id="hidden-nan",
    severity=Severity.ERROR,
    title="NaN or errors are hidden",
    why="NaN is what a fault often looks like; replaced, it looks like a small number.",
    remedy="Leave NaN and Inf in place: the comparator demands that both sides have them in the same places.",
    check=check,
    bad=(
        in_test("    out3 = torch.nan_to_num(out3)\n"),
        in_test("    out3 = out3.nan_to_num(0.0)\n"),
        in_test("    out3 = torch.where(torch.isnan(out3), out1, out3)\n"),
        in_test("    out3[torch.isnan(out3)] = 0\n    worst = (out1 - out3).abs().clamp(max=1e-4)\n"),
        in_test(judge="    assert (out1 - out3).abs().nanmean() < 1e-4\n"),
        in_forward("        return torch.nan_to_num(x)\n"),
    ),
    good=(
        in_test("    assert not torch.isnan(out3).any()\n"),
        in_forward("        return torch.where(x > 0, x, x * 0.1).clamp(min=-7.0, max=7.0)\n"),
    ),
)
