#!/usr/bin/env python3
"""Draws the example plots of references/example_plots from real runs of stages 0 to 2 on a small Llama.

The example port is validated as it is, and with one defect appended to its file: another rotation style, or a norm
whose variance is computed in the model's dtype. Of each, one component's worst prefill sample is plotted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 192, "intermediate_size": 320,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 40, "vocab_size": 259,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PAIRS = """

def _in_pairs(self, Q, K, V, position_ids, cos_cache, sin_cache, use_polar_compatible_rope):
    if cos_cache is None or sin_cache is None:
        cos_cache, sin_cache = self.rotary_emb(V, position_ids)

    def turn(x):
        half = x.shape[-1] // 2
        cos = cos_cache[..., :half].repeat_interleave(2, -1).unsqueeze(1)
        sin = sin_cache[..., :half].repeat_interleave(2, -1).unsqueeze(1)
        return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sin

    return turn(Q), turn(K), cos_cache, sin_cache


NeuronLlamaAttention.apply_rotary_embedding = _in_pairs
"""
LOW_NORM = """

class _LowNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def make_rmsnorm(config):
    return _LowNorm(config.hidden_size, config.rms_norm_eps)
"""


@dataclass(frozen=True)
class Example:
    """One pair of plots: file stem, folder, what is appended to the port, the component that is shown."""

    stem: str
    folder: str
    appended: str
    component: str


EXAMPLES = (
    Example("right_port", "positive_samples", "", "layers.{i}.self_attn"),
    Example("rotation_style", "negative_samples", PAIRS, "layers.{i}.self_attn"),
    Example("norm_in_bf16", "negative_samples", LOW_NORM, "layers.{i}.input_layernorm"),
)


def draw(example: Example, work: Path, output: Path) -> str:
    """Stage 0 and the traced run of stage 2 for the example's port, then the plots; returns one line of figures."""
    from PIL import Image

    from equiport.experiment import Experiment
    from equiport.fixtures.weights import WeightKind
    from equiport.stacks.loading import load_adapter
    from equiport.stacks.port_classes import find_port_classes
    from equiport.stages import stage0
    from equiport.stages.component_check import compare_sample
    from equiport.stages.component_fixtures import TracePlan, component_samples, trace_folder, write_trace
    from equiport.stages.frame import StageOptions, Subject
    from equiport.stages.progress import Progress

    model, port, exp = work / "model", work / example.stem / "modeling_llama_nxdi.py", work / f"{example.stem}_exp"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    port.parent.mkdir()
    port.write_text((ROOT / "examples/llama/modeling_llama_nxdi.py").read_text() + example.appended)
    subject, adapter = Subject(model, find_port_classes(port), "nxdi"), load_adapter("nxdi")
    stage0.run(StageOptions(quiet=True), subject, adapter, exp / "model_tree")
    experiment = Experiment.open(exp)
    plan = TracePlan((42,), (WeightKind.PERTURBED,))
    write_trace(experiment, subject, adapter, exp / "fixtures" / "synthetic", plan, Progress(quiet=True))
    samples = [one for one in component_samples(trace_folder(experiment), example.component) if one.phase == "prefill"]
    sample = max(samples, key=lambda one: compare_sample(one).r_ratio)
    drawn = compare_sample(sample, work / "plots" / example.stem)
    folder = output / example.folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in drawn.plots:
        kind = Path(path).stem.rsplit("_", 1)[-1]
        # few colours suffice, and the file is a third
        Image.open(path).convert("RGB").quantize(64).save(folder / f"{example.stem}_{kind}.png", optimize=True)
    return f"{example.stem}: {sample.name}, R={drawn.r_ratio:.3g}, R32={drawn.r32:.2g}"


def main() -> int:
    """Command line; every example in a process of its own, since their ports have one module name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "references" / "example_plots", help="folder to write to")
    parser.add_argument("--only", choices=[example.stem for example in EXAMPLES], help="one example")
    options = parser.parse_args()
    for example in EXAMPLES:
        if options.only == example.stem:
            with tempfile.TemporaryDirectory() as folder:
                print(draw(example, Path(folder).resolve(), options.output), flush=True)
        elif options.only is None:
            command = [sys.executable, __file__, "--only", example.stem, "--output", str(options.output)]
            subprocess.run(command, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
