"""The source's modules put into the port by the test."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.flow import PORT, REFERENCE
from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.rules.frame import in_test
from equiport.audit.source import FunctionNode, ParsedModule, literal, parameters

#: What two blocks may share: values, not code.
_VALUES = frozenset({"weight", "bias", "data", "grad", "training", "config", "dtype", "device", "requires_grad", "eps"})
_CODE = frozenset({"forward", "__call__", "__class__", "_call_impl", "__dict__"})


def check(module: ParsedModule) -> Iterator[Hit]:
    """Modules of the source that become attributes of the port, and forwards that are assigned."""
    if module.role is not Role.TEST:
        return
    syncing = _sync_functions(module)
    for node in module.nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute):
                    yield from _splice(module, node, target.value, target.attr, node.value, syncing)
        elif isinstance(node, ast.Call) and len(node.args) >= 2:
            name = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
            if name == "setattr" and len(node.args) == 3:
                attribute = literal(node.args[1])
                yield from _splice(module, node, node.args[0], str(attribute), node.args[2], syncing)
            elif name in ("add_module", "register_module") and isinstance(node.func, ast.Attribute):
                yield from _splice(module, node, node.func.value, str(literal(node.args[0])), node.args[1], syncing)


def _splice(
    module: ParsedModule, at: ast.AST, base: ast.expr, name: str, value: ast.expr, syncing: set[FunctionNode]
) -> Iterator[Hit]:
    last = value.attr if isinstance(value, ast.Attribute) else ""
    if name in _CODE:
        yield Hit(at, f"{name} of a module is replaced by the test")
    elif name in _VALUES or last in _VALUES or not isinstance(value, (ast.Name, ast.Attribute)):
        return
    elif _joins(module, base, value) or (module.function_of(at) in syncing and _first(value) in _second(module, at)):
        yield Hit(at, f"{ast.unparse(value)} of the source becomes a part of the port")


def _joins(module: ParsedModule, base: ast.expr, value: ast.expr) -> bool:
    """A value of the source on a value of the port; classes (of a config's field, say) are no values."""
    ends = PORT in module.flow.origins(base) and REFERENCE in module.flow.origins(value)
    return ends and not module.dotted(value) and PORT not in module.flow.origins(value)


def _sync_functions(module: ParsedModule) -> set[FunctionNode]:
    names = {
        item.value.id
        for call in module.calls
        for item in call.keywords
        if item.arg == "sync_weights_fn" and isinstance(item.value, ast.Name)
    }
    return {function for function in module.functions if function.name in names}


def _second(module: ParsedModule, at: ast.AST) -> list[str]:
    function = module.function_of(at)
    return parameters(function)[1:2] if function is not None else []


def _first(value: ast.expr) -> str:
    while isinstance(value, (ast.Attribute, ast.Subscript)):
        value = value.value
    return getattr(value, "id", "")


RULE = Rule(
    id="spliced-module",
    severity=Severity.ERROR,
    title="the source's modules are put into the port",
    why="The port then runs the source's code where it is tested, and its own where it is not.",
    remedy="Copy weights (parameters), never modules or functions.",
    check=check,
    bad=(
        in_test("    target.inner = ref_bf16\n"),
        in_test("    target.up_proj = ref_bf16.up_proj\n"),
        in_test("    target.forward = lambda x: ref_bf16(x)\n"),
        in_test('    setattr(target, "up_proj", ref_bf16.up_proj)\n'),
        in_test(
            run="",
            judge="    test_block_correctness(NeuronMLP, LlamaMLP, {}, sync_weights_fn=sync)\n",
            head="\n\ndef sync(port, source):\n    port.up_proj = source.up_proj\n",
        ),
    ),
    good=(
        in_test("    target.up_proj.weight = torch.nn.Parameter(ref_bf16.up_proj.weight.clone())\n"),
        in_test("    target.up_proj.weight.data = ref_bf16.up_proj.weight.data\n"),
        in_test("    CONFIG.neuron_config.attn_cls = NeuronMLP\n"),
        in_test(
            run="",
            judge="    test_block_correctness(NeuronMLP, LlamaMLP, {}, sync_weights_fn=sync)\n",
            head="\n\ndef sync(port, source):\n    port.up_proj.weight.data.copy_(source.up_proj.weight)\n",
        ),
    ),
)
