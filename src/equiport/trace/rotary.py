"""Rotary tables are compared by calling them: their inputs are positions, which no hidden tensor carries.

Near positions lie side by side; far ones are spread evenly in their logarithm up to max_position_embeddings. An angle
is position x frequency in fp32: its rounding grows with the position, and another order of the same formula may differ
by it. Errors within that rounding are shrunk below the gate before they are compared (`rounding_aside`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equiport.compare.measure import NOMINAL_BF16
from equiport.trace.module_io import output_tensors

_NEAR = 128
_FAR, _FARTHEST = 48, 1 << 20
# roundings of a frequency and of its product with the position, on both sides
_ROUNDINGS = 8
_HALF_ULP = 2.0**-24
# share of the bf16 baseline that an error within the rounding still has: a third of the fp32 gate; in bf16 a quarter
_FP32_SHARE, _BF16_SHARE = 3e-4, 0.25
#: Rope types whose frequencies change with the length of the sequence.
_BY_LENGTH = ("longrope", "dynamic", "su")


@dataclass(frozen=True)
class RotaryTables:
    """cos and sin side by side, [positions, 2 * rotary_dim] each; a text says why there are none.

    `far` is None where the model has no far positions.
    """

    near: Tensor | str
    far: Tensor | str | None = None


def far_positions(config: dict[str, Any]) -> Tensor | None:
    """Positions from 128 on to the last of config.json, evenly spread in their logarithm; None if there are none.

    Where frequencies switch with the sequence's length, one call says nothing of positions beyond the original range.
    """
    last = config.get("max_position_embeddings")
    last = min(last, _FARTHEST) - 1 if isinstance(last, int) else 0
    if switches_by_length(config):
        last = min(last, _original(config) - 1)
    if last < _NEAR:
        return None
    spread = torch.logspace(0, 1, _FAR, base=last / _NEAR, dtype=torch.float64) * _NEAR
    return torch.cat((spread.round().long(), torch.tensor([last]))).clamp(max=last).unique()


def switches_by_length(config: dict[str, Any]) -> bool:
    """Whether the rope type computes its frequencies from the length of the sequence."""
    return any(str(item.get("rope_type", item.get("type", ""))) in _BY_LENGTH for item in _settings(config))


def _original(config: dict[str, Any]) -> int:
    places = [config, *_settings(config)]
    found = [item.get("original_max_position_embeddings") for item in places]
    lengths = [value for value in found if isinstance(value, int)]
    return min(lengths, default=int(config["max_position_embeddings"]))


def _settings(config: dict[str, Any]) -> list[dict[str, Any]]:
    found = [config[key] for key in ("rope_scaling", "rope_parameters") if isinstance(config.get(key), dict)]
    return [*found, *(nested for item in found for nested in item.values() if isinstance(nested, dict))]


def rotary_tables(module: nn.Module, dtype: torch.dtype) -> Tensor | str:
    """cos and sin at positions 0..127, side by side: [positions, 2 * rotary_dim]; else why not."""
    return _call(module, dtype, torch.arange(_NEAR))


def near_and_far(module: nn.Module, dtype: torch.dtype, far: Tensor | None) -> RotaryTables:
    """The tables of a rotary module at positions 0..127 and at `far` [P]."""
    near = rotary_tables(module, dtype)
    if far is None or isinstance(near, str):
        return RotaryTables(near)
    beyond = _call(module, dtype, far)
    if isinstance(beyond, Tensor) and torch.equal(beyond, near[: len(beyond)]):
        beyond = "gives the same tables whatever the positions"
    return RotaryTables(near, beyond)


def _call(module: nn.Module, dtype: torch.dtype, positions: Tensor) -> Tensor | str:
    hidden = torch.zeros(1, len(positions), 1, dtype=dtype)
    try:
        with torch.no_grad():
            tables = output_tensors(module(hidden, positions[None]))
    except (TypeError, RuntimeError, ValueError, IndexError, AttributeError) as error:
        return f"cannot be called as rotary(x, position_ids): {(str(error).splitlines() or [''])[0][:200]}"
    if len(tables) != 2:
        return f"returns {len(tables)} tables, not cos and sin"
    return torch.cat([table.reshape(-1, table.shape[-1]) for table in tables], dim=-1)


def rounding_aside(positions: Tensor, near: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """ref_fp32, ref_bf16, target[, target_fp32] [P, 2D] with errors within the rounding of the angle shrunk.

    With a = 8 · 2^-24 · position · frequency · amplitude, an error e counts as e · g / max(g, a), g being a share of
    the bf16 rounding that passes by itself: an error of at most a passes, a larger one is as much too large as it is
    larger than a. Frequency and amplitude of each channel are read from ref_fp32 at position 1 (`near` [>= 2, 2D]).
    """
    reference = tensors[0].double()
    cos, sin = near[1].double().chunk(2)
    amplitude = torch.hypot(cos, sin)
    frequency = torch.atan2(sin, cos).abs()
    allowed = _ROUNDINGS * _HALF_ULP * positions.double()[:, None] * (frequency * amplitude).repeat(2)
    unit = NOMINAL_BF16 * amplitude.clamp(min=0.1).repeat(2)
    exact = torch.equal(reference, tensors[1].double())
    shares = (None, *((_HALF_ULP / NOMINAL_BF16,) * 3 if exact else (_BF16_SHARE, _BF16_SHARE, _FP32_SHARE)))
    found = [tensors[0]]
    for tensor, share in zip(tensors[1:], shares[1:], strict=False):
        assert share is not None
        weight = share * unit / torch.maximum(share * unit, allowed)
        shrunk = reference + (tensor.double() - reference) * weight
        # what the rounding does not reach stays as it is, bit for bit
        found.append(torch.where(weight < 1, shrunk, tensor.double()).float() if (weight < 1).any() else tensor)
    return tuple(found)
