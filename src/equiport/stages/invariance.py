"""Does the port say the same whichever way it is asked? fp32, drawn weights, many batch shapes; part of stage 5."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import BaseModel
from torch import Tensor

from equiport.compare.gates import GateResult, join
from equiport.compare.gates_consistency import Consistency, consistency_gate
from equiport.compare.reasons import ReasonCode, reason
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Verdict
from equiport.fixtures.folder import read_config
from equiport.fixtures.tokens import TokenBatch, draw_batch
from equiport.reference.model import load_reference
from equiport.stacks.contract import StackAdapter
from equiport.stacks.port_classes import PortClasses
from equiport.trace.whole import PortLogits, ShapeRun, port_logits, reference_decode, reference_logits

# name, prompt lengths, decode steps: odd widths, one row, many steps, positions far out, a full cache
_SHAPES = (
    ("a ragged batch of three", (9, 30, 2), 3),
    ("far positions and many steps", (190, 37), 40),
)
_ALONE = "one row"
_MAX_PLACES = 260


class ShapeFigures(BaseModel):
    """One shape: R32 of the port's logits, pooled and at the worst place, by path."""

    shape: str
    path: str
    places: int
    r32: float
    r32_worst: float


class InvarianceMetrics(BaseModel):
    """What was run and found."""

    shapes: list[ShapeFigures]
    checks: list[Consistency]


def check_invariance(
    adapter: StackAdapter, classes: PortClasses, folder: Path, seed: int, thresholds: Thresholds
) -> tuple[InvarianceMetrics, GateResult]:
    """Run every shape on the weights in `folder` (a tiny model's) and judge.

    Raises:
        EquiportError: a model does not load, or the port does not run.
    """
    shapes = draw_shapes(folder, seed)
    exact, unit, own = _references(folder, shapes)
    ported = {shape.name: port_logits(adapter, classes, folder, shape) for shape in shapes}
    figures, checks = [], []
    for shape in shapes:
        found, name = ported[shape.name], shape.name
        for path, ours, theirs, base in (
            ("decode", found.decode, exact[name], unit[name]),
            ("prefill", found.prefill[:, None], exact[name][:, -1:], unit[name][:, -1:]),
        ):
            figures.append(_figures(name, path, ours, theirs, base))
        checks += _checks(name, found, unit[name], own[name])
    checks += _alone(shapes, ported, unit, own)
    shaped = [_shape_gate(item, thresholds) for item in figures]
    return InvarianceMetrics(shapes=figures, checks=checks), join(
        "invariance", [*shaped, consistency_gate(checks, thresholds)]
    )


def draw_shapes(folder: Path, seed: int) -> list[ShapeRun]:
    """The shapes with tokens from the seed; the first batch's rows once more, each alone."""
    config = read_config(folder)
    vocabulary, longest = config["vocab_size"], int(config.get("max_position_embeddings") or _MAX_PLACES)
    shapes = []
    for number, (name, lengths, steps) in enumerate(_SHAPES):
        room = min(longest, _MAX_PLACES) - steps
        fitting = tuple(min(length, room) for length in lengths)
        batch = draw_batch(vocabulary, fitting, steps, seed + number)
        shapes.append(ShapeRun(name, batch, batch.max_length))
    first = shapes[0].batch
    row = TokenBatch((first.rows[0],), (first.prompt_lengths[0],), first.decode_steps)
    # as long as the batch's own: a stack may refuse a length below its window
    return [*shapes, ShapeRun(_ALONE, row, shapes[0].seq_len)]


def _references(
    folder: Path, shapes: Sequence[ShapeRun]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """By shape: fp32 logits; their bf16 error; their own error between one forward and token by token."""
    model = load_reference(folder, torch.float32)
    exact = {shape.name: reference_logits(model, shape.batch) for shape in shapes}
    own = {shape.name: reference_decode(model, shape.batch) - exact[shape.name] for shape in shapes}
    del model
    low = load_reference(folder, torch.bfloat16)
    unit = {shape.name: reference_logits(low, shape.batch) - exact[shape.name] for shape in shapes}
    del low
    gc.collect()
    return exact, unit, own


def _figures(shape: str, path: str, ours: Tensor, theirs: Tensor, base: Tensor) -> ShapeFigures:
    error = (ours.double() - theirs.double()).flatten(0, 1)
    flat = base.double().flatten(0, 1)
    places = len(error)
    typical = float(flat.norm()) / places**0.5
    return ShapeFigures(
        shape=shape,
        path=path,
        places=places,
        r32=float(error.norm()) / max(float(flat.norm()), 1e-30),
        r32_worst=float(error.norm(dim=-1).max()) / max(typical, 1e-30),
    )


def _shape_gate(item: ShapeFigures, thresholds: Thresholds) -> GateResult:
    subject = f"{item.path} path, {item.shape}"
    if item.r32 <= thresholds.r32_pooled and item.r32_worst <= thresholds.r32_slice:
        return GateResult("fp32 shapes", Verdict.PASS)
    message = f"R32 = {item.r32:.3g} pooled, {item.r32_worst:.3g} at the worst of {item.places} places"
    return GateResult("fp32 shapes", Verdict.FAIL, (reason(ReasonCode.SHAPE_FAULT, message, subject),))


def _checks(name: str, found: PortLogits, unit: Tensor, own: Tensor) -> list[Consistency]:
    return [
        _check("prefill against decode", name, found.prefill - found.decode[:, -1], unit[:, -1], own[:, -1]),
        _check("after another batch", name, found.again - found.decode, unit, torch.zeros_like(own)),
    ]


def _alone(
    shapes: Sequence[ShapeRun], ported: dict[str, PortLogits], unit: dict[str, Tensor], own: dict[str, Tensor]
) -> list[Consistency]:
    batch = shapes[0].name
    difference = ported[_ALONE].decode[0] - ported[batch].decode[0]
    return [_check("a row alone against the batch", batch, difference, unit[_ALONE][0], own[_ALONE][0])]


def _check(check: str, subject: str, difference: Tensor, unit: Tensor, own: Tensor) -> Consistency:
    base = max(float(unit.double().norm()), 1e-30)
    return Consistency(
        check=check,
        subject=subject,
        difference=float(difference.double().norm()) / base,
        own=float(own.double().norm()) / base,
    )
