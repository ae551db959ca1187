"""Inputs and weights under which every port gives the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.flow import PORT, REFERENCE
from equiport.audit.identity import root_of
from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.rules.frame import in_test
from equiport.audit.source import ParsedModule, keywords, literal

_FLAT = frozenset({"torch.zeros", "torch.ones", "torch.full", "torch.zeros_like", "torch.ones_like", "torch.full_like",
                   "numpy.zeros", "numpy.ones"})  # fmt: skip
_STATES = ("hidden_states", "x", "inputs_embeds", "inputs", "input", "input_ids")
_FILLING = frozenset({"torch.nn.init.zeros_", "torch.nn.init.constant_", "torch.nn.init.ones_"})


def check(module: ParsedModule) -> Iterator[Hit]:
    """Zeros, ones or one number as the hidden states or tokens of both sides; weights filled with one number."""
    if module.role is not Role.TEST:
        return
    for call in module.calls:
        given = keywords(module, call)
        states = [given[name] for name in _STATES if name in given]
        if _is_port(module, call):
            for value in (*call.args[:1], *states):
                yield from _flat(module, call, value)
        elif getattr(call.func, "id", getattr(call.func, "attr", "")) == "test_block_correctness":
            for name in ("test_inputs", "example_inputs"):
                for value in _items(module, given.get(name)):
                    yield from _flat(module, call, value)
        yield from _weights(module, call)


def _is_port(module: ParsedModule, call: ast.Call) -> bool:
    """A call of an instance of the port, not of its class."""
    if module.dotted(call.func) or not isinstance(call.func, (ast.Name, ast.Attribute)):
        return False
    if isinstance(call.func, ast.Attribute) and call.func.attr != "forward":
        return False
    return PORT in module.flow.origins(call.func)


def _items(module: ParsedModule, value: ast.expr | None) -> list[ast.expr]:
    """What hidden states or tokens a list of inputs holds: of a dict or tuple the first."""
    if isinstance(value, ast.Name):
        value = module.flow.scopes.last(value)
    if not isinstance(value, (ast.List, ast.Tuple)):
        return []
    found: list[ast.expr] = []
    for item in value.elts:
        if isinstance(item, ast.Tuple) and item.elts:
            found.append(item.elts[0])
        elif isinstance(item, ast.Dict):
            pairs = zip(item.keys, item.values, strict=True)
            found += [part for key, part in pairs if literal(key) in _STATES]
        else:
            found.append(item)
    return found


def _flat(module: ParsedModule, at: ast.AST, value: ast.expr) -> Iterator[Hit]:
    root = root_of(module.flow, value)
    name = module.is_any(root.func, _FLAT) if isinstance(root, ast.Call) else ""
    if name:
        yield Hit(at, f"the input is {name.rpartition('.')[2]}: no weight can be told from another")


def _weights(module: ParsedModule, call: ast.Call) -> Iterator[Hit]:
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    target: ast.expr | None = None
    if module.is_any(call.func, _FILLING) and call.args:
        target = call.args[0]
    elif isinstance(call.func, ast.Attribute) and (method == "zero_" or (method == "fill_" and call.args
                                                   and literal(call.args[0]) is not None)):  # fmt: skip
        target = call.func.value
    if target is not None and "weight" in ast.unparse(target) and module.flow.origins(target) & {PORT, REFERENCE}:
        yield Hit(call, f"{ast.unparse(target)[:50]} is filled with one number")


RULE = Rule(
    id="flat-inputs",
    severity=Severity.ERROR,
    title="inputs or weights under which all ports agree",
    why="Zeros times anything are zeros; equal inputs hide every permutation.",
    remedy="Draw inputs and weights at random; masks and caches may be constant.",
    check=check,
    bad=(
        in_test("    z = torch.zeros(2, 24, 64)\n    out1, out2, out3 = ref_fp32(z), ref_bf16(z), target(z)\n"),
        in_test("    out3 = target(hidden_states=torch.ones(2, 24, 64).bfloat16())\n"),
        in_test("    target.up_proj.weight.data.zero_()\n    ref_bf16.up_proj.weight.data.zero_()\n"),
        in_test("    torch.nn.init.constant_(target.up_proj.weight, 0.02)\n"),
        in_test(
            run="", judge="    test_block_correctness(NeuronMLP, LlamaMLP, {}, test_inputs=[torch.zeros(2, 24, 64)])\n"
        ),
    ),
    good=(
        in_test("    out3 = target(x.bfloat16(), torch.ones(2, 24))\n"),
        in_test("    target.bias.data.zero_()\n"),
        in_test(
            run="", judge="    inputs = [(torch.randn(2, 24, 64), torch.zeros(2, 24))]\n"
            "    test_block_correctness(NeuronMLP, LlamaMLP, {}, test_inputs=inputs)\n",
        ),
    ),
)  # fmt: skip
