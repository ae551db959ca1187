"""Weights of a fused block, mapped by an agent: the toolkit's own test tells swapped halves from right ones."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from equiport.agents.backend import Job, JobResult
from equiport.agents.budget import Budget
from equiport.agents.sessions import Sessions
from equiport.bench.family_models import FAMILIES
from equiport.fixtures.tiny_config import tiny_config
from equiport.port.agent_limits import AgentLimits
from equiport.port.fingerprint_reader import fingerprint
from equiport.port.plan import plan
from equiport.port.scaffold import Composer
from equiport.port.translate import UnitRequest
from equiport.port.translate_agent import AgentTranslator
from equiport.port.translate_recipes import blocks_of

from .fake_backend import DONE, FakeBackend, MemoryJournal

BLOCK = '''"""Llama: feed-forward with gate and up in one projection."""

from __future__ import annotations

from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed_inference.utils.distributed import get_tp_group
from port_config import LlamaInferenceConfig
from torch import Tensor, nn
from transformers.activations import ACT2FN


class NeuronLlamaMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: LlamaInferenceConfig) -> None:
        super().__init__()
        shared = {"bias": config.mlp_bias, "dtype": config.neuron_config.torch_dtype,
                  "tensor_model_parallel_group": get_tp_group(config)}
        hidden, wide = config.hidden_size, config.intermediate_size
        self.fused = ColumnParallelLinear(hidden, 2 * wide, stride=2, gather_output=False, **shared)
        self.down_proj = RowParallelLinear(wide, hidden, input_is_parallel=True, **shared)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same shape."""
        gate, up = self.fused(x).chunk(2, dim=-1)
        return self.down_proj(self.act(gate) * up)
'''
TEST = '''"""Unit test of the feed-forward block."""

import block_testing_utils
import torch
from equiport.port.translate_world import UnitWorld
from transformers.models.llama.modeling_llama import LlamaMLP

WORLD = UnitWorld("nxdi", CONFIG_VALUES)

import nxdi_block  # noqa: E402
import port_config  # noqa: E402

CONFIG = WORLD.port_config(port_config.LlamaInferenceConfig)


def fuse(neuron, source):
    neuron.fused.weight.data.copy_(torch.cat([source.gate_proj.weight, source.up_proj.weight]))


def test_mlp():
    block_testing_utils.test_block_correctness(
        nxdi_block.NeuronLlamaMLP,
        LlamaMLP,
        {"down_proj.weight": "down_proj.weight"},
        neuron_init_kwargs={"config": CONFIG},
        pytorch_init_kwargs={"config": WORLD.hf_config},
        test_inputs=[WORLD.hidden()],
        sync_weights_fn=fuse,
    )
'''


def rules(*halves: str) -> dict[str, Any]:
    return {
        "rules": [
            {"target": "fused.weight", "op": "concat", "sources": [f"{name}.weight" for name in halves]},
            {"target": "down_proj.weight", "sources": ["down_proj.weight"]},
        ]
    }


@pytest.mark.slow
def test_swapped_halves_are_told_from_right_ones(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(FAMILIES["llama"]))
    made = plan(fingerprint(tmp_path / "model"), "nxdi")
    config = tiny_config(FAMILIES["llama"]).config
    answers = [rules("up_proj", "gate_proj"), rules("gate_proj", "up_proj")]
    mapping: list[str] = []

    def answer(job: Job) -> JobResult:
        if job.name.startswith("weight rules"):
            mapping.append(job.prompt)
            return replace(DONE, structured=answers[len(mapping) - 1])
        (job.access.workspace / "nxdi_block.py").write_text(BLOCK)
        (job.access.workspace / "test_block.py").write_text(TEST.replace("CONFIG_VALUES", repr(config)))
        return DONE

    said: list[str] = []
    sessions = Sessions(FakeBackend(answer), MemoryJournal(), Budget(None), tmp_path / "transcripts", said.append)
    unit = next(unit for unit in made.units if unit.id == "mlp")
    request = UnitRequest(made, unit, tmp_path / "model", tmp_path / "units" / "mlp", config)
    found = asyncio.run(AgentTranslator(sessions, AgentLimits()).make(request))
    assert "- fused.weight [" in mapping[0] and "- gate_proj.weight [" in mapping[0]
    assert len(mapping) == 2, said
    assert "with these rules the block does not compute what the source does" in mapping[1]
    assert found.card.weights[0].sources == ("gate_proj.weight", "up_proj.weight")
    conversion = Composer(made.fingerprint, blocks_of(made), "nxdi", [found]).modeling_source({"mlp": found.source})
    assert 'converted[f"{prefix}mlp.fused.weight"] = torch.cat(' in conversion
    assert '[given["gate_proj.weight"], given["up_proj.weight"]], dim=0' in conversion
