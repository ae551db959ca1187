"""The MoE gate: a router's flip within the noise is no fault, a wrong router is."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from equiport.bench.portbugs.source_stack import SourceStack
from equiport.compare.comparison import Comparison
from equiport.compare.gates_components import component_gate
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Verdict
from equiport.fixtures.tokens import draw_batch
from equiport.fixtures.weights import WeightKind
from equiport.reference.model import Fixture, materialize, real_fixture
from equiport.stacks.port_classes import PortClasses
from equiport.stages.component_check import compare_sample
from equiport.structure.mapping import ComponentMapping, MappingEntry
from equiport.trace.components import trace_components

pytestmark = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="routers are modules of their own from transformers 5 on"
)
_SHARED = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 211,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 80, "max_position_embeddings": 128,
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2_moe", **_SHARED, "num_experts": 8, "shared_expert_intermediate_size": 40,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", **_SHARED, "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1,
    "n_group": 2, "topk_group": 1, "q_lora_rank": 24, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 0, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip


def entry(path: str, kind: str) -> MappingEntry:
    return MappingEntry((path,), (path,), indices=((0,), (1,)), component_type=kind)


MAPPING = ComponentMapping((entry("model.layers.{i}", "decoder_layer"), entry("model.layers.{i}.mlp", "moe")))


@pytest.fixture(scope="module", params=[QWEN2, DEEPSEEK], ids=["qwen2_moe", "deepseek_v3"])
def fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    root = tmp_path_factory.mktemp("moe")
    (root / "source").mkdir()
    (root / "source" / "config.json").write_text(json.dumps(request.param))
    torch.set_num_threads(1)
    made = materialize(root / "source", root / "model", WeightKind.PERTURBED, 3, tiny=False)
    return real_fixture(made.folder)


def comparisons(fixture: Fixture, defect: Callable[[nn.Module], None]) -> list[Comparison]:
    """Both components over three seeds, the source model with a defect as the port."""
    classes = PortClasses(fixture.folder / "config.json", inner="", causal="", config="")
    batches = {seed: draw_batch(211, (24, 24), 4, seed) for seed in (1, 2, 3)}
    adapter: Any = SourceStack(defect)
    traced = trace_components(adapter, classes.modeling_file, classes, MAPPING, fixture, batches)
    assert [sample.problem for sample in traced.samples if sample.problem] == []
    return [compare_sample(sample) for sample in traced.samples]


def verdicts(found: list[Comparison]) -> dict[str, Verdict]:
    kinds = {item.labels.component_type for item in found}
    return {
        kind: component_gate([c for c in found if c.labels.component_type == kind], Thresholds()).verdict
        for kind in kinds
    }


def routers(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(".gate")]


def noisy(model: nn.Module) -> None:
    """Router logits in bf16 come out in another order of summation: a correct port of another make."""
    for router in routers(model):
        if router.weight.dtype is torch.bfloat16 or next(model.parameters()).dtype is torch.bfloat16:
            generator = torch.Generator().manual_seed(5)

            def before(_: nn.Module, args: tuple[Any, ...], generator: torch.Generator = generator) -> tuple[Any, ...]:
                step = torch.randn(args[0].shape, generator=generator) * args[0].float().abs() * 2**-9
                return ((args[0].float() + step).to(args[0].dtype), *args[1:])

            router.register_forward_pre_hook(before)


def wrong_choice(model: nn.Module) -> None:
    """One expert's logit is off a little: few tokens go elsewhere."""
    for router in routers(model):
        router.weight.data[3] *= 1.1


def not_normalised(model: nn.Module) -> None:
    for router in routers(model):
        router.norm_topk_prob = False


def test_flips_within_the_noise_are_set_aside_and_counted(fixture: Fixture) -> None:
    found = comparisons(fixture, noisy)
    assert verdicts(found) == {"decoder_layer": Verdict.PASS, "entry_path": Verdict.PASS, "moe": Verdict.PASS}, [
        (c.name, c.r_ratio, c.r32, c.linf_ratio) for c in found
    ]
    unsure, tokens = sum(c.tokens_unsure for c in found), sum(c.tokens for c in found)
    assert 0 < unsure < 0.1 * tokens, (unsure, tokens)


@pytest.mark.parametrize("defect", [wrong_choice, not_normalised])
def test_a_wrong_router_fails(fixture: Fixture, defect: Callable[[nn.Module], None]) -> None:
    broken = verdicts(comparisons(fixture, defect))
    assert broken == {"decoder_layer": Verdict.FAIL, "entry_path": Verdict.PASS, "moe": Verdict.FAIL}


def test_too_many_tokens_within_the_noise_are_no_pass(fixture: Fixture) -> None:
    found = comparisons(fixture, lambda model: None)
    assert set(verdicts(found).values()) == {Verdict.PASS}
    many = [c.model_copy(update={"tokens_unsure": c.tokens // 5}) for c in found]
    result = component_gate(many, Thresholds())
    assert result.verdict is Verdict.INCONCLUSIVE
    assert {reason.code for reason in result.reasons} == {"ROUTER_NOISE"}
