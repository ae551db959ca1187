"""Stages 5 and 6 in one pass: reference and port under teacher forcing, through decode and through prefill."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from equiport.compare.gates_end_to_end import end_to_end_gate
from equiport.compare.logits import LogitComparison, compare_logits
from equiport.compare.reasons import ReasonCode
from equiport.compare.thresholds import SEED_THRESHOLDS, Thresholds
from equiport.compare.verdict import Reason, Verdict, combine
from equiport.errors import EquiportError
from equiport.experiment import StageResult
from equiport.experiment.atomic import read_json, write_json
from equiport.reference.logits import sequence_logits
from equiport.reference.model import load_reference
from equiport.stacks.contract import StackAdapter
from equiport.stacks.teacher_forcing import decode_logits, prefill_logits
from equiport.stages.component_fixtures import drawn_variants, drawn_weights
from equiport.stages.frame import Outcome, StageContext, StageOptions, StageSpec, Subject, run_stage
from equiport.stages.invariance import InvarianceMetrics, check_invariance
from equiport.stages.logit_plots import plot_logits
from equiport.stages.port_run import load_reasons, make_port
from equiport.stages.stage1 import check_compiled
from equiport.stages.teacher_tokens import TeacherTokens, teacher_tokens

STAGE5 = StageSpec(5, "end to end, teacher forced", any_of=(2, 4))
STAGE6 = StageSpec(6, "distributions", needs={5: False}, any_of=(2, 4))
FILE_NAME = "teacher_forced.json"
_DISTRIBUTION = {ReasonCode.COSINE_P5.value, ReasonCode.KL_P95.value, ReasonCode.TOP1.value}
_UNCLEAR = {ReasonCode.TOO_FEW_PROMPTS.value, ReasonCode.BASELINE_NOISE.value}
# statistics of a few positions are luck: there the fp32 evidence decides (a near tie of ten is a top-1 of 0.9)
_STATISTICAL = {code.value for code in (ReasonCode.R_CENTRED, ReasonCode.P95_RATIO, ReasonCode.TOP1, ReasonCode.KL_P95)}
_ENOUGH_POSITIONS = 100
_PREFIXES = 1


@dataclass(frozen=True)
class TeacherForcedOptions:
    """Flags of run_teacher_forced_comparison.py and run_stage5.py; None: the thresholds file's or shipped value."""

    num_tokens: int = 32
    theta: float | None = None
    delta: float | None = None
    tau_r: float | None = None
    prompts: Path | None = None
    compiled_model_path: Path | None = None
    kv_analysis_on_fail: bool = False

    def applied(self, thresholds: Thresholds) -> Thresholds:
        """The thresholds with these flags on top: a θ or δ that was asked for does not follow the source's noise."""
        given = {"theta": self.theta, "delta": self.delta, "tau_r": self.tau_r}
        if self.theta is not None or self.delta is not None:
            given["own_noise"] = 0.0
        return thresholds.model_copy(update={key: value for key, value in given.items() if value is not None})


class PathFigures(BaseModel):
    """One path's figures beside their limits and the documented ones."""

    path: str
    positions: int
    prompts: int
    r_centred: float
    r_raw: float
    r_raw_p95: float
    r_centred_p95: float
    p95_ratio: float
    r32: float | None
    r32_worst: float | None
    cosine_p5: float
    cosine_p5_baseline: float
    kl_mean: float
    kl_p95: float
    kl_p95_baseline: float
    kl_max: float
    top1: float
    top1_baseline: float
    top5: float
    tolerance_map: dict[str, float]


class TeacherForcedMetrics(BaseModel):
    """What stages 5 and 6 show. `documented`: the seed's limits on the same figures, and whether they would hold."""

    paths: list[PathFigures]
    limits: dict[str, float]
    documented: dict[str, bool]
    plots: list[str]
    invariance: InvarianceMetrics | None = None


class TeacherForcedPaths(BaseModel):
    """Both ways to the same positions."""

    model_config = ConfigDict(extra="forbid")

    decode: LogitComparison
    prefill: LogitComparison

    def items(self) -> list[tuple[str, LogitComparison]]:
        """(name, comparison) of each path."""
        return [("decode", self.decode), ("prefill", self.prefill)]


class TeacherForcedFile(BaseModel):
    """teacher_forced.json: every position of every path, to be judged again with other thresholds."""

    num_tokens: int
    paths: TeacherForcedPaths
    load_findings: list[tuple[str, str, str]]
    thresholds: Thresholds
    plots: list[str]


def run_stage5(
    options: StageOptions, stage: TeacherForcedOptions, subject: Subject, adapter: StackAdapter
) -> StageResult:
    """Run the comparison, write teacher_forced.json, judge R and R32.

    Raises:
        EquiportError: a flag that the stack cannot serve, or the port does not run.
    """
    check_compiled(stage.compiled_model_path)
    for flag, asked in (("--kv-analysis-on-fail", stage.kv_analysis_on_fail),):
        if asked:
            raise EquiportError(f"not offered by the {adapter.name} stack", field=flag, remedy="Leave it out.")
    output = None if options.output and options.output.name == FILE_NAME else options.output
    return run_stage(
        STAGE5,
        replace(options, output=output, exp_dir=options.exp_dir or _holder(options)),
        lambda context: _compare(context, stage, options.output if output is None else None),
        subject=subject,
        adapter=adapter,
        settings={"num_tokens": stage.num_tokens, **_settings(stage)},
    )


def run_stage6(
    options: StageOptions,
    stage: TeacherForcedOptions,
    teacher_forced: Path,
    subject: Subject | None,
    adapter: StackAdapter | None,
) -> StageResult:
    """Judge cosine, KL and top-1 from teacher_forced.json.

    Raises:
        EquiportError: the file is missing or damaged.
    """
    return run_stage(
        STAGE6,
        replace(options, exp_dir=options.exp_dir or _holder(replace(options, output=teacher_forced))),
        lambda context: _judge_distribution(context, stage, teacher_forced),
        subject=subject,
        adapter=adapter,
        settings=_settings(stage),
    )


def _holder(options: StageOptions) -> Path | None:
    from equiport.stages.frame import find_experiment

    found = find_experiment(options)
    return found.root if found else None


def _settings(stage: TeacherForcedOptions) -> dict[str, float | None]:
    return {"theta": stage.theta, "delta": stage.delta, "tau_r": stage.tau_r}


def _compare(context: StageContext, stage: TeacherForcedOptions, file: Path | None) -> Outcome:
    if stage.compiled_model_path is not None:
        context.stack.device_inference(str(stage.compiled_model_path), context.port.tp_degree, [[0]], 1)
    tokens = teacher_tokens(context, stage.num_tokens, stage.prompts)
    with context.progress.step("reference fp32"):
        ref_fp32 = _reference(context, tokens, torch.float32)
    with context.progress.step("reference bf16"):
        ref_bf16 = _reference(context, tokens, torch.bfloat16)
    prefixes = _prefixes(tokens, context.options.seed)
    with context.progress.step("port bf16, decode and prefill"):
        target, findings = _port(context, tokens, prefixes, torch.bfloat16)
    with context.progress.step("port fp32, decode and prefill"):
        target_fp32, _ = _port(context, tokens, prefixes, torch.float32)
    paths = TeacherForcedPaths(
        decode=_decode_path(ref_fp32, ref_bf16, target[0], target_fp32[0], tokens),
        prefill=_prefill_path(ref_fp32, ref_bf16, target[1], target_fp32[1], tokens, prefixes),
    )
    plots: list[str] = []
    if context.experiment is not None:
        written = plot_logits(dict(paths.items()), context.experiment.plots)
        plots = [str(path.relative_to(context.experiment.root)) for path in written]
    thresholds = stage.applied(context.thresholds)
    stored = TeacherForcedFile(
        num_tokens=stage.num_tokens,
        paths=paths,
        load_findings=[(item.code, item.message, item.subject) for item in findings],
        thresholds=thresholds,
        plots=plots,
    )
    place = file or (context.experiment.results / FILE_NAME if context.experiment else None)
    if place is not None:
        write_json(place, stored.model_dump(mode="python"))
    outcome = _judge(stored, thresholds, distribution=False)
    outcome.seeds = [context.options.seed]
    _add_invariance(outcome, context, thresholds)
    return outcome


def _add_invariance(outcome: Outcome, context: StageContext, thresholds: Thresholds) -> None:
    """The same logits whichever way the port is asked, on drawn weights."""
    if context.port.tp_degree != 1:
        outcome.blind_spots = [*outcome.blind_spots, "batch, length and state invariance: runs at tp_degree 1 alone"]
        return
    seed = context.options.seed
    with (
        context.progress.step("batch, length and state invariance, fp32, drawn weights"),
        drawn_weights(context.experiment, context.weights_folder(), seed) as folder,
        drawn_variants(context.experiment, context.weights_folder(), seed) as variants,
    ):
        found, gate = check_invariance(context.stack, context.port.classes, folder, seed, thresholds, variants)
    assert isinstance(outcome.metrics, TeacherForcedMetrics)
    outcome.metrics.invariance = found
    outcome.reasons = [*outcome.reasons, *gate.reasons]
    outcome.blind_spots = [*outcome.blind_spots, *(f"{item.subject}: {item.message}" for item in gate.blind_spots)]
    outcome.verdict = combine([outcome.verdict, gate.verdict])


def _judge_distribution(context: StageContext, stage: TeacherForcedOptions, file: Path) -> Outcome:
    raw = read_json(file, remedy="Run run_stage5.py or run_teacher_forced_comparison.py first.")
    try:
        stored = TeacherForcedFile.model_validate(raw)
    except ValueError as error:
        first = str(error).splitlines()[0]
        raise EquiportError(f"is no teacher_forced.json: {first}", where=file, remedy="Run stage 5 again.") from None
    outcome = _judge(stored, stage.applied(context.thresholds), distribution=True)
    outcome.inputs = [file]
    return outcome


def _judge(stored: TeacherForcedFile, thresholds: Thresholds, *, distribution: bool) -> Outcome:
    reasons = [Reason(code, message, subject) for code, message, subject in stored.load_findings]
    blind: list[str] = []
    for path, found in stored.paths.items():
        gate = end_to_end_gate(found, thresholds)
        few = found.positions < _ENOUGH_POSITIONS and found.r32 is not None
        for item in gate.reasons:
            if few and item.code in _STATISTICAL:
                continue
            if item.code in _UNCLEAR or (item.code in _DISTRIBUTION) == distribution:
                reasons.append(Reason(item.code, item.message, f"{path} path"))
        # moved limits are of figures that stage 6 judges
        told = [spot for spot in gate.blind_spots if distribution or spot.code != ReasonCode.BASELINE_NOISE.value]
        blind += [f"{path} path: {spot.message}" for spot in told]
        if distribution:
            blind += [
                f"{path} path: {note.message}" for note in gate.notes if note.code == ReasonCode.NOT_CALIBRATED.value
            ]
    failed = any(item.code not in _UNCLEAR for item in reasons)
    verdict = Verdict.FAIL if failed else Verdict.INCONCLUSIVE if reasons else Verdict.PASS
    metrics = TeacherForcedMetrics(
        paths=[_figures(path, found) for path, found in stored.paths.items()],
        limits={
            "r_centred": thresholds.tau_r,
            "p95_ratio": thresholds.p95_ratio,
            "r32": thresholds.r32_pooled,
            "r32_worst": thresholds.r32_slice,
            "cosine_p5": thresholds.theta,
            "kl_p95": thresholds.delta,
            "top1": thresholds.top1,
        },
        documented=_documented(stored.paths.decode),
        plots=stored.plots,
    )
    return Outcome(verdict, reasons, metrics, list(dict.fromkeys(blind)))


def _documented(found: LogitComparison) -> dict[str, bool]:
    """The seed's own pass criteria on the decode path, shown beside the shipped ones."""
    seed = SEED_THRESHOLDS
    return {
        f"R p95 < {seed.tau_r:g} ({found.r_raw_positions.p95:.3g})": found.r_raw_positions.p95 < seed.tau_r,
        f"cosine p5 >= {seed.theta:g} ({found.cosine_raw.p5:.6g})": found.cosine_raw.p5 >= seed.theta,
        f"top-1 > {seed.top1:g} ({found.top1:.3g})": found.top1 > seed.top1,
    }


def _figures(path: str, found: LogitComparison) -> PathFigures:
    return PathFigures(
        path=path,
        positions=found.positions,
        prompts=found.prompts,
        r_centred=found.r_centred,
        r_raw=found.r_raw,
        r_raw_p95=found.r_raw_positions.p95,
        r_centred_p95=found.r_centred_positions.p95,
        p95_ratio=found.p95_ratio,
        r32=found.r32,
        r32_worst=found.r32_worst,
        cosine_p5=found.cosine_centred.p5,
        cosine_p5_baseline=found.cosine_baseline.p5,
        kl_mean=found.kl.mean,
        kl_p95=found.kl.p95,
        kl_p95_baseline=found.kl_baseline.p95,
        kl_max=found.kl.high,
        top1=found.top1,
        top1_baseline=found.top1_baseline,
        top5=found.top5,
        tolerance_map={key: entry.max_observed for key, entry in found.tolerance_map.items()},
    )


def _reference(context: StageContext, tokens: TeacherTokens, dtype: torch.dtype) -> Tensor:
    """[prompts, num_tokens, V]: logits that predict each greedy token."""
    model = load_reference(context.weights_folder(), dtype)
    rows = [
        sequence_logits(model, sequence[:-1], len(prompt) - 1)
        for sequence, prompt in zip(tokens.sequences, tokens.prompts, strict=True)
    ]
    del model
    gc.collect()
    return torch.stack(rows)


def _port(
    context: StageContext, tokens: TeacherTokens, prefixes: list[list[int]], dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], list[Reason]]:
    """Decode-path logits [prompts, num_tokens, V] and prefill logits [prefixes, prompts, V]."""
    longest = max(len(sequence) for sequence in tokens.sequences)
    model, report = make_port(
        context.stack,
        context.port.classes,
        context.weights_folder(),
        dtype,
        batch_size=len(tokens.prompts),
        seq_len=longest,
        tp_degree=context.port.tp_degree,
    )
    decode = decode_logits(context.stack, model, tokens.sequences, tokens.prompt_lengths, tokens.num_tokens)
    prefill = torch.stack([prefill_logits(context.stack, model, tokens.sequences, lengths) for lengths in prefixes])
    del model
    gc.collect()
    return (decode, prefill), load_reasons(report)


def _prefixes(tokens: TeacherTokens, seed: int) -> list[list[int]]:
    """Ragged prefix lengths: `_PREFIXES` for each prompt, drawn among the forced positions."""
    generator = torch.Generator().manual_seed(seed)
    count = min(_PREFIXES, tokens.num_tokens)
    offsets = [torch.randperm(tokens.num_tokens, generator=generator)[:count].tolist() for _ in tokens.prompts]
    return [
        [length + offsets[row][number] for row, length in enumerate(tokens.prompt_lengths)] for number in range(count)
    ]


def _decode_path(
    ref_fp32: Tensor, ref_bf16: Tensor, target: Tensor, target_fp32: Tensor, tokens: TeacherTokens
) -> LogitComparison:
    prompts, steps = ref_fp32.shape[:2]
    positions = [length - 1 + step for length in tokens.prompt_lengths for step in range(steps)]
    return compare_logits(
        ref_fp32.flatten(0, 1),
        ref_bf16.flatten(0, 1),
        target.flatten(0, 1),
        target_fp32=target_fp32.flatten(0, 1),
        positions=positions,
        prompt_index=[row for row in range(prompts) for _ in range(steps)],
        name="decode",
    )


def _prefill_path(
    ref_fp32: Tensor,
    ref_bf16: Tensor,
    target: Tensor,
    target_fp32: Tensor,
    tokens: TeacherTokens,
    prefixes: list[list[int]],
) -> LogitComparison:
    rows = [row for _ in prefixes for row in range(len(tokens.prompts))]
    steps = [length - tokens.prompt_lengths[row] for lengths in prefixes for row, length in enumerate(lengths)]
    return compare_logits(
        ref_fp32[rows, steps],
        ref_bf16[rows, steps],
        target.flatten(0, 1),
        target_fp32=target_fp32.flatten(0, 1),
        positions=[length - 1 for lengths in prefixes for length in lengths],
        prompt_index=rows,
        name="prefill",
    )
