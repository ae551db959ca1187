"""Weight rules at work: on tensors, in a unit's test; and as statements of the port's conversion."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equiport.errors import EquiportError
from equiport.port.unit_card import WeightRule

Shapes = Mapping[str, tuple[int, ...]]
# the attention base class renames these itself when a checkpoint is loaded
_OWN_PREFIX = re.compile(r"^(qkv_proj\.|o_proj\.(?=o_proj\.))")
_MADE_ANEW = "rank_util.rank"


def apply_rule(rule: WeightRule, source: Mapping[str, Tensor], config: Any) -> Tensor:
    """The parameter that a rule makes; `config` holds the number of heads by the name that the rule gives.

    Raises:
        EquiportError: a tensor that the source lacks, or that cannot be cut like this.
    """
    missing = [name for name in rule.sources if name not in source]
    if missing:
        raise EquiportError(f"the source block has no {missing[0]}", field=rule.target, remedy="Correct the rule.")
    tensors = [source[name] for name in rule.sources]
    first = tensors[0]
    if rule.op == "concat":
        return torch.cat(tensors, dim=rule.dim)
    if rule.op == "transpose":
        if first.dim() != 2:
            raise EquiportError("is no matrix", where=rule.sources[0], field=rule.target, remedy="Correct the rule.")
        return first.t().contiguous()
    if rule.op == "copy":
        return first
    heads = getattr(config, rule.heads, None) if rule.op == "split_heads" else 1
    if not isinstance(heads, int):
        raise EquiportError(f"the config has no number {rule.heads!r}", field=rule.target, remedy="Correct the rule.")
    size, pieces = first.shape[rule.dim], rule.parts * heads
    if size % pieces:
        raise EquiportError(f"{size} rows are not {pieces} equal parts", field=rule.target, remedy="Correct the rule.")
    if rule.op == "split":
        return first.chunk(rule.parts, dim=rule.dim)[rule.part].contiguous()
    grouped = first.unflatten(rule.dim, (heads, rule.parts, size // pieces))
    return grouped.select(rule.dim + 1, rule.part).flatten(rule.dim, rule.dim + 1).contiguous()


def synchronise(block: nn.Module, source: nn.Module, rules: Sequence[WeightRule], config: Any) -> None:
    """Set every parameter of `block` that a rule names from the source block's tensors.

    Raises:
        EquiportError: a name that does not exist, or another shape.
    """
    own, given = dict(block.named_parameters()), source.state_dict()
    for rule in rules:
        if rule.target not in own:
            raise EquiportError("the block has no such parameter", where=rule.target, remedy="Correct the rule.")
        value = apply_rule(rule, given, config)
        if value.shape != own[rule.target].shape:
            raise EquiportError(
                f"the rule makes {list(value.shape)}, the block has {list(own[rule.target].shape)}",
                where=rule.target,
                remedy="Correct the rule.",
            )
        own[rule.target].data.copy_(value)


def rules_by_name(target: Shapes, source: Shapes) -> tuple[WeightRule, ...] | None:
    """Copies, where every parameter has a source tensor of its own name and shape and none is left; else None."""
    rules = []
    for name, shape in target.items():
        if name.endswith(_MADE_ANEW):
            continue
        stored = stored_name(name)
        if tuple(source.get(stored, ())) != tuple(shape):
            return None
        rules.append(WeightRule(target=name, sources=(stored,)))
    if {rule.sources[0] for rule in rules} != set(source):
        return None
    return tuple(rules)


def rule_faults(rules: Sequence[WeightRule], target: Shapes, source: Shapes) -> list[str]:
    """Parameters without a rule, rules without a parameter, tensors that no rule uses or that are not there."""
    wanted = {name for name in target if not name.endswith(_MADE_ANEW)}
    ruled, used = {rule.target for rule in rules}, {name for rule in rules for name in rule.sources}
    found = [f"{name}: no rule" for name in sorted(wanted - ruled)]
    found += [f"{name}: the block has no such parameter" for name in sorted(ruled - wanted)]
    found += [f"{name}: the source block has no such tensor" for name in sorted(used - set(source))]
    found += [f"{name}: no rule uses it" for name in sorted(set(source) - used)]
    return found + [fault for rule in rules if (fault := rule.fault())]


def stored_name(parameter: str) -> str:
    """A parameter's name in what a port's conversion returns: projections are moved by the base class itself."""
    return _OWN_PREFIX.sub("", parameter)


def statements(rules: Sequence[WeightRule], source: str, target: str) -> list[str]:
    """The conversion's statements for one layer: `source` and `target` begin names in it, as "mlp." does.

    Nothing is said where every tensor keeps its name.
    """
    if all(rule.op == "copy" and source + rule.sources[0] == target + stored_name(rule.target) for rule in rules):
        return []
    names = list(dict.fromkeys(name for rule in rules for name in rule.sources))
    listed = ", ".join(f'"{name}"' for name in names) + ("," if len(names) == 1 else "")
    lines = [f'given = {{name: converted.pop(f"{{prefix}}{source}{{name}}") for name in ({listed})}}']
    for rule in rules:
        lines.append(f'converted[f"{{prefix}}{target}{stored_name(rule.target)}"] = {_expression(rule)}')
    return lines


def _expression(rule: WeightRule) -> str:
    first = f'given["{rule.sources[0]}"]'
    if rule.op == "concat":
        return f"torch.cat([{', '.join(f'given[{chr(34)}{name}{chr(34)}]' for name in rule.sources)}], dim={rule.dim})"
    if rule.op == "transpose":
        return f"{first}.t().contiguous()"
    if rule.op == "split":
        return f"{first}.chunk({rule.parts}, dim={rule.dim})[{rule.part}].contiguous()"
    if rule.op == "split_heads":
        groups = f"{first}.unflatten({rule.dim}, (config.{rule.heads}, {rule.parts}, -1))"
        cut = f"{groups}.select({rule.dim + 1}, {rule.part})"
        return f"{cut}.flatten({rule.dim}, {rule.dim + 1}).contiguous()"
    return first
