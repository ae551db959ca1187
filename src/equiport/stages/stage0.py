"""Stage 0: trees of both models, the component mapping by weight provenance, CPU and device class branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import BaseModel
from torch import nn

from equiport.compare.verdict import Reason, Verdict
from equiport.errors import EquiportError
from equiport.experiment import Experiment, StageResult
from equiport.experiment.atomic import write_json
from equiport.experiment.config import EquivConfig
from equiport.fixtures.folder import has_weights, read_config, tensor_headers
from equiport.fixtures.weights import WeightKind
from equiport.reference.key_layout import layout_of
from equiport.reference.model import constants, materialize, skeleton
from equiport.reference.stored_names import loaded_names
from equiport.stacks.contract import StackAdapter
from equiport.stages.frame import Outcome, StageContext, StageOptions, StageSpec, Subject, run_stage
from equiport.stages.port_run import load_reasons
from equiport.structure.class_divergence import detect_class_divergence
from equiport.structure.mapping import ComponentMapping, MappingCheck, check_mapping, load_mapping, save_mapping
from equiport.structure.propose import propose_mapping
from equiport.structure.provenance import Origin, Provenance, TensorProvenance, trace_provenance
from equiport.structure.roles import component_type, in_framework
from equiport.structure.tree import build_tree, flat_paths, write_trees

SPEC = StageSpec(0, "structural scaffolding")
_WHOLE_MODEL_LIMIT = 600_000_000


class StructureMetrics(BaseModel):
    """What stage 0 counted. `provenance_on`: the model itself, or a tiny fixture of it."""

    source_modules: int
    target_modules: int
    components: int
    component_instances: int
    tensors_by_origin: dict[str, int]
    computed: list[str]
    unconsumed: list[str]
    mapping: str
    divergences: int
    provenance_on: str


def run(options: StageOptions, subject: Subject, adapter: StackAdapter, output_dir: Path) -> StageResult:
    """Run stage 0; trees go to `output_dir`, whose parent becomes the experiment when it is named model_tree.

    Raises:
        EquiportError: bad input.
    """
    options = replace(options, exp_dir=options.exp_dir or _adopt(options, subject, output_dir))
    return run_stage(
        SPEC, options, lambda context: _body(context, output_dir), subject=subject, adapter=adapter,
        settings={"tp_degree": subject.tp_degree},
    )  # fmt: skip


def _adopt(options: StageOptions, subject: Subject, output_dir: Path) -> Path | None:
    """Make the parent of a model_tree folder the experiment, writing equiv_config.json where there is none."""
    if output_dir.name != "model_tree":
        return None
    root = output_dir.absolute().parent
    if Experiment.find(root) is None:
        write_config(root, subject, options)
    return root


def write_config(root: Path, subject: Subject, options: StageOptions, through: int = 6) -> EquivConfig:
    """Write equiv_config.json of a new experiment."""
    config = EquivConfig(
        source_model_path=subject.model_path.absolute(),
        target_modeling_file=subject.modeling_file.absolute(),
        target_inner_class=subject.classes.inner,
        target_causal_class=subject.classes.causal,
        target_config_class=subject.classes.config,
        exp_dir=root.absolute(),
        target_stack=subject.stack,
        tp_degree=subject.tp_degree,
        thresholds=options.thresholds.absolute() if options.thresholds else None,
        seed=options.seed,
        through=through,
        synthetic_weights=not has_weights(subject.model_path),
    )
    config.save(root)
    return config


def _body(context: StageContext, output_dir: Path) -> Outcome:
    subject, adapter, progress = context.port, context.stack, context.progress
    _ensure_weights(context)
    source = skeleton(subject.model_path)
    with progress.step("build the port"):
        adapter.init_distributed(subject.tp_degree)
        target = adapter.create_model(
            subject.modeling_file, subject.classes.inner, subject.classes.config, context.weights_folder()
        )
    target = adapter.inner_model(target)
    source_tree, target_tree = build_tree(source), build_tree(target)
    write_trees(output_dir, "source", source_tree)
    write_trees(output_dir, "target", target_tree)
    folder, where = _provenance_folder(context)
    provenance = trace_provenance(
        adapter,
        subject.modeling_file,
        subject.classes,
        folder,
        on_step=lambda text: progress.line(f"provenance: {text}"),
    )
    stored = [header.name for header in tensor_headers(folder)]
    names, layout = loaded_names(source, stored), layout_of(stored, source)
    provenance = provenance.loaded(names)
    mapping, check, origin = _mapping(context, source, target, provenance)
    divergences = detect_class_divergence(subject.modeling_file, adapter.source_roots())
    root = context.experiment.root if context.experiment else output_dir.parent
    write_json(root / "class_divergence_report.json", [asdict(item) for item in divergences])
    reasons = [
        *load_reasons(provenance.load),
        *_provenance_reasons(provenance, source, target),
        *_crossed_reasons(mapping),
    ]
    fixed = set(constants(source))
    idle = [name for name in provenance.unconsumed if names.get(name, name) not in fixed]
    lost, open_points = _unconsumed_reasons(provenance, idle)
    reasons += lost
    open_points += _mapping_reasons(check)
    verdict = Verdict.FAIL if reasons else Verdict.INCONCLUSIVE if open_points else Verdict.PASS
    metrics = StructureMetrics(
        source_modules=sum(1 for _ in flat_paths(source_tree)),
        target_modules=sum(1 for _ in flat_paths(target_tree)),
        components=len(mapping.components),
        component_instances=sum(len(entry.instances()) for entry in mapping.components),
        tensors_by_origin=_by_origin(provenance),
        computed=[
            tensor.describe() for tensor in provenance.tensors if tensor.origin in (Origin.COMPUTED, Origin.ALTERED)
        ],
        unconsumed=list(provenance.unconsumed),
        mapping=origin,
        divergences=len(divergences),
        provenance_on=where,
    )
    mapping_file = [root / "component_mapping.json"] if (root / "component_mapping.json").is_file() else []
    return Outcome(
        verdict,
        [*reasons, *open_points],
        metrics,
        blind_spots=[
            f"device class untested: {item.where} runs {item.cpu_class} here and {item.device_class} on the device"
            for item in divergences
        ]
        + [f"loading: {note}" for note in provenance.load.notes]
        + ([f"checkpoint: {layout.words()}"] if layout.words() else []),
        inputs=mapping_file,
    )


def _ensure_weights(context: StageContext) -> None:
    """A folder with a config alone gets perturbed weights, once an experiment."""
    subject, experiment = context.port, context.experiment
    if has_weights(subject.model_path):
        tensor_headers(subject.model_path)
        return
    read_config(subject.model_path)
    if experiment is not None and not has_weights(experiment.root / "fixtures" / "synthetic"):
        with context.progress.step("draw synthetic weights (the folder has a config alone)"):
            materialize(
                subject.model_path,
                experiment.root / "fixtures" / "synthetic",
                WeightKind.PERTURBED,
                context.options.seed,
                tiny=False,
            )


def _provenance_folder(context: StageContext) -> tuple[Path, str]:
    folder = context.weights_folder()
    total = 0
    for header in tensor_headers(folder):
        size = 1
        for length in header.shape:
            size *= length
        total += size
    if total <= _WHOLE_MODEL_LIMIT or context.experiment is None:
        return folder, "the whole model"
    tiny = context.experiment.root / "fixtures" / "provenance"
    materialize(folder, tiny, WeightKind.PERTURBED, context.options.seed, tiny=True)
    return tiny, f"a tiny fixture ({total / 1e9:.1f} billion weights are too many to tag)"


def _mapping(
    context: StageContext, source: nn.Module, target: nn.Module, provenance: Provenance
) -> tuple[ComponentMapping, MappingCheck, str]:
    source_paths = [path for path, _ in source.named_modules() if path]
    target_paths = [path for path, _ in target.named_modules() if path]
    file = context.experiment.mapping_file if context.experiment else None
    if file is not None and file.is_file():
        mapping = load_mapping(file, source_paths, target_paths)
        check = check_mapping(mapping, source_paths, target_paths)
        if check.problems:
            raise EquiportError(
                check.problems[0].problem,
                where=file,
                field=check.problems[0].entry,
                remedy="Correct this entry, or delete the file to have it proposed again.",
            )
        return mapping, check, "validated as found"
    split = context.port.tp_degree if context.port.tp_degree > 1 else None
    proposed = propose_mapping(source, target, provenance, reduction_split=split)
    typed = tuple(
        replace(entry, component_type=component_type(target, entry)) if entry.is_component else entry
        for entry in proposed.entries
    )
    mapping = ComponentMapping(typed)
    if file is not None:
        save_mapping(file, mapping)
    return mapping, check_mapping(mapping, source_paths, target_paths), "proposed by weight provenance"


def _provenance_reasons(provenance: Provenance, source: nn.Module, target: nn.Module) -> list[Reason]:
    benign = set(provenance.load.benign)
    reported = set(provenance.load.missing) | benign
    reasons = []
    for tensor in provenance.tensors:
        if tensor.origin is Origin.ALTERED and _shapes_equal(tensor, source):
            reasons.append(Reason("WEIGHT_ALTERED", f"is a copy, but {tensor.note}", tensor.target))
        elif _vocabulary_rearranged(tensor, source):
            reasons.append(
                Reason("VOCABULARY_REARRANGED", "rows stand for other tokens than in the source", tensor.target)
            )
        elif (
            tensor.origin is Origin.CONSTANT
            and not any(_same_tail(tensor.target, name) for name in reported)
            and not in_framework(target, tensor.target)
        ):
            reasons.append(
                Reason("NOT_FROM_WEIGHTS", "holds values that do not depend on the checkpoint", tensor.target)
            )
    return reasons


def _unconsumed_reasons(provenance: Provenance, idle: Sequence[str]) -> tuple[list[Reason], list[Reason]]:
    """(faults, open points): a tensor that arrives nowhere is lost, unless computed tensors may have taken it up."""
    untraced = [tensor for tensor in provenance.tensors if tensor.origin is Origin.COMPUTED and not tensor.sources]
    if untraced:
        what = (
            f"reaches no parameter by itself; {len(untraced)} computed tensors may hold it, first {untraced[0].target}"
        )
        return [], [Reason("WEIGHT_UNTRACED", what, name) for name in idle]
    what = "is in the checkpoint and reaches no parameter of the port"
    return [Reason("WEIGHT_UNCONSUMED", what, name) for name in idle], []


def _source_shape(tensor: TensorProvenance, source: nn.Module) -> tuple[int, ...] | None:
    parameters = dict(source.named_parameters(remove_duplicate=False))
    found = parameters.get(tensor.sources[0]) if len(tensor.sources) == 1 else None
    return tuple(found.shape) if found is not None else None


def _shapes_equal(tensor: TensorProvenance, source: nn.Module) -> bool:
    return _source_shape(tensor, source) == tensor.shape


def _vocabulary_rearranged(tensor: TensorProvenance, source: nn.Module) -> bool:
    """Embeddings and heads have one row a token: no order but the source's is right."""
    if tensor.origin not in (Origin.ROWS, Origin.ELEMENTS) or not _shapes_equal(tensor, source):
        return False
    path = tensor.sources[0].rsplit(".", 1)[0]
    return isinstance(source.get_submodule(path), nn.Embedding) or path.split(".")[-1] in ("lm_head", "embed_out")


def _same_tail(first: str, second: str) -> bool:
    return first == second or first.endswith("." + second) or second.endswith("." + first)


def _crossed_reasons(mapping: ComponentMapping) -> list[Reason]:
    """Layers whose weights came from another layer than the one at the same place."""
    reasons = []
    for entry in mapping.components:
        if any("{" in path for path in (*entry.source, *entry.target)):
            continue
        sources, targets = ([_numbers(path) for path in side] for side in (entry.source, entry.target))
        # experts that a target stacks have a number more, behind the layer's
        if any(number[: len(other)] != other[: len(number)] for number in sources for other in targets):
            reasons.append(
                Reason(
                    "WRONG_LAYER", f"was made from the weights of {', '.join(entry.source)}", ", ".join(entry.target)
                )
            )
    return reasons


def _numbers(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split(".") if part.isdigit())


def _mapping_reasons(check: MappingCheck) -> list[Reason]:
    reasons = []
    for side, paths in (("source", check.unmapped_source), ("target", check.unmapped_target)):
        reasons += [Reason("UNMAPPED", f"a {side} module that no entry maps or explains", path) for path in paths]
    return reasons


def _by_origin(provenance: Provenance) -> dict[str, int]:
    origins: Sequence[Origin] = [tensor.origin for tensor in provenance.tensors]
    return {origin.value: origins.count(origin) for origin in dict.fromkeys(origins)}
