"""The fixtures of stage 2 and their trace: what both sides gave, stored once for all test files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from equiport.errors import EquiportError
from equiport.experiment import Experiment
from equiport.experiment.atomic import read_json, write_json
from equiport.fixtures.excitation import Excitation, excitation, merged
from equiport.fixtures.folder import read_config
from equiport.fixtures.tiny_config import tiny_config
from equiport.fixtures.tokens import TokenBatch, draw_batch, special_ids
from equiport.fixtures.weights import WeightKind
from equiport.reference.model import Fixture, load_reference, materialize, real_fixture
from equiport.reference.names import attribute_names
from equiport.stacks.contract import LoadReport, StackAdapter
from equiport.stages.frame import Subject, vocabulary_size
from equiport.stages.progress import Progress
from equiport.structure.mapping import ComponentMapping, check_mapping, load_mapping
from equiport.trace.components import trace_components
from equiport.trace.excited import measure
from equiport.trace.sample import NEVER_CALLED, ComponentSample, load_samples, save_samples

# by turns: ragged, of equal length, one token alone; the longest row fills the cache to its last slot
_PROMPTS: tuple[tuple[int, int], ...] = ((24, 17), (19, 19), (14, 1))
_EQUAL_PROMPTS: tuple[tuple[int, int], ...] = ((24, 24),)
_DECODE_STEPS = 5


class StoredBatch(BaseModel):
    """The tokens of one seed under one kind of weights, and the folder of those weights."""

    fixture: str
    seed: int
    folder: Path
    rows: list[list[int]]
    prompt_lengths: list[int]
    decode_steps: int

    def batch(self) -> TokenBatch:
        """As it was run."""
        return TokenBatch(tuple(map(tuple, self.rows)), tuple(self.prompt_lengths), self.decode_steps)


class TraceManifest(BaseModel):
    """What was traced: seeds, what could not be compared, what was excited, how weights loaded."""

    seeds: list[int]
    fixtures: list[str]
    untestable: dict[str, str]
    not_called: list[str]
    excitation: list[tuple[str, str, bool, str]]
    load_findings: list[str]
    notes: list[str]
    batches: list[StoredBatch] = []


@dataclass(frozen=True)
class Variant:
    """A folder of drawn weights that whole models are run on besides, and what it is called."""

    name: str
    folder: Path


@dataclass(frozen=True)
class TracePlan:
    """Which seeds and which kinds of weights."""

    seeds: tuple[int, ...]
    kinds: tuple[WeightKind, ...] = (WeightKind.REAL, WeightKind.PERTURBED, WeightKind.STRESS)


def trace_folder(experiment: Experiment) -> Path:
    """Where the trace lies."""
    return experiment.results / "trace"


def mapping_of(experiment: Experiment) -> ComponentMapping:
    """The experiment's mapping, expanded over the trees that stage 0 wrote.

    Raises:
        EquiportError: no trees or no mapping yet, or the mapping is invalid.
    """
    trees = {}
    for side in ("source", "target"):
        file = experiment.model_tree / f"model_tree_{side}_flat_paths.txt"
        if not file.is_file():
            raise EquiportError("no such file", where=file, remedy="Run stage 0 first.")
        trees[side] = file.read_text(encoding="utf-8").split()
    mapping = load_mapping(experiment.mapping_file, trees["source"], trees["target"])
    problems = check_mapping(mapping, trees["source"], trees["target"]).problems
    if problems:
        raise EquiportError(
            problems[0].problem,
            where=experiment.mapping_file,
            field=problems[0].entry,
            remedy="Correct this entry, or delete the file to have it proposed again.",
        )
    return mapping


def write_trace(
    experiment: Experiment,
    subject: Subject,
    adapter: StackAdapter,
    weights: Path,
    plan: TracePlan,
    progress: Progress,
    *,
    append: bool = False,
) -> TraceManifest:
    """Run every fixture and seed of the plan and store the samples; `append` keeps those of earlier seeds."""
    folder = trace_folder(experiment)
    if not append:
        shutil.rmtree(folder, ignore_errors=True)
    mapping = mapping_of(experiment)
    before = read_manifest(folder) if append else None
    found: list[ComponentSample] = []
    loads: list[LoadReport] = []
    excited: list[tuple[str, Excitation]] = []
    notes: dict[str, None] = {}
    stored: list[StoredBatch] = [] if before is None else list(before.batches)
    for kind in plan.kinds:
        for fixture, batches in _fixtures(experiment, weights, kind, plan.seeds, adapter.ragged_rows):
            with progress.step(f"trace {fixture.label}"):
                result = trace_components(adapter, subject.modeling_file, subject.classes, mapping, fixture, batches)
            found += result.samples
            loads.append(result.load)
            notes.update(dict.fromkeys((*fixture.notes, *result.notes)))
            stored += [_stored(fixture, seed, batch) for seed, batch in batches.items()]
            save_samples(folder, [sample for sample in result.samples if not sample.problem])
            excited += [(kind.value, item) for item in _excited(fixture, batches)]
    earlier = [(kind, Excitation(what, seen, said)) for kind, what, seen, said in (before.excitation if before else [])]
    manifest = TraceManifest(
        seeds=[*(before.seeds if before else []), *plan.seeds],
        fixtures=[kind.value for kind in plan.kinds],
        untestable={s.component: s.problem for s in found if s.problem},
        not_called=list(dict.fromkeys(s.component for s in found if s.problem == NEVER_CALLED)),
        excitation=[(kind, item.item, item.exercised, item.detail) for kind, item in merged([*earlier, *excited])],
        load_findings=sorted({key for load in loads for key in (*load.missing, *load.unexpected, *load.mis_shaped)}),
        notes=list(notes),
        batches=stored,
    )
    write_json(folder / "manifest.json", manifest)
    return manifest


@contextmanager
def drawn_weights(experiment: Experiment | None, weights: Path, seed: int) -> Iterator[Path]:
    """A tiny model of the same architecture with perturbed weights: the experiment's own, or one that passes.

    Raises:
        EquiportError: the architecture is unknown or its config cannot be shrunk.
    """
    with drawn_fixture(experiment, weights, seed) as fixture:
        yield fixture.folder


@contextmanager
def drawn_fixture(experiment: Experiment | None, weights: Path, seed: int) -> Iterator[Fixture]:
    """The same as a fixture, with its notes."""
    with tempfile.TemporaryDirectory(prefix="equiport-fixture-") as work:
        place = (experiment.root / "fixtures" if experiment else Path(work)) / f"perturbed-{seed}"
        yield materialize(weights, place, WeightKind.PERTURBED, seed, tiny=True)


@contextmanager
def drawn_variants(experiment: Experiment | None, weights: Path, seed: int) -> Iterator[list[Variant]]:
    """Tiny models beside the drawn one: with every layer of the source (where that has more), and with loud channels.

    Raises:
        EquiportError: the architecture is unknown or its config cannot be shrunk.
    """
    with tempfile.TemporaryDirectory(prefix="equiport-fixture-") as work:
        place = experiment.root / "fixtures" if experiment else Path(work)
        raw = read_config(weights)
        names = attribute_names(str(raw.get("model_type", "")))
        shallow, deep = (tiny_config(raw, aliases=names, deep=deep).config for deep in (False, True))
        found = []
        if deep != shallow:
            folder = place / f"deep-{seed}"
            materialize(weights, folder, WeightKind.PERTURBED, seed, tiny=True, deep=True)
            found.append(Variant("every layer", folder))
        loud = place / f"loud-{seed}"
        materialize(weights, loud, WeightKind.LOUD, seed, tiny=True)
        yield [*found, Variant("loud channels", loud)]


def component_samples(folder: Path, component: str) -> list[ComponentSample]:
    """The traced samples of one component; what the `samples` fixture of a generated test gives.

    Raises:
        EquiportError: nothing was traced for it.
    """
    return load_samples(folder, component)


def _stored(fixture: Fixture, seed: int, batch: TokenBatch) -> StoredBatch:
    return StoredBatch(
        fixture=fixture.kind.value,
        seed=seed,
        folder=fixture.folder,
        rows=[list(row) for row in batch.rows],
        prompt_lengths=list(batch.prompt_lengths),
        decode_steps=batch.decode_steps,
    )


def read_manifest(folder: Path) -> TraceManifest:
    """What was traced into `folder`.

    Raises:
        EquiportError: nothing was, or the file is damaged.
    """
    return TraceManifest.model_validate(read_json(folder / "manifest.json", remedy="Run run_stage2.py again."))


def _fixtures(
    experiment: Experiment, weights: Path, kind: WeightKind, seeds: Sequence[int], ragged: bool
) -> list[tuple[Fixture, Mapping[int, TokenBatch]]]:
    if kind is WeightKind.REAL:
        vocabulary, special = vocabulary_size(weights), special_ids(read_config(weights))
        batches = {
            seed: draw_batch(vocabulary, prompts, _DECODE_STEPS, seed, special)
            for seed, prompts in _turns(seeds, ragged)
        }
        return [(real_fixture(weights), batches)]
    pairs: list[tuple[Fixture, Mapping[int, TokenBatch]]] = []
    for seed, prompts in _turns(seeds, ragged):
        target = experiment.root / "fixtures" / f"{kind.value}-{seed}"
        fixture = materialize(weights, target, kind, seed, tiny=True)
        special = special_ids(read_config(target))
        batch = draw_batch(vocabulary_size(target), prompts, _DECODE_STEPS, seed, special)
        pairs.append((fixture, {seed: batch}))
    return pairs


def _turns(seeds: Sequence[int], ragged: bool) -> list[tuple[int, tuple[int, ...]]]:
    # equal rows stay equal when the seeds' rows run as one batch, as they do on the model's own weights
    prompts = _PROMPTS if ragged else _EQUAL_PROMPTS
    return [(seed, prompts[number % len(prompts)]) for number, seed in enumerate(seeds)]


def _excited(fixture: Fixture, batches: Mapping[int, TokenBatch]) -> list[Excitation]:
    import torch

    model, config = load_reference(fixture.folder, torch.float32), read_config(fixture.folder)
    state = model.state_dict()
    found: list[Excitation] = []
    for batch in batches.values():
        found += excitation(config, state, batch, measure(model, config, batch))
    return found
