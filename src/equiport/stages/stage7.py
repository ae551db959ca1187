"""Stage 7: downstream tasks. The port against the source model, item by item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch
from pydantic import BaseModel

from equiport.compare.gates_downstream import downstream_gate, published_gate
from equiport.compare.paired import PairedDifference, items_to_settle, paired_difference
from equiport.compare.reasons import ReasonCode, reason
from equiport.compare.verdict import Reason, Verdict, combine
from equiport.errors import EquiportError
from equiport.experiment import StageResult
from equiport.fixtures.folder import read_config
from equiport.stacks.contract import NotOffered, StackAdapter
from equiport.stages.bench_config import BenchConfig, LmEvalSuite, load_bench_config
from equiport.stages.bf16_products import native_bf16
from equiport.stages.downstream_diagnosis import diagnose
from equiport.stages.downstream_engines import Engine, PortEngine, ReferenceEngine
from equiport.stages.downstream_scores import (
    MetricScores,
    evaluate,
    require_lm_eval,
    scores,
    task_files,
    version,
)
from equiport.stages.frame import Outcome, StageContext, StageOptions, StageSpec, Subject, run_stage, vocabulary_size
from equiport.stages.stage1 import check_compiled

SPEC = StageSpec(7, "downstream tasks", needs={5: True, 6: True})
TOLERANCE = 0.02


@dataclass(frozen=True)
class Stage7Options:
    """Flags of run_stage7.py. `limit` replaces that of the config."""

    bench_config: Path
    output_dir: Path
    tolerance: float = TOLERANCE
    limit: int | None = None
    diagnose_failures: bool = False


class TaskRow(BaseModel):
    """One task under one metric: what the report's table shows. Scores are means over items, in [0, 1]."""

    task: str
    metric: str
    filter: str
    items: int
    chance: float
    port: float | None
    baseline: float | None
    difference: float | None
    low: float | None
    high: float | None
    better: int | None
    worse: int | None
    items_to_settle: int | None
    method: str
    verdict: Verdict


class DownstreamMetrics(BaseModel):
    """What stage 7 measured."""

    rows: list[TaskRow]
    tolerance: float
    dtype: str
    arithmetic: str
    lm_eval: str
    hints: list[str] = []


def run(options: StageOptions, stage: Stage7Options, subject: Subject, adapter: StackAdapter) -> StageResult:
    """Run stage 7 in CPU mode.

    Raises:
        EquiportError: bad config, lm_eval missing, a compiled model (not offered), or another port than the
            experiment's.
    """
    config = load_bench_config(stage.bench_config)
    require_lm_eval()
    compiled = config.model.compiled_model_path
    check_compiled(compiled)
    if compiled is not None:
        raise NotOffered(
            f"the {adapter.name} stack does not evaluate compiled models here",
            where=stage.bench_config,
            field="model.compiled_model_path",
            remedy="Leave it out for CPU mode.",
        )
    return run_stage(
        SPEC,
        options,
        lambda context: _body(context, stage, config),
        subject=subject,
        adapter=adapter,
        settings={"tolerance": stage.tolerance, "limit": stage.limit},
    )


def _body(context: StageContext, stage: Stage7Options, config: BenchConfig) -> Outcome:
    _same_port(context, stage)
    folder, dtype = context.weights_folder(), torch.bfloat16
    vocabulary = vocabulary_size(folder)
    reasons: list[Reason] = []
    theirs: dict[str, list[MetricScores]] = {}
    spoiled: list[Reason] = []
    if config.run_hf_baseline:
        with context.progress.step("source model, bf16"):
            reference = ReferenceEngine(folder, dtype, vocabulary)
            theirs, broken = _side(context, stage, config, reference, "baseline")
            reference.close()
        if broken:
            message = f"{broken} answers of the source model are NaN or infinite"
            spoiled.append(reason(ReasonCode.NON_FINITE_METRIC, message, "source"))
    port = PortEngine(context.stack, context.port.classes, folder, dtype, vocabulary, context.port.tp_degree)
    with context.progress.step("port, bf16"):
        ours, broken = _side(context, stage, config, port, "port")
    reasons += port.findings
    if broken:
        message = f"{broken} answers of the port are NaN or infinite"
        reasons.append(reason(ReasonCode.NON_FINITE_METRIC, message, "port"))
    failed = bool(reasons)
    rows: list[TaskRow] = []
    for name, suite in config.benchmarks.lm_eval.items():
        for found in ours[name]:
            row, said = _judge(found, _partner(found, theirs.get(name, [])), suite, stage.tolerance)
            rows.append(row)
            reasons += said
            shown = "" if row.baseline is None else f", source {row.baseline:.4f}"
            context.progress.line(f"{row.task} {row.metric}: port {_number(row.port)}{shown} over {row.items} items")
    verdict = combine([row.verdict for row in rows])
    verdict = Verdict.FAIL if failed else Verdict.INCONCLUSIVE if spoiled and verdict is Verdict.PASS else verdict
    hints = []
    if stage.diagnose_failures:
        hints = diagnose(rows, ours, theirs, stage.output_dir)
        for hint in hints:
            context.progress.line(hint)
    files = [file for suite in config.benchmarks.lm_eval.values() for file in task_files(suite)]
    metrics = DownstreamMetrics(
        rows=rows,
        tolerance=stage.tolerance,
        dtype="bfloat16",
        arithmetic="native"
        if native_bf16()
        else "products in fp32, rounded to bf16 (this CPU has no bf16 instructions)",
        lm_eval=version(),
        hints=hints,
    )
    return Outcome(
        verdict,
        [*reasons, *spoiled],
        metrics,
        blind_spots=_blind(config, rows),
        seeds=[context.options.seed],
        inputs=[stage.bench_config, *dict.fromkeys(files)],
    )


def _side(
    context: StageContext, stage: Stage7Options, config: BenchConfig, engine: Engine, name: str
) -> tuple[dict[str, list[MetricScores]], int]:
    """Scores of every suite, and how many answers were not finite."""
    from equiport.stages.downstream_model import EngineLM

    folder = context.weights_folder()
    longest = read_config(folder).get("max_position_embeddings")
    lm = EngineLM(engine, folder, longest if isinstance(longest, int) else None)
    out = {}
    for suite_name, suite in config.benchmarks.lm_eval.items():
        limit = stage.limit if stage.limit is not None else suite.limit
        output = stage.output_dir.absolute() / name / suite_name
        found = evaluate(lm, suite, limit, context.options.seed, output, debug=context.debug)
        out[suite_name] = scores(found, suite)
    return out, lm.not_finite


def _same_port(context: StageContext, stage: Stage7Options) -> None:
    """An experiment's stage 7 is of the experiment's port and model."""
    if context.experiment is None:
        return
    config, port = context.experiment.config, context.port
    pairs = (
        ("model.model_class", port.modeling_file, config.target_modeling_file),
        ("model.model_path", port.model_path, config.source_model_path),
    )
    for field, given, wanted in pairs:
        if given.resolve() != wanted.resolve():
            raise EquiportError(
                f"{given} is not the experiment's ({wanted})",
                where=stage.bench_config,
                field=field,
                remedy="Correct it, or leave the experiment's folder and --exp-dir for another port.",
            )
    if config.target_causal_class and port.classes.causal != config.target_causal_class:
        raise EquiportError(
            f"{port.classes.causal} is not the experiment's {config.target_causal_class}",
            where=stage.bench_config,
            field="model.model_class",
            remedy="Correct it.",
        )


def _partner(found: MetricScores, others: Sequence[MetricScores]) -> MetricScores | None:
    key = (found.task, found.metric, found.filter)
    return next((other for other in others if (other.task, other.metric, other.filter) == key), None)


def _judge(
    ours: MetricScores, theirs: MetricScores | None, suite: LmEvalSuite, tolerance: float
) -> tuple[TaskRow, list[Reason]]:
    subject = f"{ours.task} {ours.metric}" + ("" if ours.filter in ("none", "-") else f" ({ours.filter})")
    published = suite.published.get(ours.task)
    if not ours.items:
        return _row(ours, Verdict.INCONCLUSIVE), [reason(ReasonCode.EMPTY, "no item was answered", subject)]
    values = [item.score for item in ours.items.values()]
    if not all(value is not None and isfinite(value) and 0 <= value <= 1 for value in values):
        broken = any(value is not None and not isfinite(value) for value in values)
        code = ReasonCode.NON_FINITE_METRIC if broken else ReasonCode.NO_PAIRED_SCORE
        text = "a score is NaN or infinite" if broken else "is no score in [0, 1] an item: it cannot be paired"
        return _row(ours, Verdict.FAIL if broken else Verdict.INCONCLUSIVE), [reason(code, text, subject)]
    numbers = [float(value) for value in values if value is not None]
    mean = sum(numbers) / len(numbers)
    if theirs is None:
        if published is None:
            text = "the source model did not run (run_hf_baseline) and no published score is given"
            return _row(ours, Verdict.INCONCLUSIVE, mean), [reason(ReasonCode.NO_BASELINE, text, subject)]
        gate = published_gate(mean, len(numbers), published, subject)
        return _row(ours, gate.verdict, mean), list(gate.reasons)
    same = ours.items.keys() == theirs.items.keys() and all(
        item.identity == theirs.items[place].identity for place, item in ours.items.items()
    )
    others = [theirs.items[place].score for place in ours.items if place in theirs.items]
    if not same or any(value is None or not isfinite(value) or not 0 <= value <= 1 for value in others):
        text = f"port and source did not answer the same items ({len(ours.items)} and {len(theirs.items)})"
        code = ReasonCode.ITEMS_DIFFER if not same else ReasonCode.NON_FINITE_METRIC
        text = text if not same else "a score of the source is no number in [0, 1]"
        return _row(ours, Verdict.INCONCLUSIVE, mean), [reason(code, text, subject)]
    partners = [float(value) for value in others if value is not None]
    if not ours.higher_is_better:
        # scores where less is better are turned round
        numbers, partners = [1 - value for value in numbers], [1 - value for value in partners]
    found = paired_difference(numbers, partners)
    gate = downstream_gate(found, tolerance, ours.chance if ours.higher_is_better else 0.0, subject)
    return _row(ours, gate.verdict, mean, found, tolerance), list(gate.reasons)


def _row(
    ours: MetricScores,
    verdict: Verdict,
    mean: float | None = None,
    found: PairedDifference | None = None,
    tolerance: float = TOLERANCE,
) -> TaskRow:
    wide = found is not None and verdict is Verdict.INCONCLUSIVE and found.half_width > tolerance
    return TaskRow(
        task=ours.task,
        metric=ours.metric,
        filter=ours.filter,
        items=len(ours.items),
        chance=ours.chance,
        port=found.target if found else mean,
        baseline=found.baseline if found else None,
        difference=found.difference if found else None,
        low=found.low if found else None,
        high=found.high if found else None,
        better=found.better if found else None,
        worse=found.worse if found else None,
        items_to_settle=items_to_settle(found, tolerance) if found and wide else None,
        method=found.method if found else "",
        verdict=verdict,
    )


def _blind(config: BenchConfig, rows: Sequence[TaskRow]) -> list[str]:
    spots = []
    if not config.run_hf_baseline:
        spots.append("the source model did not run: scores are held against published ones or nothing")
    tasks = ", ".join(dict.fromkeys(row.task for row in rows))
    spots.append(f"abilities that {tasks} do not ask for")
    return spots


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
