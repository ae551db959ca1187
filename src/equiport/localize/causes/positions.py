"""Positions that are off in one phase, or stand still."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from equiport.localize.anatomy import Part
from equiport.localize.case import Case
from equiport.localize.causes.rotation import Plain
from equiport.localize.drafts import ShiftPositions
from equiport.localize.hypothesis import Candidate, Hypothesis
from equiport.localize.surgery import RotaryCall, Surgery, has_rotation


class Positions(Hypothesis):
    """Tokens stand at other positions: in decode, in prefill, or everywhere."""

    kind = "position offset"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """Offsets of one, in either phase; and positions that stand still in decode."""
        for path, module in case.sites(Part.ATTENTION):
            if not has_rotation(module):
                continue
            for phase in ("decode", "prefill"):
                for by in (1, -1):
                    yield _moved(path, phase, by)
            yield _still(path)


class FirstRowsPositions(Hypothesis):
    """All rows of a batch are rotated by the positions of its first row, which shows in decode on unequal lengths."""

    kind = "batch row mixed up"

    def candidates(self, case: Case, reference: Mapping[str, Tensor]) -> Iterable[Candidate]:
        """One an attention, where a row is not as long as the first one of the run."""
        if set(case.batch.prompt_lengths) == {_first_length(case)}:
            return
        for path, module in case.sites(Part.ATTENTION):
            if has_rotation(module):
                yield _first_rows(path)


def _first_length(case: Case) -> int:
    return case.batch.prompt_lengths[0] if case.first_length is None else case.first_length


def _tables_at(call: RotaryCall, positions: Tensor) -> RotaryCall:
    """cos and sin looked up at other positions [B, T]; the call's tables hold positions 0..T-1 and are extended."""
    cos, sin = (table[0] for table in (call.cos, call.sin))
    last = int(positions.max())
    if last >= len(cos):
        cos, sin = _extended(cos, sin, last + 1)
    return replace(call, cos=cos[positions], sin=sin[positions])


def _extended(cos: Tensor, sin: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Tables further on: each angle is a multiple of that of position 1."""
    scale = (cos[0].double() ** 2 + sin[0].double() ** 2).sqrt()
    step = torch.atan2(sin[1].double(), cos[1].double())
    angles = torch.arange(length, dtype=torch.float64)[:, None] * step
    return (angles.cos() * scale).to(cos.dtype), (angles.sin() * scale).to(sin.dtype)


def _moved(path: str, phase: str, by: int) -> Candidate:
    def edit(at: Case, surgery: Surgery) -> None:
        lengths = torch.tensor(at.batch.prompt_lengths)[:, None]

        def form(call: RotaryCall, plain: Plain) -> tuple[Tensor, Tensor]:
            tokens = torch.arange(call.query.shape[-2])[None].expand(len(lengths), -1)
            chosen = tokens >= lengths if phase == "decode" else tokens < lengths
            return plain(_tables_at(call, (tokens + by * chosen).clamp_min(0)))

        surgery.rotation(at.model.get_submodule(path), form)

    return Candidate(
        f"positions in {phase} are off by {by:+d} in {path}", edit, f"take {by:+d} off the position ids in {phase}",
        ShiftPositions(of=(path,), phase=phase, by=-by),  # type: ignore[arg-type]
    )  # fmt: skip


def _still(path: str) -> Candidate:
    def edit(at: Case, surgery: Surgery) -> None:
        lengths = torch.tensor(at.batch.prompt_lengths)[:, None]

        def form(call: RotaryCall, plain: Plain) -> tuple[Tensor, Tensor]:
            tokens = torch.arange(call.query.shape[-2])[None].expand(len(lengths), -1)
            return plain(_tables_at(call, torch.minimum(tokens, lengths)))

        surgery.rotation(at.model.get_submodule(path), form)

    return Candidate(f"the position stands still in decode in {path}", edit, "count positions on in decode")


def _first_rows(path: str) -> Candidate:
    def edit(at: Case, surgery: Surgery) -> None:
        lengths = torch.tensor(at.batch.prompt_lengths)[:, None]

        def form(call: RotaryCall, plain: Plain) -> tuple[Tensor, Tensor]:
            tokens = torch.arange(call.query.shape[-2])[None].expand(len(lengths), -1)
            return plain(_tables_at(call, torch.where(tokens < lengths, tokens, tokens - lengths + _first_length(at))))

        surgery.rotation(at.model.get_submodule(path), form)

    return Candidate(
        f"all rows of the batch are rotated by the first row's positions in {path}", edit,
        "index cos and sin by each row's own position ids",
    )  # fmt: skip
