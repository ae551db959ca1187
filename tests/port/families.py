"""Tiny models of every family that the recipes serve: each layer kind, distinct dimensions, weights under which faults
show. And the pipeline's judgement of a port of one.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from equiport.compare.gates_components import component_gate
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Verdict
from equiport.experiment import Experiment
from equiport.fixtures.tokens import TokenBatch, draw_batch
from equiport.fixtures.weights import WeightKind
from equiport.reference.logits import sequence_logits
from equiport.reference.model import load_reference, materialize
from equiport.stacks.contract import StackAdapter
from equiport.stacks.port_classes import find_port_classes
from equiport.stacks.teacher_forcing import decode_logits, prefill_logits
from equiport.stages import stage0
from equiport.stages.component_check import compare_sample
from equiport.stages.component_fixtures import TracePlan, component_samples, mapping_of, trace_folder, write_trace
from equiport.stages.frame import StageOptions, Subject
from equiport.stages.progress import Progress

_SHARED = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "type": "longrope", "short_factor": [1.0, 1.0, 1.02, 1.05, 1.1, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 1.1, 1.5, 2.0, 3.0, 5.0, 8.0, 8.5],
}  # fmt: skip
_LOCAL_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]


def _config(model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture], **_SHARED, **changes}


def _llama(**changes: Any) -> dict[str, Any]:
    base = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False}
    return _config("llama", "LlamaForCausalLM", **{**base, **changes})


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _llama(),
    "llama tied, head_dim": _llama(tie_word_embeddings=True, head_dim=12),
    "llama biases": _llama(attention_bias=True, mlp_bias=True),
    "llama linear": _llama(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama llama3": _llama(rope_scaling=LLAMA3),
    "llama yarn": _llama(rope_scaling=YARN),
    "qwen2": _config(
        "qwen2", "Qwen2ForCausalLM", rms_norm_eps=1e-6, rope_theta=1e6, hidden_act="silu", tie_word_embeddings=True,
        use_sliding_window=False,
    ),
    "qwen2 windows": _config(
        "qwen2", "Qwen2ForCausalLM", rms_norm_eps=1e-6, rope_theta=1e6, hidden_act="silu", tie_word_embeddings=False,
        use_sliding_window=True, sliding_window=8, max_window_layers=1,
    ),
    "qwen3": _config(
        "qwen3", "Qwen3ForCausalLM", rms_norm_eps=1e-6, rope_theta=1e6, hidden_act="silu", tie_word_embeddings=False,
        head_dim=12,
    ),
    "mistral": _config(
        "mistral", "MistralForCausalLM", rms_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu", sliding_window=8,
        tie_word_embeddings=False, head_dim=8,
    ),
    "granite": _config(
        "granite", "GraniteForCausalLM", rms_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu", tie_word_embeddings=True,
        embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=5.0,
    ),
    "olmo2": _config(
        "olmo2", "Olmo2ForCausalLM", rms_norm_eps=1e-6, rope_theta=5e5, hidden_act="silu", tie_word_embeddings=False,
    ),
    "smollm3": _config(
        "smollm3", "SmolLM3ForCausalLM", rms_norm_eps=1e-6, rope_theta=2e6, hidden_act="silu", tie_word_embeddings=True,
        no_rope_layers=[1, 0, 1], use_sliding_window=False,
    ),
    "smollm3 first without rope": _config(
        "smollm3", "SmolLM3ForCausalLM", rms_norm_eps=1e-6, rope_theta=2e6, hidden_act="silu", tie_word_embeddings=True,
        no_rope_layers=[0, 1, 1], use_sliding_window=False,
    ),
    "glm4": _config(
        "glm4", "Glm4ForCausalLM", rms_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu", tie_word_embeddings=False,
        head_dim=16, partial_rotary_factor=0.5, attention_bias=True,
    ),
    "stablelm": _config(
        "stablelm", "StableLmForCausalLM", layer_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu",
        tie_word_embeddings=False, partial_rotary_factor=0.25, use_qkv_bias=True, hidden_size=96,
    ),
    "stablelm parallel, head norms": _config(
        "stablelm", "StableLmForCausalLM", layer_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu", hidden_size=96,
        tie_word_embeddings=False, partial_rotary_factor=0.25, use_parallel_residual=True, qk_layernorm=True,
    ),
    "phi3": _config(
        "phi3", "Phi3ForCausalLM", rms_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu", tie_word_embeddings=False,
        rope_scaling=LONG, original_max_position_embeddings=16, sliding_window=10, hidden_size=96,
    ),
    "gemma2": _config(
        "gemma2", "Gemma2ForCausalLM", rms_norm_eps=1e-6, rope_theta=1e4, hidden_activation="gelu_pytorch_tanh",
        head_dim=12, query_pre_attn_scalar=20, attn_logit_softcapping=4.0, final_logit_softcapping=3.0,
        sliding_window=8, layer_types=_LOCAL_GLOBAL, tie_word_embeddings=True,
    ),
    "gemma3": _config(
        "gemma3_text", "Gemma3ForCausalLM", rms_norm_eps=1e-6, rope_theta=1e6, rope_local_base_freq=1e4,
        hidden_activation="gelu_pytorch_tanh", head_dim=12, query_pre_attn_scalar=20, sliding_window=8,
        layer_types=_LOCAL_GLOBAL, rope_scaling={"rope_type": "linear", "factor": 4.0}, tie_word_embeddings=True,
    ),
    "gpt_neox": _config(
        "gpt_neox", "GPTNeoXForCausalLM", layer_norm_eps=1e-5, rotary_emb_base=1e4, rotary_pct=0.25, hidden_act="gelu",
        tie_word_embeddings=False, use_parallel_residual=True, hidden_size=96,
    ),
    "gpt_neox sequential": _config(
        "gpt_neox", "GPTNeoXForCausalLM", layer_norm_eps=1e-5, rotary_emb_base=1e4, rotary_pct=0.25, hidden_act="gelu",
        tie_word_embeddings=False, use_parallel_residual=False, hidden_size=96,
    ),
}  # fmt: skip


def make_model(name: str, root: Path) -> Path:
    """The HF folder of a family's tiny model, with perturbed weights."""
    source = root / "source"
    source.mkdir(parents=True)
    config = {key: value for key, value in FAMILIES[name].items() if key != "num_key_value_heads" or name[:4] != "gpt_"}
    (source / "config.json").write_text(json.dumps(config))
    return materialize(source, root / "model", WeightKind.PERTURBED, 7, tiny=False).folder


@dataclass(frozen=True)
class Judgement:
    """What the pipeline says of a port. `relative` are ‖port − reference‖ / ‖reference‖ of fp32 logits."""

    structure: Verdict
    structure_reasons: tuple[str, ...]
    components: dict[str, Verdict]
    component_reasons: tuple[str, ...]
    untestable: dict[str, str]
    decode: float
    prefill: float

    @property
    def failures(self) -> list[str]:
        """Everything that is not PASS, in words; empty for a correct port."""
        found = [] if self.structure is Verdict.PASS else [f"stage 0: {self.structure_reasons}"]
        found += [
            f"{name}: {verdict.value}" for name, verdict in self.components.items() if verdict is not Verdict.PASS
        ]
        if found:
            found += self.component_reasons
        found += [f"decode logits off by {self.decode:.1e}"] if not self.decode < 1e-5 else []
        return found + ([f"prefill logits off by {self.prefill:.1e}"] if not self.prefill < 1e-5 else [])


# Judged by their fp32 logits alone: each is a family above with other switches.
VARIANTS = (
    "llama tied, head_dim", "llama biases", "llama linear", "llama llama3", "llama yarn", "qwen2 windows",
    "smollm3 first without rope", "gpt_neox sequential",
)  # fmt: skip


def judge(port: Path, model: Path, exp: Path, adapter: StackAdapter) -> Judgement:
    """Stage 0, the component comparisons of stage 2 without pytest around them, and fp32 logits by teacher forcing."""
    subject = Subject(model, find_port_classes(port), "nxdi")
    structure = stage0.run(StageOptions(quiet=True), subject, adapter, exp / "model_tree")
    experiment = Experiment.open(exp)
    plan = TracePlan((42,), (WeightKind.REAL,))
    manifest = write_trace(experiment, subject, adapter, model, plan, Progress(quiet=True))
    # one seed: the limits of single draws
    thresholds = Thresholds(r_single=1.3, r_geomean=1.3, r_component=1.5)
    verdicts, reasons = {}, []
    for entry in mapping_of(experiment).components:
        if entry.name in manifest.untestable:
            continue
        samples = component_samples(trace_folder(experiment), entry.name)
        result = component_gate([compare_sample(sample) for sample in samples], thresholds)
        verdicts[entry.name] = result.verdict
        reasons += [f"{reason.code} {reason.subject}: {reason.message}" for reason in result.reasons[:1]]
    decode, prefill = logits_error(subject, model, adapter)
    return Judgement(
        structure.verdict, tuple(f"{r.code} {r.subject}: {r.message}" for r in structure.reasons), verdicts,
        tuple(reasons), manifest.untestable, decode, prefill,
    )  # fmt: skip


def _batch() -> TokenBatch:
    return draw_batch(131, (21, 13, 11), 6, 11)


@functools.cache
def expected_logits(model: Path) -> torch.Tensor:
    """The source's fp32 logits [3, 6, vocabulary], from one forward over each whole row."""
    reference, batch = load_reference(model, torch.float32), _batch()
    rows = zip(batch.rows, batch.prompt_lengths, strict=True)
    return torch.stack([sequence_logits(reference, row, length - 1)[:6] for row, length in rows])


def logits_error(subject: Subject, model: Path, adapter: StackAdapter) -> tuple[float, float]:
    """Relative error of fp32 logits on ragged rows: through decode steps, and through prefill alone."""
    batch, expected = _batch(), expected_logits(model)
    port = adapter.create_model(
        subject.modeling_file, subject.classes.causal, subject.classes.config, model, dtype=torch.float32,
        batch_size=3, seq_len=30,
    )  # fmt: skip
    assert adapter.load_weights(port, model, torch.float32).clean
    got = decode_logits(adapter, port, batch.rows, batch.prompt_lengths, 6)
    ends = [length + 3 for length in batch.prompt_lengths]
    prefilled = prefill_logits(adapter, port, batch.rows, ends)
    return _relative(got, expected), _relative(prefilled, expected[:, 3])


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())
