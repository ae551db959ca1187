"""Stage 1: is the port alive? Greedy tokens of ten prompts against the fp32 reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel

from equiport.compare.gates import GateResult
from equiport.compare.gates_consistency import Nudge, alive_gate
from equiport.compare.gates_end_to_end import PromptTokens, smoke_gate
from equiport.compare.logits import compare_logits
from equiport.compare.verdict import Reason, Verdict, combine
from equiport.errors import EquiportError
from equiport.experiment import StageResult
from equiport.fixtures.folder import read_config
from equiport.reference.logits import sequence_logits
from equiport.reference.model import load_reference
from equiport.stacks.contract import Generation, StackAdapter
from equiport.stages.alive import nudge_all
from equiport.stages.component_fixtures import drawn_weights
from equiport.stages.frame import Outcome, StageContext, StageOptions, StageSpec, Subject, run_stage
from equiport.stages.port_run import load_reasons, make_port
from equiport.stages.teacher_tokens import TeacherTokens, teacher_tokens

SPEC = StageSpec(1, "smoke test", needs={0: False})
_SAME = 1e-4
_NO_ALIVE = "alive gate (nudging every tensor and config key): runs in CPU mode at tp_degree 1 alone"


@dataclass(frozen=True)
class Stage1Options:
    """Flags of run_stage1.py."""

    num_tokens: int = 32
    pass_threshold: float = 0.30
    prompts: Path | None = None
    compiled_model_path: Path | None = None


class PromptRow(BaseModel):
    """One prompt: how many greedy tokens matched before the first divergence, and both texts."""

    prompt: str
    match_rate: float
    matched: int
    expected_text: str
    actual_text: str


class SmokeMetrics(BaseModel):
    """What stage 1 measured, on positions up to each prompt's first divergence."""

    match_rate: float
    rows: list[PromptRow]
    positions: int
    cosine_centred_p5: float
    kl_mean: float
    kl_p95: float
    top5: float
    relative_l2: float
    prompts_told_apart: bool
    nudges: list[Nudge] = []


def run(options: StageOptions, stage: Stage1Options, subject: Subject, adapter: StackAdapter) -> StageResult:
    """Run stage 1 in CPU mode, or on a compiled model where there is one.

    Raises:
        EquiportError: --compiled-model-path does not exist, or the port does not run.
    """
    check_compiled(stage.compiled_model_path)
    return run_stage(
        SPEC,
        options,
        lambda context: _body(context, stage),
        subject=subject,
        adapter=adapter,
        settings={"num_tokens": stage.num_tokens, "pass_threshold": stage.pass_threshold},
    )


def check_compiled(path: Path | None) -> None:
    """A compiled model that is named must be there.

    Raises:
        EquiportError: it is not.
    """
    if path is not None and not path.exists():
        raise EquiportError(
            "does not exist",
            where=path,
            field="--compiled-model-path",
            remedy="Check it, or leave it out for CPU mode.",
        )


def _body(context: StageContext, stage: Stage1Options) -> Outcome:
    tokens = teacher_tokens(context, stage.num_tokens, stage.prompts)
    with context.progress.step("greedy tokens of the port, bf16"):
        generations, findings = _generate(context, tokens, stage)
    rows = [PromptTokens(tokens.continuation(row), generation.tokens) for row, generation in enumerate(generations)]
    thresholds = context.thresholds.model_copy(update={"match_rate": stage.pass_threshold})
    gate = smoke_gate(rows, thresholds)
    reasons = [*findings, *gate.reasons]
    verdict = Verdict.FAIL if findings else gate.verdict
    with context.progress.step("logits before the first divergence"):
        metrics, told_apart = _distributions(context, tokens, rows, generations)
    if not told_apart:
        reasons.append(Reason("PROMPTS_NOT_TOLD_APART", "gives the same logits for different prompts", "port"))
        verdict = Verdict.FAIL
    blind = [_NO_ALIVE]
    if stage.compiled_model_path is None and context.port.tp_degree == 1:
        metrics.nudges, alive = _alive(context)
        reasons += alive.reasons
        blind = [f"{item.subject}: {item.message}" for item in alive.blind_spots]
        verdict = combine([verdict, alive.verdict])
    return Outcome(verdict, reasons, metrics, blind_spots=blind, seeds=[context.options.seed])


def _alive(context: StageContext) -> tuple[list[Nudge], GateResult]:
    seed = context.options.seed
    with (
        context.progress.step("nudge every tensor and config key, fp32, drawn weights"),
        drawn_weights(context.experiment, context.weights_folder(), seed) as folder,
    ):
        published = read_config(context.weights_folder())
        nudges = nudge_all(context.stack, context.port.classes, folder, seed, published=published)
    return nudges, alive_gate(nudges, context.thresholds)


def _generate(
    context: StageContext, tokens: TeacherTokens, stage: Stage1Options
) -> tuple[list[Generation], list[Reason]]:
    subject, adapter = context.port, context.stack
    if stage.compiled_model_path is not None:
        compiled = str(stage.compiled_model_path)
        return adapter.device_inference(compiled, subject.tp_degree, tokens.prompts, stage.num_tokens), []
    folder = context.weights_folder()
    model, report = make_port(
        adapter,
        subject.classes,
        folder,
        torch.bfloat16,
        batch_size=len(tokens.prompts),
        seq_len=max(tokens.prompt_lengths) + stage.num_tokens,
        tp_degree=subject.tp_degree,
    )
    generations = adapter.device_inference(
        str(folder), subject.tp_degree, tokens.prompts, stage.num_tokens, model=model, with_logits=True
    )
    return generations, load_reasons(report)


def _distributions(
    context: StageContext, tokens: TeacherTokens, rows: list[PromptTokens], generations: list[Generation]
) -> tuple[SmokeMetrics, bool]:
    """Compare logits where both sides saw the same prefix: up to and including the first divergence."""
    model = load_reference(context.weights_folder(), torch.float32)
    reference, target, prompts = [], [], []
    for row, generation in enumerate(generations):
        if generation.logits is None:
            raise EquiportError("device_inference gave no logits", remedy="The stack's adapter must return them.")
        kept = min(rows[row].matched + 1, len(generation.logits))
        start = len(tokens.prompts[row]) - 1
        reference.append(sequence_logits(model, tokens.sequences[row][:-1], start)[:kept])
        target.append(generation.logits[:kept].float())
        prompts += [row] * kept
    del model
    expected, actual = torch.cat(reference), torch.cat(target)
    found = compare_logits(expected, expected.to(torch.bfloat16), actual, prompt_index=prompts, name="smoke")
    first = torch.stack([generation.logits[0] for generation in generations if generation.logits is not None]).float()
    told_apart = len(first) < 2 or _spread(first) > _SAME * _spread(torch.stack([part[0] for part in reference]))
    metrics = SmokeMetrics(
        match_rate=sum(row.matched for row in rows) / max(1, sum(len(row.expected) for row in rows)),
        rows=[_prompt_row(context, tokens, number, row) for number, row in enumerate(rows)],
        positions=len(prompts),
        cosine_centred_p5=found.cosine_centred.p5,
        kl_mean=found.kl.mean,
        kl_p95=found.kl.p95,
        top5=found.top5,
        relative_l2=float((actual - expected).norm() / expected.norm()),
        prompts_told_apart=bool(told_apart),
    )
    return metrics, bool(told_apart)


def _spread(logits: torch.Tensor) -> float:
    return float((logits - logits.mean(dim=0)).norm())


def _prompt_row(context: StageContext, tokens: TeacherTokens, number: int, row: PromptTokens) -> PromptRow:
    text = _decoder(context)
    prompt = tokens.texts[number] if tokens.texts else f"{len(tokens.prompts[number])} drawn token ids"
    return PromptRow(
        prompt=prompt,
        match_rate=row.matched / max(1, len(row.expected)),
        matched=row.matched,
        expected_text=text(row.expected),
        actual_text=text(row.actual),
    )


def _decoder(context: StageContext) -> Callable[[Sequence[int]], str]:
    folder = context.weights_folder()
    if not (folder / "tokenizer.json").is_file():
        return lambda ids: " ".join(str(token) for token in ids)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    return lambda ids: str(tokenizer.decode(list(ids)))
