"""The reference is bent until it agrees."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.flow import PORT, REFERENCE
from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.rules.frame import in_test
from equiport.audit.source import ParsedModule, literal

#: What a test may set on the source's modules: values of weights, and how they are run.
_ALLOWED = frozenset({"weight", "bias", "data", "grad", "requires_grad", "training", "config", "_attn_implementation",
                      "_attn_implementation_internal", "use_cache", "device", "dtype", "generation_config",
                      "pad_token_id", "padding_side"})  # fmt: skip
_STEPPING = frozenset({"register_forward_hook", "register_forward_pre_hook", "register_module_forward_hook"})


def check(module: ParsedModule) -> Iterator[Hit]:
    """Attributes of the source's modules that a test assigns, parts that it deletes, hooks that change results."""
    if module.role is not Role.TEST:
        return
    for node in module.nodes:
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
            targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]
            for target in targets:
                if isinstance(target, ast.Attribute):
                    yield from _assigned(module, node, target.value, target.attr)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", "")
            if name in ("setattr", "delattr") and len(node.args) >= 2:
                yield from _assigned(module, node, node.args[0], str(literal(node.args[1]) or "?"))
            elif _hooks(module, node):
                yield Hit(node, "a hook changes what the source gives")


def _hooks(module: ParsedModule, call: ast.Call) -> bool:
    function = call.func
    stepping = isinstance(function, ast.Attribute) and function.attr in _STEPPING
    return (
        isinstance(function, ast.Attribute)
        and stepping
        and _of_reference(module, function.value)
        and _changes(module, call)
    )


def _of_reference(module: ParsedModule, node: ast.expr) -> bool:
    origins = module.flow.origins(node)
    return REFERENCE in origins and PORT not in origins and not module.dotted(node)


def _assigned(module: ParsedModule, at: ast.AST, base: ast.expr, name: str) -> Iterator[Hit]:
    if name in _ALLOWED or name.endswith(("weight", "bias")) or _in_config(base):
        return
    if _of_reference(module, base):
        yield Hit(at, f"{name} of the source's module is changed")


def _in_config(base: ast.expr) -> bool:
    """Configs have a rule of their own."""
    return "config" in ast.unparse(base).rpartition(".")[2].lower()


def _changes(module: ParsedModule, call: ast.Call) -> bool:
    """Whether the hook gives something back: a hook that only looks returns None."""
    hook = call.args[0] if call.args else None
    if isinstance(hook, ast.Lambda):
        return not (isinstance(hook.body, ast.Call) and getattr(hook.body.func, "attr", "") in
                    ("append", "setdefault", "update", "__setitem__")) and literal(hook.body) is None  # fmt: skip
    if isinstance(hook, ast.Name):
        for function in module.functions:
            if function.name == hook.id:
                return any(isinstance(item, ast.Return) and item.value is not None and literal(item.value) != ""
                           and not (isinstance(item.value, ast.Constant) and item.value.value is None)
                           for item in ast.walk(function))  # fmt: skip
    return False


RULE = Rule(
    id="reference-edited",
    severity=Severity.ERROR,
    title="the reference is changed by the test",
    why="A source that was bent to the port agrees with the port, and no longer with itself.",
    remedy="Run the source as it is; copy weights and nothing else.",
    check=check,
    bad=(
        in_test("    ref_fp32.act_fn = torch.nn.Identity()\n    ref_bf16.act_fn = torch.nn.Identity()\n"),
        in_test("    ref_bf16.eps = 1e-3\n"),
        in_test('    setattr(ref_fp32, "scaling", 1.0)\n'),
        in_test("    del ref_fp32.gate_proj\n"),
        in_test("    ref_fp32.register_forward_hook(lambda module, given, out: out * 1.01)\n"),
    ),
    good=(
        in_test("    ref_fp32.up_proj.weight.data.copy_(target.up_proj.weight)\n    ref_fp32.training = False\n"),
        in_test("    seen = []\n    ref_fp32.register_forward_hook(lambda m, i, out: seen.append(out))\n"),
        in_test("    ref_fp32.config._attn_implementation = 'eager'\n"),
    ),
)
