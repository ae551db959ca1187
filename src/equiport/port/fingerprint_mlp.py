"""Feed-forward blocks: kind, layout and activation, accepted when they reproduce what the down projection was given."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equiport.port.fingerprint import GateUpLayout, MlpFacets, MlpKind
from equiport.port.fingerprint_probe import Probe, same
from equiport.port.fingerprint_structure import LayerParts, projections

_NAMES = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "gelu_new", "tanh", "sigmoid", "mish")
_CONFIG_NAMES = ("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act", "act_fn")


def read_mlp(probe: Probe, parts: LayerParts) -> tuple[MlpFacets | None, str]:
    """Facets of a dense block with the widths of the small model, or None and what did not fit."""
    owner = probe.at(parts.at(parts.mlp)) if parts.mlp else probe.at(parts.path)
    base = parts.at(parts.mlp)
    linears = projections(owner) if parts.mlp else {name: probe.at(parts.at(name)) for name in parts.inline_mlp}
    calls = {name: probe.call(f"{base}.{name}") for name in linears}
    seen = {name: call for name, call in calls.items() if call is not None}
    if parts.mlp:
        block = probe.call(base)
        given = block.input if block else None
    else:
        given = next(iter(seen.values())).input if seen else None
    if given is None or len(seen) != len(linears) or len(linears) not in (2, 3):
        return None, f"{len(linears)} projections in {type(owner).__name__}, of which {len(seen)} are called"
    flat = given.reshape(-1, given.shape[-1])
    ups = [name for name, call in seen.items() if same(call.input.reshape(-1, call.input.shape[-1]), flat)]
    downs = [name for name in seen if name not in ups]
    if len(downs) != 1:
        return None, f"no single down projection among {', '.join(seen)}"
    down_input = seen[downs[0]].input
    wanted = down_input.reshape(-1, down_input.shape[-1])
    outputs = {name: seen[name].output.reshape(-1, seen[name].output.shape[-1]) for name in ups}
    for kind, layout, gate, up, value_pair in _arrangements(outputs, wanted.shape[-1]):
        for name, parameters, act in _activations(owner, probe.config):
            if same(_gated(act, *value_pair), wanted, 1e-5):
                return (
                    MlpFacets(
                        name=parts.mlp,
                        cls=type(owner).__name__,
                        kind=kind,
                        layout=layout,
                        activation=name,
                        intermediate_size=int(wanted.shape[-1]),
                        gate_name=gate,
                        up_name=up,
                        down_name=downs[0],
                        up_bias=getattr(linears[up], "bias", None) is not None,
                        down_bias=getattr(linears[downs[0]], "bias", None) is not None,
                        activation_parameters=parameters,
                    ),
                    "",
                )
    return None, f"no known arrangement and activation of {', '.join(ups)} gives the input of {downs[0]}"


def activation_claims(config: Any) -> dict[str, str]:
    """Activation names that the config gives: key -> name."""
    return {
        key: value for key in _CONFIG_NAMES if isinstance(value := getattr(config, key, None), str) and value.strip()
    }


def same_activation(left: str, right: str) -> bool:
    """Whether two activation names compute the same."""
    try:
        x = torch.linspace(-4, 4, 101)
        return same(_by_name(left)(x), _by_name(right)(x), 1e-6)
    except (KeyError, TypeError, AttributeError):
        return False


def _arrangements(
    outputs: dict[str, Tensor], width: int
) -> Iterator[tuple[MlpKind, GateUpLayout, str, str, tuple[Tensor, Tensor | None]]]:
    """Ways to read the up projections: kind, layout, gate's and up's names, (gate or only value, up or None)."""
    names = list(outputs)
    if len(names) == 2:
        for gate, up in (names, names[::-1]):
            yield "gated", "separate", gate, up, (outputs[gate], outputs[up])
        return
    only = outputs[names[0]]
    if only.shape[-1] == width:
        yield "ungated", "separate", "", names[0], (only, None)
    if only.shape[-1] == 2 * width:
        first, second = only.chunk(2, dim=-1)
        yield "gated", "gate_first", names[0], names[0], (first, second)
        yield "gated", "up_first", names[0], names[0], (second, first)
        yield "gated", "interleaved", names[0], names[0], (only[..., ::2], only[..., 1::2])


def _gated(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor | None) -> Tensor:
    try:
        with torch.no_grad():
            value = act(gate)
    except Exception:
        return torch.empty(0)
    if not isinstance(value, Tensor) or (up is not None and value.shape != up.shape):
        return torch.empty(0)
    return value if up is None else value * up


def _activations(owner: nn.Module, config: Any) -> Iterator[tuple[str, tuple[str, ...], Callable[[Tensor], Tensor]]]:
    claimed = list(activation_claims(config).values())
    for name in dict.fromkeys([*claimed, *_NAMES]):
        try:
            function = _by_name(name)
        except (KeyError, TypeError, AttributeError):
            continue
        if not any(True for _ in function.parameters()):
            yield name, (), function
    for child_name, child in owner.named_children():
        parameters = tuple(name for name, _ in child.named_parameters())
        if not any(child.children()) and not isinstance(child, (nn.Linear, nn.Dropout)):
            label = next(iter(claimed), type(child).__name__.lower())
            yield label, tuple(f"{child_name}.{name}" for name in parameters), child


def _by_name(name: str) -> nn.Module:
    from transformers.activations import ACT2FN

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ACT2FN[name]
