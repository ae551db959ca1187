"""The traced run of stage 3: R and R32 of every module, layer and position, fed by the reference and free-running.

Shadow: each module gets the reference's input, so its figures tell of itself alone. Free: the port runs on its own
activations, so the error of everything before it is in them. Each view names the first bad place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf
from statistics import geometric_mean
from typing import Literal

import torch
from pydantic import BaseModel
from torch import Tensor

from equiport.compare.comparison import Labels
from equiport.compare.measure import NOMINAL_BF16
from equiport.compare.reasons import reason
from equiport.compare.records import Record, make_record
from equiport.compare.streams import ComparisonError
from equiport.compare.thresholds import Thresholds
from equiport.errors import EquiportError
from equiport.experiment.atomic import write_json
from equiport.fixtures.folder import has_weights, read_config
from equiport.fixtures.tokens import TokenBatch, draw_batch, special_ids
from equiport.reference.model import Fixture, real_fixture
from equiport.stages.component_check import compare_sample
from equiport.stages.component_fixtures import drawn_fixture, mapping_of
from equiport.stages.frame import StageContext, vocabulary_size
from equiport.stages.instances import InstanceRow, instance_rows
from equiport.stages.port_run import port_fault
from equiport.trace.components import TraceResult, trace_components
from equiport.trace.sample import ComponentSample

View = Literal["shadow", "free"]
FILE_NAME = "traced_run.json"

#: Prompt lengths and decode steps: as in stage 2; and longer, where stage 2 saw nothing.
_SHORT, _LONG = ((24, 17), 5), ((220, 37), 6)
_CHEAP_BYTES = 64 << 20
# a position's own baseline may be near 0 by luck
_FLOOR = 0.1


class TracedRow(InstanceRow):
    """One module in one phase under one view; `order` is its place in the source's forward."""

    view: View
    module: str
    order: int


class PositionCurve(BaseModel):
    """R and R32 of one module by token position, rows pooled; decode positions follow those of the prompt."""

    view: View
    component: str
    module: str
    layer: int | None
    positions: list[int]
    r_ratio: list[float]
    r32: list[float]


class FirstBad(BaseModel):
    """Where a view first leaves its limits; `rule` says which."""

    view: View
    component: str
    module: str
    layer: int | None
    phase: str
    r_ratio: float | None
    r32: float | None
    rule: str


class TracedRun(BaseModel):
    """One fixture's run. `curves`: the first bad module of each view, else the last one that was run."""

    fixture: str
    tokens: str
    rows: list[TracedRow]
    first_bad: list[FirstBad]
    curves: list[PositionCurve]
    plots: list[str] = []

    def first(self, view: View) -> FirstBad | None:
        """The first bad place of a view; None where it sees none."""
        return next((item for item in self.first_bad if item.view == view), None)


class TracedRuns(BaseModel):
    """The runs of stage 3, the one that says most first; `note` says why there are none."""

    runs: list[TracedRun] = []
    note: str = ""

    @property
    def names_a_place(self) -> bool:
        """Whether a view of a run names a first bad place."""
        return any(run.first_bad for run in self.runs)


def traced_runs(context: StageContext, thresholds: Thresholds, *, long: bool) -> TracedRuns:
    """Run the drawn tiny model, and the model's own weights where they are small or the tiny one shows nothing.

    `long`: sequences beyond those of stage 2, for faults that it did not see. Plots go to the experiment's plots/, the
    curves of all modules to results/traced_run.json. What the port or its model cannot do becomes a note: the suspects
    of stage 2 stand without it.
    """
    if context.experiment is None or context.subject is None or context.adapter is None:
        return TracedRuns(note="needs an experiment")
    found: list[TracedRun] = []
    try:
        weights = context.weights_folder()
        with drawn_fixture(context.experiment, weights, context.options.seed) as drawn:
            found.append(_run(context, drawn, thresholds, long))
        if has_weights(context.port.model_path):
            size = sum(file.stat().st_size for file in context.port.model_path.glob("*.safetensors"))
            if size <= _CHEAP_BYTES or (long and not found[0].first_bad):
                found.append(_run(context, real_fixture(context.port.model_path), thresholds, long))
    except EquiportError as error:
        return TracedRuns(runs=found, note=error.line())
    except Exception as error:  # the port's own code: its place is the finding
        fault = port_fault(error, [context.port.modeling_file, *context.stack.source_roots()])
        if fault is None or context.debug:
            raise
        return TracedRuns(runs=found, note=f"{fault.subject}: {fault.message}")
    return TracedRuns(runs=sorted(found, key=lambda run: not run.first_bad))


def _run(context: StageContext, fixture: Fixture, thresholds: Thresholds, long: bool) -> TracedRun:
    from equiport.stages.traced_plots import plot_traced_run

    assert context.experiment is not None
    prompts, steps = _LONG if long else _SHORT
    config = read_config(fixture.folder)
    longest = config.get("max_position_embeddings")
    room = longest - steps if isinstance(longest, int) else max(prompts)
    fitting = tuple(max(1, min(length, room)) for length in prompts)
    if not context.stack.ragged_rows:
        fitting = (fitting[0],)
    batch = draw_batch(vocabulary_size(fixture.folder), fitting, steps, context.options.seed, special_ids(config))
    with context.progress.step(f"traced run {fixture.label}"):
        context.stack.init_distributed(context.port.tp_degree)
        traced = trace_components(
            context.stack,
            context.port.modeling_file,
            context.port.classes,
            mapping_of(context.experiment),
            fixture,
            {context.options.seed: batch},
            free=True,
        )
        run, curves = judge_trace(traced, fixture.label, batch, thresholds)
    file = context.experiment.results / FILE_NAME.replace(".json", f"_{fixture.kind.value}.json")
    write_json(file, [curve for curve in curves])
    plot = plot_traced_run(run, context.experiment.plots, f"traced_run_{fixture.kind.value}.png")
    run.plots = [str(plot.relative_to(context.experiment.root))]
    return run


def judge_trace(
    traced: TraceResult, label: str, batch: TokenBatch, thresholds: Thresholds
) -> tuple[TracedRun, list[PositionCurve]]:
    """Figures of both views, the first bad place of each, and the position curves of all modules."""
    order = {module: place for place, module in enumerate(traced.order)}
    rows: list[TracedRow] = []
    curves: list[PositionCurve] = []
    views: tuple[tuple[View, tuple[ComponentSample, ...]], ...] = (("shadow", traced.samples), ("free", traced.free))
    for view, samples in views:
        usable = [sample for sample in samples if not sample.problem]
        rows += _rows(view, usable, order, thresholds)
        curves += _curves(view, usable)
    first = [item for view, _ in views if (item := first_bad(view, rows, thresholds))]
    shown = [curve for view, _ in views if (curve := _shown(view, rows, curves, first))]
    lengths = ", ".join(map(str, batch.prompt_lengths))
    tokens = f"prompts of {lengths} tokens, {batch.decode_steps} decode steps"
    return TracedRun(fixture=label, tokens=tokens, rows=rows, first_bad=first, curves=shown), curves


def _rows(
    view: View, samples: Sequence[ComponentSample], order: dict[str, int], thresholds: Thresholds
) -> list[TracedRow]:
    found = []
    for sample in samples:
        row = instance_rows([_record(sample)], thresholds)[0]
        # a rotary module is called before the layers that use its tables
        values = {**row.model_dump(), "view": view, "module": sample.module, "order": order.get(sample.module, -1)}
        found.append(TracedRow(**values))
    return sorted(found, key=lambda row: row.order)


def _record(sample: ComponentSample) -> Record:
    try:
        return make_record(sample.name, comparison=compare_sample(sample))
    except ComparisonError as error:
        labels = Labels(component=sample.component, component_type=sample.component_type, layer=sample.layer)
        return make_record(sample.name, reasons=(reason(error.code, error.what, sample.name),), labels=labels)


def first_bad(view: View, rows: Sequence[TracedRow], thresholds: Thresholds) -> FirstBad | None:
    """The first module, in the order of the source's forward, whose figures leave the limits.

    First by the fp32 evidence and by R >= 1.5, which no single draw of correct code reaches in the mean of a component;
    where nothing does, by precision: the layer from which the mean of R stays at 1.2 and above to the end.
    """
    own = [row for row in rows if row.view == view]
    # fp32 first: a router's flip in bf16 must not hide where the formula differs
    for exact in (True, False):
        for row in own:
            rule = _rule(row, thresholds, exact)
            if rule:
                return _first(row, rule)
    layers: dict[int, list[float]] = defaultdict(list)
    for row in own:
        if row.layer is not None and row.r_ratio is not None:
            layers[row.layer].append(max(row.r_ratio, thresholds.r_floor))
    start: int | None = None
    for layer in sorted(layers, reverse=True):
        if geometric_mean(layers[layer]) < thresholds.r_single:
            break
        start = layer
    if start is None:
        return None
    within = [row for row in own if row.layer == start and row.r_ratio is not None]
    over = [row for row in within if (row.r_ratio or 0.0) >= thresholds.r_single]
    return _first(over[0], f"mean R of layer {start} and of all after it >= {thresholds.r_single:g}")


def _rule(row: TracedRow, thresholds: Thresholds, exact: bool) -> str:
    if exact and row.excess == inf:
        return "not comparable, or a lookup or copy with other values"
    fp32 = ((row.r32, thresholds.r32_pooled, "R32"), (row.r32_slice, thresholds.r32_slice, "R32 of a slice"))
    for value, limit, name in fp32 if exact else ((row.r_ratio, thresholds.r_component, "R"),):
        if value is not None and not value <= limit:
            return f"{name} {value:.3g} > {limit:g}"
    return ""


def _first(row: TracedRow, rule: str) -> FirstBad:
    kept = row.model_dump(include=set(FirstBad.model_fields) & set(TracedRow.model_fields))
    return FirstBad(**kept, rule=rule)


def _shown(
    view: View, rows: Sequence[TracedRow], curves: Sequence[PositionCurve], first: Sequence[FirstBad]
) -> PositionCurve | None:
    """The curve of the view's first bad module, else of the last module of the forward."""
    own = {curve.module: curve for curve in curves if curve.view == view}
    wanted = [item.module for item in first if item.view == view]
    wanted += [row.module for row in reversed(rows) if row.view == view]
    return next((own[module] for module in wanted if module in own), None)


def _curves(view: View, samples: Sequence[ComponentSample]) -> list[PositionCurve]:
    grouped: dict[str, list[ComponentSample]] = defaultdict(list)
    for sample in samples:
        if sample.places is not None:
            grouped[sample.module].append(sample)
    return [curve for group in grouped.values() if (curve := _curve(view, group))]


def _curve(view: View, group: Sequence[ComponentSample]) -> PositionCurve | None:
    """Errors by position over the phases of one module; None where a side gave another shape."""
    shapes = [
        {side.shape for side in (sample.ref_fp32, sample.ref_bf16, sample.target) if side is not None}
        for sample in group
    ]
    if any(len(found) != 1 for found in shapes):
        return None
    positions = torch.cat([sample.places[:, 1] for sample in group if sample.places is not None])
    count = int(positions.max()) + 1
    sums = {name: torch.zeros(count, dtype=torch.float64) for name in ("ref", "base", "error", "exact")}
    for sample in group:
        assert sample.ref_fp32 is not None and sample.ref_bf16 is not None and sample.target is not None
        places = sample.places[:, 1] if sample.places is not None else positions
        reference = sample.ref_fp32.double()
        sides = {"base": sample.ref_bf16, "error": sample.target, "exact": sample.target_fp32}
        sums["ref"].index_add_(0, places, _squares(reference))
        for name, side in sides.items():
            if side is not None and side.shape == reference.shape:
                sums[name].index_add_(0, places, _squares(side.double() - reference))
    seen = positions.unique()
    base = sums["base"][seen].sqrt()
    typical = float(base.square().mean().sqrt())
    floor = _FLOOR * typical if typical else 1e-30
    if not typical:
        base = NOMINAL_BF16 * sums["ref"][seen].sqrt()
    base = base.clamp(min=floor)
    return PositionCurve(
        view=view,
        component=group[0].component,
        module=group[0].module,
        layer=group[0].layer,
        positions=seen.tolist(),
        r_ratio=(sums["error"][seen].sqrt() / base).tolist(),
        r32=(sums["exact"][seen].sqrt() / base).tolist(),
    )


def _squares(values: Tensor) -> Tensor:
    """Sums of squares [N] of [N, ...]; what is not finite, or a mask fill, counts for nothing."""
    kept = torch.where(values.isfinite() & (values.abs() < 1e8), values, torch.zeros_like(values))
    return kept.square().flatten(1).sum(1)
