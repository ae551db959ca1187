"""Rotary tables: read from the module that makes them, and named by the formula that reproduces them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equiport.port.fingerprint import RopeFacets, RopeKind
from equiport.port.fingerprint_probe import Probe, same

_KINDS: tuple[RopeKind, ...] = ("linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_SCALING = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class RopeTable:
    """Frequencies [rotary_dim / 2] as the small model uses them."""

    name: str
    path: str
    cls: str
    frequencies: Tensor
    factor: float  # on cos and sin


def find_tables(probe: Probe, head_dim: int) -> list[RopeTable]:
    """The tables of the small model; the classic table of the config where no module keeps frequencies."""
    tables: list[RopeTable] = []
    for path, module in probe.model.named_modules():
        if ".1" in path or any(part.isdigit() and part != "0" for part in path.split(".")):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name and buffer.dim() == 1:
                kind = name.removesuffix("inv_freq").rstrip("_")
                label = kind or ("default" if not tables else path.rpartition(".")[2])
                factor = factor_of(module, kind)
                tables.append(RopeTable(label, path, type(module).__name__, buffer.detach().float(), factor))
    if not tables and "rotary_dim" in probe.config.to_dict():
        dim = probe.config.rotary_dim or head_dim
        tables.append(RopeTable("default", "", "", classic(10000.0, dim), 1.0))
    return tables


def factor_of(module: nn.Module, kind: str) -> float:
    """The factor on cos and sin that a rotary module keeps; `kind` is the layer type its name begins with, or ""."""
    value = getattr(module, f"{kind}_attention_scaling" if kind else "attention_scaling", 1.0)
    return float(value) if isinstance(value, (int, float)) else 1.0


def classic(theta: float, dim: int) -> Tensor:
    """theta^(-2j/dim), [dim / 2]."""
    return torch.tensor([theta ** (-2 * j / dim) for j in range(dim // 2)], dtype=torch.float32)


def rotate(x: Tensor, table: RopeTable, *, interleaved: bool) -> Tensor:
    """x [B, H, T, D] turned by positions 0..T-1 in its first rotary channels."""
    dim = 2 * table.frequencies.numel()
    if dim > x.shape[-1]:
        return torch.empty(0)
    angles = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] * table.frequencies
    cos, sin = angles.cos() * table.factor, angles.sin() * table.factor
    turned, rest = x[..., :dim], x[..., dim:]
    if interleaved:
        even, odd = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def describe_table(
    table: RopeTable,
    tiny: Any,
    full: Any,
    *,
    interleaved: bool | None,
    head_dims: tuple[int, int],
    attention_factor: float,
) -> tuple[RopeFacets, list[str]]:
    """Facets of a table at the model's own width, and what does not fit.

    `tiny` and `full` are the config objects, `head_dims` the small and the full head_dim, `attention_factor` that of
    the model itself: the small one's follows from its shortened positions. The kind is what the config
    says, if the frequencies bear it out.
    """
    problems: list[str] = []
    small_dim = 2 * table.frequencies.numel()
    parameters = dict(_parameters(full, table.name))
    claimed = str(parameters.get("rope_type") or parameters.get("type") or "default")
    kind: RopeKind = "unknown"
    theta = 0.0
    for name, value in thetas(tiny, table.name):
        ratio = classic(value, small_dim).double() / table.frequencies.double().clamp_min(1e-30)
        if same(ratio, torch.ones_like(ratio), 1e-4):
            kind, theta = "default", value
        elif bool((ratio / ratio[0] - 1).abs().max() < 1e-4) and claimed == "linear":
            kind, theta = "linear", value
            factor = float(parameters.get("factor", 1.0))
            if abs(float(ratio[0]) - factor) > 1e-3 * factor:
                problems.append(f"positions are divided by {float(ratio[0]):.6g}, the config says {factor}")
        elif not theta:
            theta = value
        if kind != "unknown":
            break
        del name
    if kind == "default" and claimed not in ("default", "dynamic", "longrope", "yarn", "linear", "llama3"):
        problems.append(f"frequencies are the plain ones although the config says rope_type {claimed}")
    if kind == "unknown" or claimed == "dynamic":
        kind = next((known for known in _KINDS if known == claimed), "unknown")
    if kind == "unknown":
        problems.append(f"frequencies of {table.name} follow no known formula (config: rope_type {claimed})")
    elif kind == "default" and claimed != "default" and table.name == "default":
        problems.append(f"config says rope_type {claimed}, the frequencies of {table.path} are the plain ones")
    share = small_dim / head_dims[0]
    facets = RopeFacets(
        name=table.name,
        path=table.path,
        cls=table.cls,
        kind=kind,
        theta=theta,
        rotary_dim=full_rotary_dim(full, share, head_dims[1]),
        interleaved=interleaved,
        attention_factor=attention_factor,
        parameters=tuple(sorted((key, _frozen(value)) for key, value in parameters.items()))
        if kind != "default"
        else (),
    )
    return facets, problems


def full_rotary_dim(config: Any, share: float, head_dim: int) -> int:
    """Turning channels at the model's own width from the share that the small model turns."""
    explicit = getattr(config, "rotary_dim", None)
    if isinstance(explicit, int) and 0 < explicit <= head_dim:
        return explicit
    if math.isclose(share, 1.0):
        return head_dim
    factors = [value for _, value in _numbers(config) if 0 < value < 1 and abs(value - share) < 0.1]
    exact = min(factors, key=lambda value: abs(value - share), default=share)
    return 2 * (int(head_dim * exact) // 2)


def thetas(config: Any, table: str) -> Iterator[tuple[str, float]]:
    """Bases that the config offers, those of this table first: key and value."""
    own = dict(_parameters(config, table)).get("rope_theta")
    if isinstance(own, (int, float)):
        yield "rope_parameters.rope_theta", float(own)
    for key, value in _numbers(config):
        if ("theta" in key or "base" in key) and value > 1:
            yield key, value
    yield "", 10000.0


def _numbers(config: Any) -> Iterator[tuple[str, float]]:
    for key, value in config.to_dict().items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield key, float(value)
        if isinstance(value, dict):
            for inner, number in value.items():
                if isinstance(number, (int, float)) and not isinstance(number, bool):
                    yield f"{key}.{inner}", float(number)


def _parameters(config: Any, table: str) -> dict[str, Any]:
    """Scaling parameters of a table: keyed by layer type in newer configs, one for all in older ones."""
    for key in _SCALING:
        value = getattr(config, key, None)
        if isinstance(value, dict) and value:
            nested = {name: inner for name, inner in value.items() if isinstance(inner, dict)}
            if nested:
                return dict(nested.get(table, {}))
            # an older second table (`rotary_emb_local`) is never scaled
            return dict(value) if table == "default" else {}
    return {}


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def may_slope(module: nn.Module) -> bool:
    """Whether the text of an attention class speaks of linear biases."""
    try:
        return "alibi" in inspect.getsource(type(module))
    except (OSError, TypeError):
        return False
