"""From mapping and fixture to comparable tensors: for each component, what both sides gave on the same inputs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from equiport.compare.baseline import is_projection, split_reduction
from equiport.errors import EquiportError
from equiport.fixtures.tokens import TokenBatch
from equiport.reference.model import Fixture, load_reference
from equiport.stacks.contract import LoadReport, StackAdapter
from equiport.stacks.port_classes import PortClasses
from equiport.structure.mapping import ENTRY_TYPE, HEAD_PATH, ComponentMapping, MappingEntry, module_of
from equiport.trace.direct import DirectCalls, DirectPair
from equiport.trace.module_io import take_tokens
from equiport.trace.reference import ReferenceIO, capture_reference
from equiport.trace.routing import Routed, RoutingNoise, settled, watch_routers
from equiport.trace.sample import NEVER_CALLED, ONLY_PORT_CALLS, ComponentSample
from equiport.trace.target import ShadowEntry, ShadowOutput, ShadowPair, shadow_target

_ROTARY_MARKS = ("rotary", "rope")


@dataclass(frozen=True)
class Instance:
    """One component at one layer."""

    entry: MappingEntry
    source: tuple[str, ...]
    target: str
    index: tuple[int, ...]
    level: int

    @property
    def is_entry(self) -> bool:
        """The way to the first decoder layer; `target` is that layer, whose own input is compared."""
        return self.entry.component_type == ENTRY_TYPE

    @property
    def shown(self) -> str:
        """What it is called in samples."""
        return self.entry.name if self.is_entry else self.target

    @property
    def is_rotary(self) -> bool:
        """Rotary tables are called directly: their inputs are positions."""
        return not self.is_entry and any(mark in self.target.split(".")[-1].lower() for mark in _ROTARY_MARKS)


@dataclass(frozen=True)
class TraceResult:
    """Samples of one fixture, and how the port's weights loaded.

    `free`: samples of a free run, in which each side runs on its own activations; empty unless asked for. `order`:
    target paths in the order in which the source computes their outputs. `notes`: what could not be compared, and what
    the adapter has seen while the port ran.
    """

    samples: tuple[ComponentSample, ...]
    load: LoadReport
    free: tuple[ComponentSample, ...] = ()
    order: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def instances_of(mapping: ComponentMapping) -> tuple[Instance, ...]:
    """Every component at every layer, with its nesting level: 0 holds no other component, 1 holds level 0, ...

    Modules of one level never contain one another, so one shadow run serves a level.

    Raises:
        EquiportError: a reduction split is declared on a module that contains other components.
    """
    flat = [
        (entry, source, target[0], index)
        for entry in mapping.components
        if len(entry.target) == 1
        for source, target, index in entry.instances()
    ]
    paths = {target for _, _, target, _ in flat}
    levels: dict[str, int] = {}
    for path in sorted(paths, key=lambda path: -path.count(".")):
        inside = [levels[other] for other in levels if other.startswith(path + ".")]
        levels[path] = 1 + max(inside, default=-1)
    composed = [entry.name for entry, _, target, _ in flat if levels[target] and (entry.reduction_split or 1) > 1]
    if composed:
        raise EquiportError(
            "reduction_split belongs to the projection whose reduction is split, not to a module around it",
            where="component_mapping.json",
            field=composed[0],
            remedy="Declare it on the down_proj or o_proj entry; what contains it follows.",
        )
    splits = {target: entry.reduction_split or 1 for entry, _, target, _ in flat if levels[target] == 0}
    found = tuple(
        Instance(replace(entry, reduction_split=_inside(target, splits)), source, target, index, levels[target])
        for entry, source, target, index in flat
    )
    entry, layer = mapping.entry_path, mapping.first_layer
    if entry is not None and layer is not None:
        found += (Instance(entry, entry.source, layer[1], (), levels[layer[1]]),)
    if mapping.head is not None:
        found += (Instance(HEAD_PATH, HEAD_PATH.source, HEAD_PATH.name, (), levels[mapping.head.target[0]]),)
    return found


def _inside(target: str, splits: Mapping[str, int]) -> int:
    """The split of a component: its own, or the largest of a projection inside it."""
    return max(
        split for path, split in {target: 1, **splits}.items() if path == target or path.startswith(target + ".")
    )


def trace_components(
    adapter: StackAdapter,
    port_file: Path,
    classes: PortClasses,
    mapping: ComponentMapping,
    fixture: Fixture,
    batches: Mapping[int, TokenBatch],
    *,
    with_fp32: bool = True,
    free: bool = False,
    on_step: Callable[[str], None] = lambda _: None,
) -> TraceResult:
    """Run reference (fp32, bf16) and port (bf16, fp32), one model in memory at a time.

    The seeds' batches run as one, and its rows are told apart again in the samples. All decode as many steps. `free`:
    besides, one run of each side on its own activations.

    Raises:
        EquiportError: a model does not load or the port does not run.
    """
    on_step("reference fp32")
    model = load_reference(fixture.folder, torch.float32)
    known = {name for name, _ in model.named_modules()}
    instances = _present(instances_of(mapping), known)
    batch = _merged(batches)
    with watch_routers(model) as routed:
        fp32 = capture_reference(model, batch, _sources(instances))
    direct = _direct_calls(fixture, instances)
    direct.take("ref_fp32", model, torch.float32)
    del model
    on_step("reference bf16")
    model = load_reference(fixture.folder, torch.bfloat16)
    bf16, bf16_free, rounded = _reference_bf16(model, batch, instances, fp32, free)
    unsure = RoutingNoise(routed, rounded, batch.max_length)
    direct.take("ref_bf16", model, torch.bfloat16)
    del model
    gc.collect()
    targets: dict[torch.dtype, dict[str, ShadowOutput]] = {}
    freely: dict[torch.dtype, dict[str, ShadowOutput]] = {}
    report, seen = LoadReport(loaded=()), dict[str, None]()
    for dtype, name in ((torch.bfloat16, "target"), (torch.float32, "target_fp32")):
        if dtype is torch.float32 and not with_fp32:
            continue
        on_step(f"port {str(dtype).removeprefix('torch.')}")
        port, report = _load_port(adapter, port_file, classes, fixture, batch, dtype)
        targets[dtype] = _shadow_levels(adapter, port, batch, instances, fp32)
        if free:
            freely[dtype] = _shadow_run(adapter, port, batch, instances, None)
        direct.take(name, adapter.inner_model(port), dtype)
        seen.update(dict.fromkeys(adapter.run_notes(port)))
        del port
        gc.collect()
    samples, notes = direct.samples()
    rows = _rows_of(batches)
    for instance in instances:
        if not instance.is_rotary:
            samples += _samples(instance, fixture, rows, fp32, bf16, targets, unsure)
    own = [
        sample
        for i in instances
        if bf16_free is not None and not i.is_rotary
        for sample in _samples(i, fixture, rows, fp32, bf16_free, freely, RoutingNoise({}, {}, batch.max_length))
    ]
    return TraceResult(tuple(samples), report, tuple(own), _order(instances, fp32), (*notes, *seen))


def _order(instances: Sequence[Instance], fp32: ReferenceIO) -> tuple[str, ...]:
    """Target paths by the place of their last source in the source's forward; what it never calls is left out."""
    ranks = {path: rank for rank, path in enumerate(fp32.outputs)}
    called = [i for i in instances if ranks.keys() >= set(i.source)]
    return tuple(i.shown for i in sorted(called, key=lambda i: max(ranks[path] for path in i.source)))


def _merged(batches: Mapping[int, TokenBatch]) -> TokenBatch:
    parts = list(batches.values())
    return TokenBatch(
        tuple(row for part in parts for row in part.rows),
        tuple(length for part in parts for length in part.prompt_lengths),
        parts[0].decode_steps,
    )


def _rows_of(batches: Mapping[int, TokenBatch]) -> dict[int, range]:
    """Seed -> its rows in the merged batch."""
    rows, start = {}, 0
    for seed, batch in batches.items():
        rows[seed] = range(start, start + batch.batch_size)
        start += batch.batch_size
    return rows


def _present(instances: Sequence[Instance], known: set[str]) -> list[Instance]:
    """The instances that a fixture has: a tiny one has fewer layers than the mapping."""
    there = [i for i in instances if known.issuperset(map(module_of, i.source))]
    layers = {i.index for i in there if i.index and any("{i}" in path for path in i.entry.source)}
    return [i for i in there if not (i.is_rotary and i.index and layers) or i.index in layers]


def _sources(instances: Sequence[Instance]) -> list[str]:
    return sorted({path for instance in instances for path in instance.source if not instance.is_rotary})


def _reference_bf16(
    model: nn.Module, batch: TokenBatch, instances: Sequence[Instance], fp32: ReferenceIO, free: bool
) -> tuple[ReferenceIO, ReferenceIO | None, dict[int, dict[str, Routed]]]:
    """Outputs on the fp32 run's inputs, level by level, those of a free run, and what routers did in each level.

    Reductions are split as the mapping says.

    A bias is added after the product is rounded, as a stack's sharded layers do: against HF's fused addition correct
    ports measure a mean R of 1.24.
    """
    merged = ReferenceIO()
    routed: dict[int, dict[str, Routed]] = {}
    biased = [name for name, module in model.named_modules() if is_projection(module) and module.bias is not None]
    with ExitStack() as splits:
        if biased:
            splits.enter_context(split_reduction(model, 1, biased))
        for instance in instances:
            degree = instance.entry.reduction_split or 1
            if degree > 1 and instance.level == 0 and not instance.is_rotary:
                splits.enter_context(split_reduction(model, degree, instance.source))
        for level in sorted({instance.level for instance in instances}):
            paths = {path for i in instances if i.level == level and not i.is_rotary for path in i.source}
            with watch_routers(model) as routed[level]:
                merged.outputs.update(capture_reference(model, batch, paths, feed=fp32).outputs)
        own = capture_reference(model, batch, _sources(instances)) if free else None
    return merged, own, routed


def _load_port(
    adapter: StackAdapter,
    port_file: Path,
    classes: PortClasses,
    fixture: Fixture,
    batch: TokenBatch,
    dtype: torch.dtype,
) -> tuple[nn.Module, LoadReport]:
    model = adapter.create_model(
        port_file,
        classes.causal or classes.inner,
        classes.config,
        fixture.folder,
        dtype=dtype,
        batch_size=batch.batch_size,
        seq_len=batch.max_length,
    )
    return model, adapter.load_weights(model, fixture.folder, dtype)


def _shadow_levels(
    adapter: StackAdapter, model: nn.Module, batch: TokenBatch, instances: Sequence[Instance], fp32: ReferenceIO
) -> dict[str, ShadowOutput]:
    outputs: dict[str, ShadowOutput] = {}
    for level in sorted({instance.level for instance in instances}):
        outputs.update(_shadow_run(adapter, model, batch, [i for i in instances if i.level == level], fp32))
    return outputs


def _shadow_run(
    adapter: StackAdapter, model: nn.Module, batch: TokenBatch, instances: Sequence[Instance], fp32: ReferenceIO | None
) -> dict[str, ShadowOutput]:
    here = [i for i in instances if not i.is_rotary]
    ways = [i for i in here if i.entry is HEAD_PATH or i.is_entry]
    pairs = [ShadowPair(i.target, i.source[0]) for i in here if i not in ways]
    logits = HEAD_PATH.name if any(not i.is_entry for i in ways) else ""
    entry = next((ShadowEntry(i.entry.name, i.target) for i in ways if i.is_entry), None)
    return shadow_target(adapter, model, batch, pairs, fp32, logits, entry)


def _direct_calls(fixture: Fixture, instances: Sequence[Instance]) -> DirectCalls:
    pairs = [(i, DirectPair(i.entry, i.source[0], i.target, i.index)) for i in instances]
    return DirectCalls(
        fixture,
        [pair for i, pair in pairs if i.is_rotary],
        [pair for i, pair in pairs if i.entry.component_type == "embedding" and len(i.source) == 1],
    )


def _holds(output: Tensor, places: Tensor) -> bool:
    """Whether [B, T, ...] has every (row, token) of `places` [N, 2]."""
    return output.dim() >= 2 and not bool((places >= torch.tensor(output.shape[:2])).any())


def _samples(
    instance: Instance,
    fixture: Fixture,
    rows: Mapping[int, range],
    fp32: ReferenceIO,
    bf16: ReferenceIO,
    targets: dict[torch.dtype, dict[str, ShadowOutput]],
    unsure: RoutingNoise,
) -> list[ComponentSample]:
    """One sample a seed and phase; or one that says why there are none.

    Tokens that noise may route elsewhere say nothing of the bf16 error: there both bf16 sides count as exact.
    """
    shadow = targets[torch.bfloat16][instance.shown]
    shadow_fp32 = targets.get(torch.float32, {}).get(instance.shown)

    def sample(
        seed: int, phase: str, tensors: tuple[Tensor, ...] = (), problem: str = "", places: Tensor | None = None
    ) -> ComponentSample:
        return ComponentSample.of(
            instance.entry, instance.shown, instance.index, fixture, phase, tensors, problem, seed=seed, places=places
        )

    called = sum(fp32.calls.get(path, 0) for path in instance.source)
    problem = shadow.problem
    if not shadow.calls or not called:
        problem = NEVER_CALLED if called else ONLY_PORT_CALLS if shadow.calls else ""
        if not problem:
            return []
    if problem:
        return [sample(next(iter(rows)), "prefill", problem=problem)]
    found = []
    for phase in ("prefill", "decode"):
        ours, exact = shadow.phase(phase), shadow_fp32.phase(phase) if shadow_fp32 else None
        if ours is None:
            continue
        target, places = ours
        if any(not _holds(side.outputs[path], places) for side in (fp32, bf16) for path in instance.source):
            shape = tuple(fp32.outputs[instance.source[0]].shape)
            return [sample(next(iter(rows)), phase, problem=f"the source's output has no row a token, {shape}")]
        sides = [
            torch.cat([take_tokens(side.outputs[path], places) for path in instance.source], dim=-1)
            for side in (fp32, bf16)
        ]
        tensors = instance.entry.aligned((*sides, target, *((exact[0],) if exact else ())))
        noise = unsure.at(instance.source, instance.level, places)
        tensors = settled(tensors, noise.bf16)
        for seed, own in rows.items():
            here = (places[:, 0] >= own.start) & (places[:, 0] < own.stop)
            chosen = here & ~noise.fp32
            own_places = places[chosen] - torch.tensor([own.start, 0])
            made = sample(seed, phase, tuple(tensor[chosen] for tensor in tensors), places=own_places)
            found.append(replace(made, tokens=int(here.sum()), unsure=int((here & noise.bf16).sum())))
    return found
