"""How a layer adds its branches: a layout is accepted only when it reproduces the layer's own tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from equiport.port.fingerprint import LayerNorms, ResidualLayout
from equiport.port.fingerprint_probe import Call, Probe, factor_between, same
from equiport.port.fingerprint_structure import LayerParts


@dataclass(frozen=True)
class Residual:
    """What was measured in one layer. `problem` says what did not fit."""

    layout: ResidualLayout
    norms: LayerNorms
    factor: float = 1.0
    problem: str = ""


def read_residual(probe: Probe, parts: LayerParts) -> Residual:
    """Norm places, layout and branch factor of one layer, from the tensors that flowed through it."""
    layer = probe.call(parts.path)
    mixer = probe.call(parts.at(parts.attention or parts.recurrent))
    block = _feed_forward(probe, parts)
    if layer is None or mixer is None or block is None:
        return _unknown("attention or feed-forward block was not seen being called")
    mixer, block = _shaped(mixer, layer.input), _shaped(block, layer.input)
    norms = [(name, call) for name in parts.norms for call in probe.calls.get(parts.at(name), ())]
    x, y = layer.input, layer.output
    norms = [(name, _shaped(call, x)) for name, call in norms if call.input.numel() == call.output.numel() == x.numel()]
    attn_in = "" if same(mixer.input, x) else _name(norms, given=x, made=mixer.input)
    if attn_in is None:
        return _unknown("the attention's input is neither the layer's input nor a norm of it")
    attn_out, a = _after(norms, mixer.output, exclude=attn_in)
    before, mlp_in = block.input, ""
    for name, call in norms:
        if call.output.shape == block.input.shape and same(call.output, block.input):
            before, mlp_in = call.input, name
    mlp_out, m = _after(norms, block.output, exclude=mlp_in)
    found = LayerNorms(attn_in, attn_out, mlp_in, mlp_out)
    if same(before, x):
        factor = factor_between(y - x, a + m)
        if factor is None:
            return _unknown("a parallel layer whose output is not x + factor * (attention + mlp)", found)
        if attn_out or mlp_out or not attn_in or not mlp_in:
            return _unknown("a parallel layer with norms in places of no known layout", found, factor)
        return Residual("parallel_one_norm" if mlp_in == attn_in else "parallel_two_norms", found, factor)
    first, second = factor_between(before - x, a), factor_between(y - before, m)
    if first is None or second is None:
        return _unknown("the layer's output is not the sum of its branches", found)
    if abs(first - second) > 1e-4 * abs(first):
        return _unknown(f"branches are added with different factors {first:.6g} and {second:.6g}", found)
    layouts: dict[tuple[bool, bool, bool, bool], ResidualLayout] = {
        (True, False, True, False): "pre_norm",
        (False, True, False, True): "post_norm",
        (True, True, True, True): "sandwich",
    }
    layout = layouts.get((bool(attn_in), bool(attn_out), bool(mlp_in), bool(mlp_out)))
    if layout is None:
        return _unknown("norms stand in places of no known layout", found, first)
    return Residual(layout, found, _snapped(first))


def _feed_forward(probe: Probe, parts: LayerParts) -> Call | None:
    if parts.mlp:
        return probe.call(parts.at(parts.mlp))
    calls = [probe.call(parts.at(name)) for name in parts.inline_mlp]
    if len(calls) != 2 or calls[0] is None or calls[1] is None:
        return None
    return Call(calls[0].input, calls[1].output)


def _shaped(call: Call, like: Tensor) -> Call:
    """Some sources flatten the batch inside a layer."""
    if call.input.numel() != like.numel() or call.output.numel() != like.numel():
        return call
    return Call(call.input.reshape(like.shape), call.output.reshape(like.shape))


def _name(norms: list[tuple[str, Call]], *, given: Tensor, made: Tensor) -> str | None:
    return next((name for name, call in norms if same(call.input, given) and same(call.output, made)), None)


def _after(norms: list[tuple[str, Call]], value: Tensor, *, exclude: str) -> tuple[str, Tensor]:
    for name, call in norms:
        if name != exclude and same(call.input, value):
            return name, call.output
    return "", value


def _snapped(factor: float) -> float:
    return 1.0 if abs(factor - 1.0) < 1e-5 else factor


def _unknown(problem: str, norms: LayerNorms | None = None, factor: float = 1.0) -> Residual:
    return Residual("unknown", norms or LayerNorms(), _snapped(factor), problem)
