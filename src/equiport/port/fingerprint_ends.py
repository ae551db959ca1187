"""What stands before and after the layers: embedding factor, learned positions, final norm, logits factor and cap."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equiport.port.fingerprint import Multipliers, SourceNames
from equiport.port.fingerprint_probe import Probe, factor_between, same

_WORDS = ("mult", "scal", "factor", "depth", "cap", "base", "width", "emb", "norm")


@dataclass(frozen=True)
class Ends:
    """What was measured around the layers. `problems` is (facet, what did not fit)."""

    multipliers: Multipliers
    softcap: float | None
    learned_positions: bool
    position_offset: int
    problems: tuple[tuple[str, str], ...]


def read_ends(probe: Probe, names: SourceNames, full: Any, residual: float) -> Ends:
    """Factors and caps at the model's own width. `residual` is the factor measured in the layers."""
    problems: list[tuple[str, str]] = []
    embedding, offset, learned, why = _embedding(probe, names)
    if why:
        problems.append(("multipliers.embedding", why))
    logits, cap, why = _logits(probe, names, full)
    if why:
        problems.append(("multipliers.logits", why))
    told: dict[str, tuple[float, str]] = {}
    for facet, value in (("embedding", embedding), ("residual", residual), ("logits", logits)):
        found = explain_factor(value, probe.config, full)
        if found is None:
            problems.append((f"multipliers.{facet}", f"factor {value:.8g} follows from no config key"))
        told[facet] = found or (value, "")
    multipliers = Multipliers(
        embedding=told["embedding"][0],
        embedding_source=told["embedding"][1],
        embedding_rounded=_rounded(probe, names, embedding) if embedding != 1.0 else False,
        residual=told["residual"][0],
        residual_source=told["residual"][1],
        logits=told["logits"][0],
        logits_source=told["logits"][1],
    )
    return Ends(multipliers, cap, learned, offset, tuple(problems))


def explain_factor(value: float, tiny: Any, full: Any) -> tuple[float, str] | None:
    """The factor at the model's own width and the expression it comes from; (1.0, "") for none."""
    if abs(value - 1.0) < 1e-5:
        return 1.0, ""
    small, own = dict(_expressions(tiny)), dict(_expressions(full))
    for source, candidate in small.items():
        if abs(candidate - value) < 2e-5 * abs(value) and source in own:
            return own[source], source
    return None


def _expressions(config: Any) -> Iterator[tuple[str, float]]:
    hidden, layers = float(config.hidden_size), float(config.num_hidden_layers)
    values = config.to_dict()
    numbers = {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    }
    named = {key: value for key, value in numbers.items() if any(word in key for word in _WORDS)}
    for key, value in named.items():
        yield key, value
        yield f"1 / {key}", 1.0 / value
    yield "sqrt(hidden_size)", math.sqrt(hidden)
    for key, value in named.items():
        yield f"{key} / sqrt(num_hidden_layers)", value / math.sqrt(layers)
        yield f"{key} / hidden_size", value / hidden
        yield f"{key} * sqrt(hidden_size)", value * math.sqrt(hidden)


def _embedding(probe: Probe, names: SourceNames) -> tuple[float, int, bool, str]:
    """(factor, position offset, learned positions, problem)."""
    first = probe.call(f"{names.layers}.0")
    if first is None or not names.embedding:
        return 1.0, 0, False, "the first layer or the embedding was not seen being called"
    rows = _rows(probe.at(names.embedding), probe.tokens)
    if rows is None:
        return 1.0, 0, False, "the embedding keeps no table"
    x = first.input
    if names.embedding_norm:
        called = probe.call(names.embedding_norm)
        if called is None or not same(called.output, x):
            return 1.0, 0, False, "the norm on the embeddings does not give the first layer's input"
        x = called.input
    offset = 0
    if names.positions:
        positions = probe.at(names.positions)
        length = probe.tokens.shape[-1]
        for offset in range(3):
            learned = _rows(positions, torch.arange(offset, offset + length)[None])
            factor = factor_between(x - learned, rows) if learned is not None and learned.shape == x.shape else None
            if factor is not None:
                return factor, offset, True, ""
        return 1.0, 0, True, "embeddings plus learned positions do not give the first layer's input"
    factor = factor_between(x, rows) if x.shape == rows.shape else None
    if factor is None:
        return 1.0, 0, False, "the first layer's input is no multiple of the embeddings"
    return factor, offset, False, ""


def _rows(table: nn.Module, tokens: Tensor) -> Tensor | None:
    weight = getattr(table, "weight", None)
    return weight.detach()[tokens] if isinstance(weight, Tensor) else None


def _logits(probe: Probe, names: SourceNames, full: Any) -> tuple[float, float | None, str]:
    """(factor between final norm and logits, cap at the model's own scale, problem)."""
    head = probe.call(names.lm_head) if names.lm_head else None
    last = probe.call(f"{names.layers}.{_count(probe.at(names.layers)) - 1}")
    if head is None or last is None:
        return 1.0, None, "the head was not seen being called"
    hidden = last.output
    if names.final_norm:
        norm = probe.call(names.final_norm)
        if norm is None or not same(norm.input, hidden):
            return 1.0, None, "the final norm is not given the last layer's output"
        hidden = norm.output
    before = factor_between(head.input, hidden)
    if before is None:
        return 1.0, None, "the head's input is no multiple of the final norm's output"
    after = factor_between(probe.logits, head.output)
    if after is not None:
        return before * after, None, ""
    for key, value in probe.config.to_dict().items():
        if "cap" in key and isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            capped = value * torch.tanh(head.output / value)
            if same(probe.logits, capped):
                return before, float(getattr(full, key)), ""
    return before, None, "logits are neither a multiple of the head's output nor capped by a config value"


def _rounded(probe: Probe, names: SourceNames, factor: float) -> bool:
    """Whether the factor itself is rounded to bf16 before it multiplies, seen in a bf16 run of the embedding."""
    import copy

    half = copy.deepcopy(probe.model).to(torch.bfloat16)
    seen: list[Tensor] = []

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.extend(value.detach().clone() for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        raise _Seen

    handle = half.get_submodule(f"{names.layers}.0").register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with torch.no_grad():
            half(input_ids=probe.tokens, use_cache=False)
    except _Seen:
        pass
    except Exception:
        return False
    finally:
        handle.remove()
    if not seen:
        return False
    rows = _rows(half.get_submodule(names.embedding), probe.tokens)
    if rows is None:
        return False
    rounded = rows * torch.tensor(factor, dtype=torch.bfloat16)
    exact = (rows.float() * factor).to(torch.bfloat16)
    return int((rounded != seen[0]).sum()) < int((exact != seen[0]).sum())


class _Seen(Exception):
    """The embedding's result is known; the rest of the run is not needed."""


def _count(module: nn.Module) -> int:
    return len(list(module.children()))
