"""Prove the cause of a suspect: its traced samples become cases, and every hypothesis is tried on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from equiport.compare.gates import judge
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Verdict
from equiport.errors import EquiportError
from equiport.experiment import Experiment
from equiport.localize.case import Case, Observation
from equiport.localize.causes import precision
from equiport.localize.drafts import Draft
from equiport.localize.layers import explains
from equiport.localize.search import Explanation, explain, explain_precision
from equiport.reference.model import load_reference
from equiport.stages.component_check import compare_sample
from equiport.stages.component_fixtures import (
    StoredBatch,
    TraceManifest,
    component_samples,
    mapping_of,
    read_manifest,
    trace_folder,
)
from equiport.stages.instances import InstanceRow
from equiport.stages.patch_plan import PatchPlan, plan_patch
from equiport.structure.mapping import MappingEntry, fill
from equiport.trace.reference import capture_reference
from equiport.trace.rotary import rounding_aside
from equiport.trace.sample import REPRODUCED, ComponentSample

# the drawn weights first: they are small, and everything in them is excited
_PREFERENCE = ("perturbed", "stress", "real")
_CASES = 3
_OTHER_LAYERS = 8


class Cause(BaseModel):
    """One hypothesis with its figures. For precision order they are in units of the bf16 baseline."""

    kind: str
    says: str
    repair: str
    r32: float


class CauseReport(BaseModel):
    """What was found for one suspect: `proven` means that the source with the defect in it gives the port's output.

    `before`: R32 against the untouched source; `runner_ups` are the next best hypotheses. `patch`: what a patch has
    to do, where the defect has an inverse. `elsewhere`: the first layer that the winner does not explain, and its own
    cause; empty where there is none.
    """

    component: str
    layer: int | None
    fixture: str
    before: float
    proven: bool
    winner: Cause | None = None
    runner_ups: list[Cause] = []
    tried: int = 0
    note: str = ""
    patch: PatchPlan | None = None
    elsewhere: str = ""


@dataclass
class _Models:
    """Source models by folder and dtype; one at a time is kept."""

    held: dict[tuple[Path, torch.dtype], nn.Module] = field(default_factory=dict)

    def get(self, folder: Path, dtype: torch.dtype) -> nn.Module:
        key = (folder, dtype)
        if key not in self.held:
            if len(self.held) > 2 * _CASES:
                self.held.clear()
            self.held[key] = load_reference(folder, dtype)
        return self.held[key]


def prove_causes(
    experiment: Experiment, suspects: Sequence[str], instances: Sequence[InstanceRow], thresholds: Thresholds
) -> list[CauseReport]:
    """One report a suspect component, in their order; none for what holds a suspect that is explained already."""
    manifest = read_manifest(trace_folder(experiment))
    mapping = mapping_of(experiment)
    entries = {entry.name: entry for entry in mapping.tested}
    models = _Models()
    found: list[CauseReport] = []
    for component in suspects:
        rows = [row for row in instances if row.component == component]
        explained = any(report.proven and report.component.startswith(component + ".") for report in found)
        if component in entries and rows and not explained:
            report, draft = _prove(experiment, manifest, entries[component], rows, thresholds, models)
            if draft is not None:
                plan = plan_patch(draft, entries[component], report.layer, rows, mapping, manifest.not_called)
                report = report.model_copy(update={"patch": plan})
            found.append(report)
    return found


def innermost(components: Sequence[str]) -> list[str]:
    """The components that contain no other of them first, then what contains them, each in the given order."""

    def holds_another(name: str) -> bool:
        return any(other.startswith(name + ".") for other in components)

    return sorted(components, key=holds_another)


def _prove(
    experiment: Experiment,
    manifest: TraceManifest,
    entry: MappingEntry,
    rows: Sequence[InstanceRow],
    thresholds: Thresholds,
    models: _Models,
) -> tuple[CauseReport, Draft | None]:
    fixture, layer, exact = _where(rows, thresholds)
    report = CauseReport(component=entry.name, layer=layer, fixture=fixture, before=0.0, proven=False)
    groups = _groups(experiment, entry, fixture, layer)
    samples = [sample for group in groups for sample in group]
    if not groups:
        return report.model_copy(update={"note": "nothing was traced for it"}), None
    if not exact and all(_agrees(sample, thresholds) for sample in samples):
        note = "it agrees on the tokens and near positions that were run: what differs are other ids or far positions"
        return report.model_copy(update={"note": note}), None
    try:
        if exact:
            found = _precision(manifest, entry, groups, thresholds, models, rows[0].component_type)
        else:
            found = _formula(manifest, entry, groups, thresholds, models)
    except EquiportError as error:
        return report.model_copy(update={"note": str(error)}), None
    ranked = [Cause(kind=item.kind, says=item.says, repair=item.repair, r32=item.r32) for item in found.ranked]
    if not found.proven:
        return report.model_copy(update={"before": found.before, "runner_ups": ranked, "tried": found.tried}), None
    proven = report.model_copy(
        update={
            "before": found.before, "proven": True, "winner": ranked[0], "runner_ups": ranked[1:], "tried": found.tried,
        }
    )  # fmt: skip
    if not exact:
        at = tuple(fill(path, groups[0][0].index) for path in entry.source)
        text = _elsewhere(experiment, manifest, entry, rows, thresholds, models, proven, at)
        proven = proven.model_copy(update={"elsewhere": text})
    return proven, found.ranked[0].candidate.draft


def _groups(
    experiment: Experiment, entry: MappingEntry, fixture: str, layer: int | None
) -> list[list[ComponentSample]]:
    """The samples of one layer under one fixture, a list a seed, of the first few seeds."""
    samples = [
        sample
        for sample in component_samples(trace_folder(experiment), entry.name)
        if sample.layer == layer and sample.fixture_kind == fixture and sample.phase in REPRODUCED
    ]
    seeds = list(dict.fromkeys(sample.seed for sample in samples))[:_CASES]
    return [[sample for sample in samples if sample.seed == seed] for seed in seeds]


def _elsewhere(
    experiment: Experiment,
    manifest: TraceManifest,
    entry: MappingEntry,
    rows: Sequence[InstanceRow],
    thresholds: Thresholds,
    models: _Models,
    proven: CauseReport,
    at: tuple[str, ...],
) -> str:
    """The first other bad layer that the proven cause does not explain, searched for its own; no more than one."""
    bad = {
        row.layer
        for row in rows
        if row.layer is not None and row.fixture.split("-")[0] == proven.fixture and row.excess > 1
        and not _exact(row, thresholds)
    }  # fmt: skip
    for layer in sorted(bad - {proven.layer})[:_OTHER_LAYERS]:
        groups = _groups(experiment, entry, proven.fixture, layer)
        if not groups or proven.winner is None:
            continue
        first = groups[0]
        here = [_observation(sample, sample.target_fp32) for sample in first]
        case = _case(manifest, entry, first, torch.float32, here, models)
        if explains(proven.winner.says, at, case, thresholds.r32_pooled):
            continue
        found = _formula(manifest, entry, groups, thresholds, models)
        if not found.proven:
            return f"layer {layer} is not explained by it, and no other cause is proven there"
        return f"in layer {layer}: {found.ranked[0].says}"
    return ""


def _where(rows: Sequence[InstanceRow], thresholds: Thresholds) -> tuple[str, int | None, bool]:
    """The fixture and first bad layer to look at, and whether fp32 agrees there."""
    for fixture in _PREFERENCE:
        own = [row for row in rows if row.fixture.split("-")[0] == fixture]
        fp32 = [row for row in own if row.r32 is None or not _exact(row, thresholds)]
        bad = [row for row in fp32 if row.excess > 1]
        if bad:
            return fixture, min((row.layer for row in bad if row.layer is not None), default=None), False
    worst = max(rows, key=lambda row: row.r_ratio or 0.0)
    return worst.fixture.split("-")[0], worst.layer, _exact(worst, thresholds)


def _exact(row: InstanceRow, thresholds: Thresholds) -> bool:
    return (
        row.r32 is not None
        and row.r32 <= thresholds.r32_pooled
        and (row.r32_slice is None or row.r32_slice <= thresholds.r32_slice)
    )


def _agrees(sample: ComponentSample, thresholds: Thresholds) -> bool:
    try:
        found = compare_sample(sample)
    except EquiportError:
        return False
    return judge(found, thresholds, thresholds.r_slice).verdict is Verdict.PASS


def _formula(
    manifest: TraceManifest,
    entry: MappingEntry,
    groups: Sequence[Sequence[ComponentSample]],
    thresholds: Thresholds,
    models: _Models,
) -> Explanation:
    cases = [
        _case(manifest, entry, group, torch.float32, [_observation(s, s.target_fp32) for s in group], models)
        for group in groups
    ]
    return explain(cases, thresholds)


def _precision(
    manifest: TraceManifest,
    entry: MappingEntry,
    groups: Sequence[Sequence[ComponentSample]],
    thresholds: Thresholds,
    models: _Models,
    component_type: str,
) -> Explanation:
    cases, exact = [], []
    for samples in groups:
        # sums over one token are ordered otherwise than over many: prefill has the source's own shapes
        group = [sample for sample in samples if sample.phase == "prefill"] or list(samples)
        bf16 = [_observation(sample, sample.target) for sample in group]
        fp32 = [_observation(sample, sample.ref_fp32) for sample in group]
        cases.append(_case(manifest, entry, group, torch.bfloat16, bf16, models))
        exact.append(_case(manifest, entry, group, torch.float32, fp32, models))
    found = explain_precision(cases, exact, thresholds.component_limit(component_type))
    assert all(item.kind == precision.KIND for item in found.ranked)
    return found


def _observation(sample: ComponentSample, value: Tensor | None) -> Observation:
    if value is None or sample.ref_fp32 is None or sample.ref_bf16 is None:
        raise EquiportError("was traced without an fp32 run", remedy="Run stage 2 again.")
    baseline = float((sample.ref_bf16.double() - sample.ref_fp32.double()).norm())
    return Observation(sample.phase, value, baseline, sample.places, _settled(sample, value))


def _settled(sample: ComponentSample, value: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Tables were compared with the rounding of their angles set aside: so must those be that explain them."""
    ref, low = sample.ref_fp32, sample.ref_bf16
    if sample.phase != "tables" or ref is None or low is None:
        return None
    positions, place = torch.arange(len(ref)), 2 if value.dtype is torch.bfloat16 else 3

    def settled(table: Tensor) -> Tensor:
        return table if table.shape != ref.shape else rounding_aside(positions, ref, (ref, low, table, table))[place]

    return settled


def _case(
    manifest: TraceManifest,
    entry: MappingEntry,
    group: Sequence[ComponentSample],
    dtype: torch.dtype,
    observations: Sequence[Observation],
    models: _Models,
) -> Case:
    stored = _stored(manifest, group[0])
    batch = stored.batch()
    sources = tuple(fill(path, group[0].index) for path in entry.source)
    feed = capture_reference(models.get(stored.folder, torch.float32), batch, sources)
    run = next(
        item for item in manifest.batches if (item.fixture, item.folder) == (stored.fixture, stored.folder)
    ).batch()
    return Case(
        models.get(stored.folder, dtype), sources, entry, batch, feed, tuple(observations), run.prompt_lengths[0]
    )


def _stored(manifest: TraceManifest, sample: ComponentSample) -> StoredBatch:
    own = [item for item in manifest.batches if item.fixture == sample.fixture_kind]
    exact = [item for item in own if item.seed == sample.seed]
    if not own:
        raise EquiportError("the trace does not name its tokens", remedy="Run stage 2 again.")
    return (exact or own)[0]
