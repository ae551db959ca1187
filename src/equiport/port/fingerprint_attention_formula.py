"""The attention formula with its switches: what a hypothesis about a source's attention is tested with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from equiport.port.fingerprint import QkvLayout
from equiport.port.fingerprint_rope import RopeTable, rotate


@dataclass(frozen=True)
class Heads:
    """Head counts and width."""

    query: int
    key: int
    width: int


@dataclass(frozen=True)
class Hypothesis:
    """One setting of the switches."""

    layout: QkvLayout
    scale: float
    table: RopeTable | None = None
    interleaved: bool = False
    norm_after_rope: bool = False
    softcap: float | None = None
    window: int | None = None
    clip: float | None = None
    alibi: float | None = None  # factor on the slopes


@dataclass(frozen=True)
class Operands:
    """What the source's attention was given: projection outputs [T, ...], norms on q and k, sinks [H]."""

    query: Tensor  # the fused projection's output in a fused layout
    key: Tensor
    value: Tensor
    heads: Heads
    norm_query: Callable[[Tensor], Tensor] | None = None  # [1, H, T, D] -> the same
    norm_key: Callable[[Tensor], Tensor] | None = None
    sinks: Tensor | None = None


def core(operands: Operands, setting: Hypothesis) -> Tensor | None:
    """Attention's result before the output projection, [T, H * D]; None where the setting does not fit the shapes."""
    split = split_heads(operands, setting.layout)
    if split is None:
        return None
    query, key, value = split
    if setting.clip is not None:
        query, key, value = (tensor.clamp(-setting.clip, setting.clip) for tensor in (query, key, value))
    steps: list[Callable[[Tensor, Callable[[Tensor], Tensor] | None], Tensor]] = [_normed]
    if setting.table is not None:
        table = setting.table

        def turn(tensor: Tensor, _: Callable[[Tensor], Tensor] | None) -> Tensor:
            return rotate(tensor, table, interleaved=setting.interleaved)

        steps = [turn, _normed] if setting.norm_after_rope else [_normed, turn]
    for step in steps:
        query, key = step(query, operands.norm_query), step(key, operands.norm_key)
    if not query.numel() or not key.numel():
        return None
    groups = operands.heads.query // operands.heads.key
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * setting.scale
    length = scores.shape[-1]
    if setting.alibi is not None:
        scores = scores + setting.alibi * slopes(operands.heads.query)[:, None, None] * torch.arange(length)
    if setting.softcap is not None:
        scores = setting.softcap * torch.tanh(scores / setting.softcap)
    scores = scores.masked_fill(~_allowed(length, setting.window), float("-inf"))
    if operands.sinks is not None:
        extra = operands.sinks.reshape(1, -1, 1, 1).expand(1, -1, length, 1)
        weights = torch.softmax(torch.cat((scores, extra), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return (weights @ value).transpose(1, 2).reshape(length, -1)


def split_heads(operands: Operands, layout: QkvLayout) -> tuple[Tensor, Tensor, Tensor] | None:
    """q [1, H, T, D], k and v [1, KV, T, D] from the projections' outputs; None where the width does not fit."""
    heads, fused = operands.heads, operands.query
    length, d = fused.shape[0], heads.width
    if layout == "separate":
        triple = (operands.query, operands.key, operands.value)
    else:
        if fused.shape[-1] != (heads.query + 2 * heads.key) * d:
            return None
        if layout == "concat":
            triple = tuple(fused.split((heads.query * d, heads.key * d, heads.key * d), dim=-1))  # type: ignore[assignment]
        elif layout == "per_head":
            if heads.query != heads.key:
                return None
            triple = tuple(part.flatten(-2) for part in fused.reshape(length, heads.query, 3 * d).chunk(3, dim=-1))  # type: ignore[assignment]
        else:
            group = heads.query // heads.key
            view = fused.reshape(length, heads.key, group + 2, d)
            triple = (view[:, :, :-2].flatten(1), view[:, :, -2].flatten(1), view[:, :, -1].flatten(1))
    counts = (heads.query, heads.key, heads.key)
    if any(tensor.shape[-1] != count * d for tensor, count in zip(triple, counts, strict=True)):
        return None
    query, key, value = (
        tensor.reshape(1, length, count, d).transpose(1, 2) for tensor, count in zip(triple, counts, strict=True)
    )
    return query, key, value


def slopes(heads: int) -> Tensor:
    """ALiBi's slopes for any number of heads (Press et al. 2021), [heads]."""
    near = 2 ** math.floor(math.log2(heads))
    base = 2.0 ** (-(2.0 ** -(math.log2(near) - 3)))
    values = [base**power for power in range(1, near + 1)]
    extra = 2.0 ** (-(2.0 ** -(math.log2(2 * near) - 3)))
    values += [extra**power for power in range(1, 2 * (heads - near), 2)]
    return torch.tensor(values[:heads])


def _normed(tensor: Tensor, norm: Callable[[Tensor], Tensor] | None) -> Tensor:
    return norm(tensor) if norm is not None and tensor.numel() else tensor


def _allowed(length: int, window: int | None) -> Tensor:
    rows, columns = torch.arange(length)[:, None], torch.arange(length)[None]
    allowed = columns <= rows
    return allowed if window is None else allowed & (rows - columns < window)
