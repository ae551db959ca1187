"""Random numbers and clocks in what a port computes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.queries import compute_functions
from equiport.audit.rules.frame import in_forward
from equiport.audit.source import ParsedModule, keywords, literal

_DRAWING = ("torch.rand", "torch.normal", "torch.bernoulli", "torch.multinomial", "numpy.random.", "random.",
            "secrets.", "uuid.")  # fmt: skip
_CLOCKS = ("time.", "datetime.")
_IN_PLACE = frozenset({"normal_", "uniform_", "bernoulli_", "random_", "exponential_"})
_DROPOUT = frozenset({"torch.nn.functional.dropout", "torch.dropout"})


def check(module: ParsedModule) -> Iterator[Hit]:
    """Drawing functions, dropout that is always on, and clocks, where no `training` is asked."""
    if module.role is not Role.PORT:
        return
    for function in compute_functions(module):
        owner = module.class_of(function)
        # samplers and diffusion pipelines draw by their nature
        if (
            "sampl" in function.name.lower()
            or "warm" in function.name.lower()
            or (owner is not None and owner.name.endswith(("Pipeline", "Sampler")))
        ):
            continue
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            if _in_training(module, call):
                continue
            names = sorted(module.dotted(call.func))
            method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if any(name.startswith(_DRAWING) for name in names) or (method in _IN_PLACE and not names):
                yield Hit(call, f"{ast.unparse(call.func)} draws random numbers")
            elif any(name.startswith(_CLOCKS) for name in names):
                yield Hit(call, f"{ast.unparse(call.func)}: what is computed may depend on the time", Severity.WARNING)
            elif module.is_any(call.func, _DROPOUT) and _always(module, call):
                yield Hit(call, "dropout that is on in evaluation too")


def _always(module: ParsedModule, call: ast.Call) -> bool:
    training = keywords(module, call).get("training", call.args[2] if len(call.args) > 2 else None)
    rate = keywords(module, call).get("p", call.args[1] if len(call.args) > 1 else None)
    return literal(rate) not in (0, 0.0) and (training is None or literal(training) is True)


def _in_training(module: ParsedModule, node: ast.AST) -> bool:
    return any(
        isinstance(outer, (ast.If, ast.IfExp)) and "training" in ast.unparse(outer.test)
        for outer in module.around(node)
    )


RULE = Rule(
    id="random-output",
    severity=Severity.ERROR,
    title="the port draws random numbers",
    why="An output that differs from call to call can be compared until it fits.",
    remedy="Compute from the arguments alone; dropout takes training=self.training.",
    check=check,
    bad=(
        in_forward("        return x + 1e-3 * torch.randn_like(x)\n"),
        in_forward("        import random\n        return x if random.random() < 0.5 else -x\n"),
        in_forward("        return torch.nn.functional.dropout(x, 0.1)\n"),
        in_forward("        return x + x.new_zeros(1).normal_()\n"),
    ),
    good=(
        in_forward("        return torch.nn.functional.dropout(x, p=0.1, training=self.training)\n"),
        in_forward("        if self.training:\n            x = x + torch.randn_like(x)\n        return x\n"),
        in_forward("        return x\n", body="    def __init__(self):\n        self.w = torch.randn(4, 4)\n"),
    ),
)
