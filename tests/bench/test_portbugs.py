"""The corpus of porting bugs: its mechanics, a case of each kind, its figures and its command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

from equiport.bench.portbugs.common_gates import GATES, CommonGates
from equiport.bench.portbugs.configs import CONFIGS
from equiport.bench.portbugs.corpus import CaseResult, corpus, families_of, run_case
from equiport.bench.portbugs.judging import Judged
from equiport.bench.portbugs.operator import BugOperator, Defect, PortBug, decoding, forget, replaced, while_running
from equiport.bench.portbugs.run import DEFAULT_SEED, PortBugsBench, chosen, plot_portbugs
from equiport.bench.portbugs.source_stack import SourceStack
from equiport.bench.portbugs.table import PortBugsTable, lines_of, misses
from equiport.cli import app
from equiport.errors import EquiportError
from equiport.fixtures.weights import WeightKind
from equiport.localize.registry import hypotheses
from equiport.reference.model import load_reference, materialize

SEED = 8


def named(name: str) -> Defect:
    return next(one for one in corpus() if one.name == name)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with perturbed weights."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("llama")
    (root / "source").mkdir()
    (root / "source" / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    return materialize(root / "source", root / "model", WeightKind.PERTURBED, SEED, tiny=False).folder


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 15)[None]).logits  # type: ignore[no-any-return]


def test_the_corpus_is_wide_and_its_names_are_unique() -> None:
    bugs = [one for one in corpus() if not one.control]
    controls = [one for one in corpus() if one.control]
    assert len(bugs) >= 60 and len(controls) >= 8
    assert len(families_of(bugs)) >= 14
    assert sum(isinstance(one, PortBug) for one in bugs) >= 12
    assert len({one.name for one in corpus()}) == len(corpus())
    assert all(one.family in CONFIGS for one in corpus())
    assert all(one.component for one in bugs)
    assert 5 <= len(chosen(PortBugsBench(quick=True))) <= 12


def test_expected_causes_are_causes_that_can_be_proven() -> None:
    known = {kind.kind for kind in hypotheses()} | {"precision order", "config key not read"}
    assert {cause for one in corpus() for cause in one.causes} <= known


def test_while_running_puts_the_function_back_whatever_happens(llama: Path) -> None:
    model: Any = load_reference(llama, torch.float32)
    attention = model.model.layers[0].self_attn
    file = sys.modules[type(attention).__module__]
    before = file.repeat_kv  # type: ignore[attr-defined]
    clean = logits(model)
    while_running(attention, "repeat_kv", lambda original, x, groups: x.repeat(1, groups, 1, 1))
    assert float((logits(model) - clean).abs().max()) > 1e-4
    assert file.repeat_kv is before  # type: ignore[attr-defined]

    def failing(*_: object) -> None:
        raise RuntimeError("inside")

    while_running(model.model.layers[1].self_attn, "repeat_kv", failing)
    with pytest.raises(RuntimeError, match="inside"):
        logits(model)
    assert file.repeat_kv is before  # type: ignore[attr-defined]


def test_a_bug_leaves_another_model_of_the_class_alone(llama: Path) -> None:
    clean = logits(load_reference(llama, torch.float32))
    for name in ("kv heads tiled", "rotation in pairs for halves", "no causal mask", "MLP beside attention"):
        operator = named(name)
        assert isinstance(operator, BugOperator)
        broken, other = load_reference(llama, torch.float32), load_reference(llama, torch.float32)
        operator.inject(broken)
        assert float((logits(broken) - clean).abs().max()) > 1e-3, name
        assert torch.equal(logits(other), clean), name
        assert torch.equal(logits(load_reference(llama, torch.float32)), clean), name


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="routers are other modules in transformers 4")
def test_every_rewrite_computes_the_same_in_fp32(tmp_path: Path) -> None:
    for number, operator in enumerate(one for one in corpus() if one.control and isinstance(one, BugOperator)):
        assert isinstance(operator, BugOperator)
        root = tmp_path / str(number)
        root.mkdir()
        (root / "config.json").write_text(json.dumps(CONFIGS[operator.family]))
        folder = materialize(root, root / "model", WeightKind.PERTURBED, SEED, tiny=False).folder
        model = load_reference(folder, torch.float32)
        clean = logits(model)
        operator.inject(model)
        assert float((logits(model) - clean).norm() / clean.norm()) < 1e-5, operator.name


def test_a_forgotten_slot_is_forgotten_in_decode_alone(llama: Path) -> None:
    stack = SourceStack(lambda model: [forget(layer.self_attn, lambda count: (-2,)) for layer in model.model.layers])
    clean = SourceStack(lambda model: None)
    ids = torch.arange(3, 15)[None]
    found = []
    for one in (stack, clean):
        port = one.create_model("", "", "", llama, dtype=torch.float32)
        prefill = one.forward(port, ids)
        found.append((prefill, one.forward(port, torch.tensor([[5]]), positions=torch.tensor([12]))))
    assert torch.equal(found[0][0], found[1][0])
    assert float((found[0][1] - found[1][1]).abs().max()) > 1e-3
    assert decoding(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 9, 4))
    assert not decoding(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))


def test_a_text_that_is_not_there_is_an_error() -> None:
    with pytest.raises(EquiportError, match="the port holds no 'b'"):
        replaced("a", "b", "c")


def test_a_weight_in_the_wrong_layer_is_named_by_stage_0() -> None:
    found = run_case(named("a layer's weights in another"), SEED)
    assert found.right and found.judged.stage == 0 and "down_proj" in found.judged.component, found
    assert found.cause_right


def test_a_correct_rewrite_is_left_alone() -> None:
    found = run_case(named("control: reductions split in two"), SEED)
    assert found.right and found.judged.gates == [], found.judged.reasons


def case(name: str, *, control: bool = False, detected: bool = True, **changes: Any) -> CaseResult:
    judged = Judged(
        stage=2 if detected else -1, component="model.norm" if detected else "", cause="eps", says="eps is 1",
        gates=["components"] if detected else [], reasons=[], r32=1.0, seconds=2.0,
    )  # fmt: skip
    values: dict[str, Any] = {"component_right": True, "cause_right": True, **changes}
    return CaseResult(
        operator=name, family="llama", control=control, quick=False, seed=1, judged=judged, **values
    )  # fmt: skip


def test_the_table_counts_what_was_missed(tmp_path: Path) -> None:
    common = CommonGates(default=[], perturbed=[GATES[0]])
    cases = [
        case("seen", common=common),
        case("missed", detected=False, common=common),
        case("misnamed", component_right=False, cause_right=False),
        case("flagged", control=True, common=CommonGates(default=[GATES[0]], perturbed=[])),
        case("left alone", control=True, detected=False),
    ]
    table = PortBugsTable(seed=1, quick=False, versions={}, cases=cases, failed={"broken": "why"})
    found = table.summary()
    assert (found.detected.count, found.detected.total) == (2, 4)
    assert (found.false_alarms.count, found.false_alarms.total) == (1, 2)
    assert (found.component_right.count, found.cause_right.count, found.cause_right.total) == (1, 1, 2)
    greedy = found.gates[0]
    assert (greedy.default.count, greedy.default_alarms.count, greedy.perturbed.count) == (0, 1, 2)
    assert not table.passed
    assert any("could not be run: broken: why" in line for line in lines_of(table))
    assert misses(cases) == [
        "missed (llama): not detected",
        "misnamed (llama): component model.norm, cause eps",
        "flagged (llama): false alarm",
    ]
    assert plot_portbugs(table, tmp_path / "table.png").stat().st_size > 1000
    good = table.model_copy(update={"cases": [cases[0], cases[4]], "failed": {}})
    assert good.passed and not good.model_copy(update={"cases": []}).passed


def test_the_command_detects_locates_and_explains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os._exit", lambda code: None)
    assert DEFAULT_SEED not in (7, SEED)
    output = tmp_path / "found.json"
    call = ["bench", "portbugs", "--only", "scale inverted", "--seed", "8", "--jobs", "1", "--output", str(output)]
    ended = CliRunner().invoke(app, call)
    assert ended.exit_code == 0, ended.output
    written = json.loads(output.read_text())
    assert written["passed"] and written["seed"] == SEED and written["summary"]["detected"]["count"] == 1
    found = CaseResult.model_validate(written["cases"][0])
    assert found.component_right and found.cause_right and found.judged.stage == 2, found
    assert "self_attn" in found.judged.component and output.with_suffix(".png").is_file()
    assert found.common is not None and "end to end R <= 2" in found.common.perturbed
    refused = CliRunner().invoke(app, ["bench", "portbugs", "--only", "no such bug"])
    assert refused.exit_code == 2 and "--only" in refused.output
