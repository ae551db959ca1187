"""Attention: its parts are proposed by rules over its modules, and accepted when the formula reproduces its output."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from equiport.port.fingerprint import QkNormFacets, QkNormPlace, QkNormWidth, QkvLayout
from equiport.port.fingerprint_attention_formula import Heads, Hypothesis, Operands, core, split_heads
from equiport.port.fingerprint_norms import describe_norm, is_norm
from equiport.port.fingerprint_probe import Probe, same
from equiport.port.fingerprint_rope import RopeTable, may_slope
from equiport.port.fingerprint_structure import LayerParts, projections
from equiport.port.source_reading_model import numbered

_FUSED: tuple[QkvLayout, ...] = ("concat", "per_head", "grouped")


Settings = Sequence[tuple[Hypothesis, str]]


@dataclass(frozen=True)
class Projections:
    """Names of an attention's projections by what they make. Extras are those without a part."""

    query: str
    key: str
    value: str
    output: str
    extras: tuple[str, ...] = ()

    @property
    def fused(self) -> bool:
        """One projection makes all three."""
        return self.query == self.key


@dataclass(frozen=True)
class AttentionReading:
    """One layer's attention: parts, the setting that reproduces it (None: none does), and why not."""

    projections: Projections
    heads: Heads
    setting: Hypothesis | None
    scale_source: str
    sinks: str
    qk_norm: QkNormFacets | None
    extras: tuple[str, ...]
    problem: str = ""


def read_attention(
    probe: Probe, parts: LayerParts, query_heads: int, tables: list[RopeTable], known: Settings
) -> AttentionReading:
    """Read the attention of one layer. `known`, settings of other layers with their scale's source, are tried first."""
    path = parts.at(parts.attention)
    module, call = probe.at(path), probe.call(path)
    found = find_projections(probe, path)
    heads = Heads(query_heads, query_heads, 0)
    if call is None or found is None:
        names = Projections("", "", "", "", tuple(projections(module)))
        why = "its projections are no set of query, key, value and output"
        return AttentionReading(names, heads, None, "", "", None, names.extras, why)
    fused = probe.call(f"{path}.{found.query}")
    assert fused is not None
    made = {name: _rows(probe, f"{path}.{name}") for name in (found.query, found.key, found.value)}
    heads = head_counts(
        query_heads, found, {name: value.shape[-1] for name, value in made.items()}, _width(probe, path, found)
    )
    own = {name: value for name, value in module.named_parameters(recurse=False)}
    sinks = next((name for name, value in own.items() if value.numel() == heads.query), "")
    norms = _inner_norms(probe, path, heads)
    operands = Operands(
        made[found.query], made[found.key], made[found.value], heads, sinks=own[sinks].detach() if sinks else None
    )
    qk_norm, operands = _with_norms(probe, path, norms, operands)
    used = {name.split(".")[0] for name in (found.query, found.key, found.value, found.output, *norms)}
    extras = (
        *found.extras,
        *(name for name in own if name != sinks),
        *(
            name
            for name, child in module.named_children()
            if name not in used and any(True for _ in child.parameters()) and name not in found.extras
        ),
    )
    wanted = _result(probe, path, found)
    preferred = sorted(known, key=lambda item: item[0].table is not None and item[0].table.name != tables[0].name)
    attempts = itertools.chain(preferred, _settings(probe, module, operands, tables, found))
    for setting, source in attempts:
        with torch.no_grad():
            got = core(operands, setting)
        if got is not None and same(got, wanted, 5e-5):
            setting_norm = qk_norm and replace(qk_norm, place=_place(setting))
            return AttentionReading(found, heads, setting, source, sinks, setting_norm, extras)
    return AttentionReading(
        found, heads, None, "", sinks, qk_norm, extras, "no setting of the attention formula gives its output"
    )


def head_counts(query: int, found: Projections, widths: Mapping[str, int], inner: int) -> Heads:
    """Heads from the projections' output widths and `inner`, the width that the output projection takes."""
    width = inner // query
    key = (widths[found.query] // width - query) // 2 if found.fused else widths[found.key] // width
    return Heads(query, max(key, 1), width)


def find_projections(probe: Probe, path: str) -> Projections | None:
    """Names of the projections by what flows through them; None when they are no such set."""
    call = probe.call(path)
    module = probe.at(path)
    linears = projections(module)
    calls = {name: probe.call(f"{path}.{name}") for name in linears}
    if call is None:
        return None
    given = call.input.reshape(-1, call.input.shape[-1])
    first = [
        name for name, one in calls.items() if one and same(one.input.reshape(-1, one.input.shape[-1]), given, 1e-7)
    ]
    rest = [name for name in linears if name not in first]
    outputs = [name for name in rest if (one := calls[name]) and _ends(one.output, call.output)] or rest[-1:]
    if len(outputs) != 1:
        return None
    others = tuple(name for name in rest if name != outputs[0])
    if len(first) == 1:
        return Projections(first[0], first[0], first[0], outputs[0], others)
    chosen = [next((name for name in first if _means(name, letter)), "") for letter in ("q", "k", "v")]
    if len(first) < 3 or "" in chosen or len(set(chosen)) != 3:
        return None
    query, key, value = chosen
    return Projections(query, key, value, outputs[0], (*others, *(name for name in first if name not in chosen)))


def _means(name: str, letter: str) -> bool:
    leaf = name.rpartition(".")[2].lower()
    words = {"q": "query", "k": "key", "v": "value"}
    return bool(re.search(rf"(^|_)w?{letter}(_|$|proj|lin)", leaf)) or words[letter] in leaf


def _ends(made: Tensor, result: Tensor) -> bool:
    return made.numel() == result.numel() and same(made.reshape(-1), result.reshape(-1))


def _rows(probe: Probe, path: str) -> Tensor:
    call = probe.call(path)
    assert call is not None
    return call.output.reshape(-1, call.output.shape[-1])


def _width(probe: Probe, path: str, found: Projections) -> int:
    return int(_result(probe, path, found).shape[-1])


def _result(probe: Probe, path: str, found: Projections) -> Tensor:
    call = probe.call(f"{path}.{found.output}")
    assert call is not None
    return call.input.reshape(-1, call.input.shape[-1])


def _inner_norms(probe: Probe, path: str, heads: Heads) -> dict[str, tuple[str, nn.Module]]:
    """Norms inside the attention: name -> ("q", "k" or "", module). A list of norms counts as one."""
    module = probe.at(path)
    found: dict[str, tuple[str, nn.Module]] = {}
    for name, child in module.named_children():
        leaves = [leaf for leaf in child.modules() if not any(leaf.children())]
        width = _norm_width(leaves[0]) or heads.width if leaves else heads.width
        if leaves and all(is_norm(leaf, width) for leaf in leaves) and "norm" in f"{name}{type(child)}".lower():
            side = next((letter for letter in ("q", "k") if _means(name, letter)), "")
            found[name] = (side, child)
    return found


def _norm_width(module: nn.Module) -> int:
    weight = next((parameter for parameter in module.parameters(recurse=False)), None)
    return 0 if weight is None else int(weight.shape[-1])


def _with_norms(
    probe: Probe, path: str, norms: dict[str, tuple[str, nn.Module]], operands: Operands
) -> tuple[QkNormFacets | None, Operands]:
    """Add the norms on q and k to the operands, each applied in the arrangement in which the source called it."""
    sides = {side: (name, module) for name, (side, module) in norms.items() if side}
    shared = [(name, module) for name, (side, module) in norms.items() if not side]
    if len(shared) == 1 and not sides:
        sides = {"q": shared[0], "k": shared[0]}
    if set(sides) != {"q", "k"}:
        return None, operands
    applied: dict[str, Callable[[Tensor], Tensor]] = {}
    widths: set[QkNormWidth] = set()
    for side, count in (("q", operands.heads.query), ("k", operands.heads.key)):
        name, module = sides[side]
        calls = probe.calls.get(f"{path}.{name}", ())
        if not calls:
            return None, operands
        call = calls[-1] if side == "k" and len(calls) > 1 else calls[0]
        full = call.input.shape[-1] == count * operands.heads.width and count > 1
        heads_first = call.input.dim() == 4 and call.input.shape[1] == count and not full
        applied[side] = _arranged(module, full=full, heads_first=heads_first)
        widths.add("full" if full else "per_head_weights" if any(module.children()) or _stacked(module) else "head")
    name, module = sides["q"]
    leaf = next(one for one in module.modules() if not any(one.children()))
    width = _norm_width(leaf) or int(probe.calls[f"{path}.{name}"][0].input.shape[-1])
    facets = QkNormFacets(
        name, sides["k"][0], "unknown", sorted(widths)[0], describe_norm(numbered(f"{path}.{name}"), leaf, width)
    )
    return facets, replace(operands, norm_query=applied["q"], norm_key=applied["k"])


def _stacked(module: nn.Module) -> bool:
    return any(parameter.dim() == 2 for parameter in module.parameters(recurse=False))


def _arranged(module: nn.Module, *, full: bool, heads_first: bool) -> Callable[[Tensor], Tensor]:
    def apply(x: Tensor) -> Tensor:
        if heads_first:
            return module(x)
        view = x.transpose(1, 2)
        if full:
            return module(view.flatten(-2)).reshape(view.shape).transpose(1, 2)
        return module(view).transpose(1, 2)

    return apply


def _place(setting: Hypothesis) -> QkNormPlace:
    return "after_rope" if setting.norm_after_rope else "before_rope"


def _settings(
    probe: Probe, module: nn.Module, operands: Operands, tables: list[RopeTable], found: Projections
) -> Iterator[tuple[Hypothesis, str]]:
    """Every hypothesis that the config and the module's own constants suggest, simplest first."""
    layouts = [layout for layout in _FUSED if split_heads(operands, layout)] if found.fused else ["separate"]
    # [q | k | v] with as many key heads as query heads also splits as one group per head
    caps = [None, *_constants(module, probe.config, "softcap")]
    windows = [None, *sorted({int(value) for value in _constants(module, probe.config, "window") if value > 1})]
    clips = [*_constants(module, probe.config, "clip"), None]
    turns: list[tuple[RopeTable | None, bool]] = [(table, inter) for table in tables for inter in (False, True)]
    turns.append((None, False))
    sloped = may_slope(module)
    orders = (False, True) if operands.norm_query else (False,)
    for layout, cap, window, clip, (table, interleaved), after in itertools.product(
        layouts, caps, windows, clips, turns, orders
    ):
        for scale, source in _scales(module, probe.config, operands.heads):
            for alibi in [None, scale, 1.0] if sloped else [None]:
                yield Hypothesis(layout, scale, table, interleaved, after, cap, window, clip, alibi), source  # type: ignore[arg-type]


def _scales(module: nn.Module, config: Any, heads: Heads) -> list[tuple[float, str]]:
    found: list[tuple[float, str]] = []
    for key, value in _numbers(config):
        if "attn" in key or "attention" in key or "scal" in key or "mult" in key:
            if value == 1.0 and ("attn" in key or "attention" in key):
                found.append((value, key))
            elif value > 0 and value != 1.0:
                found += [(value, key), (value**-0.5, key), (1.0 / value, key)]
    plain = [(heads.width**-0.5, "head_dim"), (1.0, ""), (1.0 / heads.width, "1/head_dim")]
    own = [
        (float(value), f"{type(module).__name__}.{name}")
        for name, value in vars(module).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and "scal" in name and value > 0
    ]
    named = [(value, key) for value, key in found if any(abs(value - mine) < 1e-9 * mine for mine, _ in own)]
    # a key of the attention's own before one that has the same value by chance
    named.sort(key=lambda item: not any(word in item[1] for word in ("attention", "attn", "query")))
    values: dict[float, str] = {}
    for value, source in [*plain[:1], *named, *plain[1:], *own, *found]:
        values.setdefault(value, source)
    return list(values.items())


def _constants(module: nn.Module, config: Any, word: str) -> list[float]:
    values = [value for key, value in _numbers(config) if word in key and "final" not in key and "layers" not in key]
    values += [
        float(value)
        for name, value in vars(module).items()
        if word in name and isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    return list(dict.fromkeys(value for value in values if value > 0))


def _numbers(config: Any) -> Iterator[tuple[str, float]]:
    for key, value in config.to_dict().items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield key, float(value)
