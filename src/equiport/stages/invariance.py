"""Does the port say the same whichever way it is asked? fp32, drawn weights, many batch shapes; part of stage 5."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel
from torch import Tensor

from equiport.compare.gates import GateResult, join
from equiport.compare.gates_consistency import Consistency, consistency_gate
from equiport.compare.reasons import ReasonCode, reason
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Reason, Verdict
from equiport.fixtures.folder import read_config
from equiport.fixtures.tokens import TokenBatch, draw_batch, special_ids
from equiport.reference.model import load_reference
from equiport.stacks.contract import StackAdapter
from equiport.stacks.port_classes import PortClasses
from equiport.stages.component_fixtures import Variant
from equiport.trace.whole import (
    PortLogits,
    ShapeRun,
    port_logits,
    port_logits_bf16,
    reference_batch,
    reference_decode,
    reference_logits,
)

# name, prompt lengths, decode steps: odd widths, one row, many steps, positions far out, a full cache
_SHAPES = (
    ("a ragged batch of three", (9, 30, 2), 3),
    # past 256, where bf16 no longer holds every integer
    ("far positions and many steps", (250, 37), 40),
)
_VARIANT_SHAPE = ((24, 9, 2), 6)
_FAR = _SHAPES[1][0]
_ALONE = "one row"
# R of the far shape in bf16: right ports measure 0.98 to 1.18 (22 families, two seeds), positions in bf16 10 to 12; a
# router that flips at a near tie moves it further
_FAR_R, _FAR_R_ROUTED = 2.0, 4.0
_MAX_PLACES = 320


class ShapeFigures(BaseModel):
    """One shape: R32 of the port's logits, pooled and at the worst place, by path.

    `own`: how far the source's logits of a row are from those of the same row in a batch, in the same unit.
    """

    shape: str
    path: str
    places: int
    r32: float
    r32_worst: float
    own: float
    own_worst: float


class InvarianceMetrics(BaseModel):
    """What was run and found. `far_r`: R of the port in bf16 on the far shape."""

    shapes: list[ShapeFigures]
    far_r: float
    checks: list[Consistency]


def check_invariance(
    adapter: StackAdapter,
    classes: PortClasses,
    folder: Path,
    seed: int,
    thresholds: Thresholds,
    variants: Sequence[Variant] = (),
) -> tuple[InvarianceMetrics, GateResult]:
    """Run every shape on the weights in `folder` (a tiny model's), one shape on each of the `variants`, and judge.

    Raises:
        EquiportError: a model does not load, or the port does not run.
    """
    shapes = draw_shapes(folder, seed)
    known = _references(folder, shapes)
    far = next(shape for shape in shapes if shape.name == _FAR)
    low = port_logits_bf16(adapter, classes, folder, far)
    far_r = float((low - known[_FAR].exact).norm() / known[_FAR].unit.norm().clamp_min(1e-30))
    figures, checks = _shapes(adapter, classes, folder, shapes, known)
    for variant in variants:
        config = read_config(variant.folder)
        batch = draw_batch(config["vocab_size"], *_VARIANT_SHAPE, seed, special_ids(config))
        shape = ShapeRun(variant.name, batch, batch.max_length)
        more, consistent = _shapes(adapter, classes, variant.folder, [shape], _references(variant.folder, [shape]))
        figures += more
        checks += consistent
    gates = [_shape_gate(item, thresholds) for item in figures]
    gates += [consistency_gate(checks, thresholds), _far_gate(far_r, known[_FAR].own, read_config(folder), thresholds)]
    return InvarianceMetrics(shapes=figures, far_r=far_r, checks=checks), join("invariance", gates)


def _far_gate(far_r: float, own: float, config: Mapping[str, object], thresholds: Thresholds) -> GateResult:
    """In bf16: positions, masks or tables that lose integers above 256 are right in fp32.

    `own`: how far the source's own logits of a row alone are from those in the batch, in the same unit.
    """
    routed = any("experts" in key and isinstance(value, int) and value > 1 for key, value in config.items())
    limit = max(_FAR_R_ROUTED if routed else _FAR_R, thresholds.consistency_own * own)
    if far_r < limit:
        return GateResult("far in bf16", Verdict.PASS)
    message = f"R = {far_r:.3g} >= {limit:g} in bf16, where fp32 may agree: are positions or masks held in bf16?"
    return GateResult("far in bf16", Verdict.FAIL, (reason(ReasonCode.SHAPE_FAULT, message, f"bf16, {_FAR}"),))


def _shapes(
    adapter: StackAdapter,
    classes: PortClasses,
    folder: Path,
    shapes: Sequence[ShapeRun],
    known: Mapping[str, _Said],
) -> tuple[list[ShapeFigures], list[Consistency]]:
    ported = {shape.name: port_logits(adapter, classes, folder, shape) for shape in shapes}
    figures: list[ShapeFigures] = []
    checks: list[Consistency] = []
    for shape in shapes:
        found, said = ported[shape.name], known[shape.name]
        figures += [
            _figures(shape.name, "decode", found.decode, said.exact, said.unit, said.batched),
            _figures(
                shape.name, "prefill", found.prefill[:, None], said.exact[:, -1:], said.unit[:, -1:],
                said.batched[:, -1:],
            ),
        ]  # fmt: skip
        checks += _checks(shape.name, found, said)
    if _ALONE in ported:
        checks.append(_alone(ported, known))
    return figures, checks


@dataclass(frozen=True)
class _Said:
    """What the source says of one shape, [B, steps + 1, V]: fp32 logits; and how far it is from them in bf16 (`unit`),
    token by token from its cache (`stepwise`), and in a batch with the other rows (`batched`)."""

    exact: Tensor
    unit: Tensor
    stepwise: Tensor
    batched: Tensor

    @property
    def own(self) -> float:
        """How far `batched` is from them, in units of `unit`."""
        return float(self.batched.norm() / self.unit.norm().clamp_min(1e-30))


def draw_shapes(folder: Path, seed: int) -> list[ShapeRun]:
    """The shapes with tokens from the seed; the first batch's rows once more, each alone."""
    config = read_config(folder)
    vocabulary, longest = config["vocab_size"], int(config.get("max_position_embeddings") or _MAX_PLACES)
    shapes = []
    for number, (name, lengths, steps) in enumerate(_SHAPES):
        room = min(longest, _MAX_PLACES) - steps
        fitting = tuple(min(length, room) for length in lengths)
        batch = draw_batch(vocabulary, fitting, steps, seed + number, special_ids(config))
        shapes.append(ShapeRun(name, batch, batch.max_length))
    first = shapes[0].batch
    row = TokenBatch((first.rows[0],), (first.prompt_lengths[0],), first.decode_steps)
    # as long as the batch's own: a stack may refuse a length below its window
    return [*shapes, ShapeRun(_ALONE, row, shapes[0].seq_len)]


def _references(folder: Path, shapes: Sequence[ShapeRun]) -> dict[str, _Said]:
    """By shape. The row alone is the first row of the first shape: in a batch it is there."""
    model = load_reference(folder, torch.float32)
    exact = {shape.name: reference_logits(model, shape.batch) for shape in shapes}
    stepwise = {shape.name: reference_decode(model, shape.batch) - exact[shape.name] for shape in shapes}
    batched = {
        shape.name: reference_batch(model, shape.batch) - exact[shape.name] for shape in shapes if shape.name != _ALONE
    }
    if _ALONE in exact:
        batched[_ALONE] = batched[shapes[0].name][:1]
    del model
    low = load_reference(folder, torch.bfloat16)
    unit = {shape.name: reference_logits(low, shape.batch) - exact[shape.name] for shape in shapes}
    del low
    gc.collect()
    return {name: _Said(exact[name], unit[name], stepwise[name], batched[name]) for name in exact}


def _figures(shape: str, path: str, ours: Tensor, theirs: Tensor, base: Tensor, own: Tensor) -> ShapeFigures:
    error = (ours.double() - theirs.double()).flatten(0, 1)
    flat, own = base.double().flatten(0, 1), own.double().flatten(0, 1)
    places, norm = len(error), max(float(flat.norm()), 1e-30)
    typical = norm / places**0.5
    return ShapeFigures(
        shape=shape,
        path=path,
        places=places,
        r32=float(error.norm()) / norm,
        r32_worst=float(error.norm(dim=-1).max()) / typical,
        own=float(own.norm()) / norm,
        own_worst=float(own.norm(dim=-1).max()) / typical,
    )


def _shape_gate(item: ShapeFigures, thresholds: Thresholds) -> GateResult:
    """As the fp32 gate; where the source's own logits depend more on the batch, that much is allowed, and it shows."""
    subject = f"{item.path} path, {item.shape}"
    pooled = max(thresholds.r32_pooled, thresholds.consistency_own * item.own)
    worst = max(thresholds.r32_slice, thresholds.consistency_own * item.own_worst)
    blind: tuple[Reason, ...] = ()
    if pooled > thresholds.r32_pooled or worst > thresholds.r32_slice:
        message = f"the source's own logits depend on the other rows of the batch ({item.own:.2g} of its bf16 error)"
        blind = (reason(ReasonCode.INCONSISTENT, message, subject),)
    if item.r32 <= pooled and item.r32_worst <= worst:
        return GateResult("fp32 shapes", Verdict.PASS, blind_spots=blind)
    message = f"R32 = {item.r32:.3g} pooled, {item.r32_worst:.3g} at the worst of {item.places} places"
    return GateResult("fp32 shapes", Verdict.FAIL, (reason(ReasonCode.SHAPE_FAULT, message, subject),))


def _checks(name: str, found: PortLogits, said: _Said) -> list[Consistency]:
    last = said.unit[:, -1]
    return [
        _check("prefill against decode", name, found.prefill - found.decode[:, -1], last, said.stepwise[:, -1]),
        _check("after another batch", name, found.again - found.decode, said.unit, torch.zeros_like(said.unit)),
    ]


def _alone(ported: Mapping[str, PortLogits], known: Mapping[str, _Said]) -> Consistency:
    batch = _SHAPES[0][0]
    difference = ported[_ALONE].decode[0] - ported[batch].decode[0]
    return _check("a row alone against the batch", batch, difference, known[_ALONE].unit[0], known[_ALONE].batched[0])


def _check(check: str, subject: str, difference: Tensor, unit: Tensor, own: Tensor) -> Consistency:
    base = max(float(unit.double().norm()), 1e-30)
    return Consistency(
        check=check,
        subject=subject,
        difference=float(difference.double().norm()) / base,
        own=float(own.double().norm()) / base,
    )
