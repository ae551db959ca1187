"""Weights that the checkpoint does not have."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from equiport.audit.model import Hit, Role, Rule, Severity
from equiport.audit.rules.frame import in_forward
from equiport.audit.rules.uninitialised import names_written, passed_on
from equiport.audit.source import ParsedModule

_DRAWN = frozenset({"torch.randn", "torch.rand", "torch.empty", "torch.randn_like", "torch.rand_like",
                    "torch.empty_like", "torch.normal"})  # fmt: skip
_FLAT = frozenset({"torch.zeros", "torch.ones", "torch.full", "torch.zeros_like", "torch.ones_like", "torch.eye",
                   "torch.full_like"})  # fmt: skip
_CONVERTING = ("state_dict", "convert", "load_weights", "remap", "update_state")


def check(module: ParsedModule) -> Iterator[Hit]:
    """Drawn or constant tensors that a conversion stores under a weight's name."""
    if module.role not in (Role.PORT, Role.PATCH):
        return
    for node in module.nodes:
        if not isinstance(node, ast.Assign):
            continue
        function = module.function_of(node)
        if function is None or not any(word in function.name for word in _CONVERTING):
            continue
        for target in node.targets:
            if isinstance(target, ast.Subscript) and "dict" in ast.unparse(target.value).lower():
                name = ast.unparse(target.slice)
                if isinstance(node.value, ast.Name) and (
                    node.value.id in names_written(function) or passed_on(function, node.value)
                ):
                    continue
                drawn = _made_by(module, node.value, _DRAWN)
                flat = _made_by(module, node.value, _FLAT)
                if drawn:
                    yield Hit(node, f"{name[:50]} is drawn by {drawn}: no checkpoint has it")
                elif flat and "weight" in name and "norm" not in name.lower():
                    yield Hit(node, f"{name[:50]} is filled by {flat}: no checkpoint has it", Severity.WARNING)


def _made_by(module: ParsedModule, value: ast.expr, names: frozenset[str]) -> str:
    """The function that made the whole value; conversions of dtype and copies are looked through."""
    node: ast.expr = value
    while isinstance(node, ast.Call):
        found = module.is_any(node.func, names)
        if found:
            return found.rpartition(".")[2]
        if isinstance(node.func, ast.Attribute) and node.func.attr in (
            "to",
            "clone",
            "contiguous",
            "bfloat16",
            "float",
        ):
            node = node.func.value
            continue
        return ""
    if isinstance(node, ast.Name):
        bound = module.flow.scopes.last(node)
        return _made_by(module, bound, names) if bound is not None and not isinstance(bound, ast.Name) else ""
    return ""


def _converted(text: str) -> str:
    return f"    @staticmethod\n    def convert_hf_to_neuron_state_dict(state_dict, config):\n{text}"


RULE = Rule(
    id="invented-weights",
    severity=Severity.ERROR,
    title="a weight is invented by the conversion",
    why="What the checkpoint lacks is a mistake in the mapping; filled in, nobody misses it.",
    remedy="Find the tensor in the checkpoint; what the source itself makes up is made up in the module.",
    check=check,
    bad=(
        in_forward(
            "        return x\n",
            body=_converted('        state_dict["lm_head.weight"] = torch.randn(4, 4)\n        return state_dict\n'),
        ),
        in_forward(
            "        return x\n",
            body=_converted(
                '        fill = torch.empty(4, 4)\n        state_dict["up_proj.weight"] = fill.to(torch.bfloat16)\n'
                "        return state_dict\n"
            ),
        ),
        in_forward(
            "        return x\n",
            body=_converted('        state_dict["gate.weight"] = torch.ones(4, 4)\n        return state_dict\n'),
        ),
    ),
    good=(
        in_forward(
            "        return x\n",
            body=_converted(
                '        state_dict["rank_util.rank"] = torch.arange(0, config.tp, dtype=torch.int32)\n'
                '        state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()\n'
                '        state_dict["k_proj.bias"] = torch.zeros(4)\n        return state_dict\n'
            ),
        ),
        in_forward(
            "        return x\n",
            body=_converted(
                "        fused = torch.empty(4, 8)\n        fused[:, :4] = state_dict['gate.weight']\n"
                "        fused[:, 4:] = state_dict['up.weight']\n        state_dict['gate_up.weight'] = fused\n"
                "        return state_dict\n"
            ),
        ),
        in_forward("        out = {}\n        out[0] = torch.zeros(2)\n        return x\n"),
    ),
)
