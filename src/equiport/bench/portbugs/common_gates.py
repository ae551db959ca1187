"""What the usual gates say of the same ports: on default-initialised and on perturbed weights.

All of them see the same bf16 logits, of three prompts and eight teacher-forced steps; nothing here decides a verdict.
"""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from equiport.compare.logits import compare_logits
from equiport.fixtures.folder import read_config
from equiport.fixtures.tokens import TokenBatch, draw_batch
from equiport.reference.logits import greedy, sequence_logits
from equiport.reference.model import load_reference
from equiport.stacks.contract import StackAdapter
from equiport.stacks.teacher_forcing import decode_logits
from equiport.stages.frame import Subject

_PROMPTS, _STEPS, _TOP = (24, 24, 24), 8, 5
# documented maxima of |difference| over max |logit| among the highest k
_TOLERANCES = {"k5": 0.01, "k50": 0.02, "k1000": 0.03, "all": 0.05}
GATES = (
    "greedy 8 tokens identical", "cosine >= .98", "cosine >= .999", "NMSE < 1e-2", "worst-token KL < .02",
    "top-5 containment", "tolerance map", "end to end R <= 1.2", "end to end R <= 2",
)  # fmt: skip


class CommonGates(BaseModel):
    """Which of GATES fail the port; a port that does not run fails all."""

    model_config = ConfigDict(frozen=True)

    default: list[str]
    perturbed: list[str]


def common_gates(subject: Subject, adapter: StackAdapter, perturbed: Path, seed: int) -> CommonGates:
    """Run the port on its own default-initialised weights and on the perturbed ones in a folder."""
    return CommonGates(
        default=_failing(subject, adapter, subject.model_path, seed),
        perturbed=_failing(subject, adapter, perturbed, seed),
    )


def _failing(subject: Subject, adapter: StackAdapter, folder: Path, seed: int) -> list[str]:
    """The tokens are the bf16 reference's own greedy ones: all top-1 alike means the same eight tokens."""
    batch = draw_batch(int(read_config(folder)["vocab_size"]), _PROMPTS, 0, seed)
    low = load_reference(folder, torch.bfloat16)
    tails = greedy(low, [list(row) for row in batch.rows], _STEPS)
    rows = TokenBatch(
        tuple((*row, *tail) for row, tail in zip(batch.rows, tails, strict=True)), batch.prompt_lengths, _STEPS
    )
    ref_bf16 = _reference(low, rows)
    del low
    ref_fp32 = _reference(load_reference(folder, torch.float32), rows)
    port = adapter.create_model(
        subject.modeling_file, subject.classes.causal, subject.classes.config, folder, dtype=torch.bfloat16,
        batch_size=len(_PROMPTS), seq_len=rows.max_length,
    )  # fmt: skip
    adapter.load_weights(port, folder, torch.bfloat16)
    target = decode_logits(adapter, port, rows.rows, rows.prompt_lengths, _STEPS)
    return _judged(ref_fp32, ref_bf16, target)


def _reference(model: torch.nn.Module, rows: TokenBatch) -> Tensor:
    parts = [sequence_logits(model, row, n - 1)[:_STEPS] for row, n in zip(rows.rows, rows.prompt_lengths, strict=True)]
    return torch.stack(parts)


def _judged(ref_fp32: Tensor, ref_bf16: Tensor, target: Tensor) -> list[str]:
    """Logits [3, 8, V] of the three models."""
    exact, base, ours = (logits.flatten(0, 1).double() for logits in (ref_fp32, ref_bf16, target))
    if not bool(ours.isfinite().all()):
        return list(GATES)
    found = compare_logits(ref_fp32.flatten(0, 1), ref_bf16.flatten(0, 1), target.flatten(0, 1))
    cosine = float(torch.cosine_similarity(base.flatten(), ours.flatten(), dim=0))
    nmse = float((ours - base).square().sum() / base.square().sum())
    kl = (base.log_softmax(-1).exp() * (base.log_softmax(-1) - ours.log_softmax(-1))).sum(-1)
    passed = (
        bool((base.argmax(-1) == ours.argmax(-1)).all()),
        cosine >= 0.98,
        cosine >= 0.999,
        nmse < 1e-2,
        float(kl.max()) < 0.02,
        _contained(base, ours) and _contained(ours, base),
        all(found.tolerance_map[key].max_observed <= limit for key, limit in _TOLERANCES.items()),
        found.r_centred <= 1.2,
        found.r_centred <= 2,
    )
    return [name for name, good in zip(GATES, passed, strict=True) if not good]


def _contained(one: Tensor, other: Tensor) -> bool:
    best = one.argmax(-1, keepdim=True)
    return bool((other.topk(_TOP, -1).indices == best).any(-1).all())
