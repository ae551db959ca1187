"""The traced run of stage 3: both views name the layer in which a fault sits, and nothing on a correct port."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from broken_ports import CORRECT, EXAMPLE, replaced
from worlds import TINY_LLAMA

from equiport import __version__
from equiport.compare.thresholds import Thresholds
from equiport.compare.verdict import Verdict
from equiport.experiment import Experiment, StageResult
from equiport.experiment.hashing import hash_inputs, model_files, port_files
from equiport.fixtures.weights import WeightKind
from equiport.reference.model import materialize
from equiport.stacks.loading import load_adapter
from equiport.stacks.port_classes import find_port_classes
from equiport.stages import stage0, stage3
from equiport.stages.frame import StageContext, StageOptions, Subject
from equiport.stages.progress import Progress
from equiport.stages.stage2 import ComponentMetrics
from equiport.stages.stage3 import LocalisationMetrics
from equiport.stages.traced_run import TracedRow, first_bad, traced_runs

_NUMBERED = (
    "[NeuronLlamaDecoderLayer(config) for _ in range(config.num_hidden_layers)])",
    "[NeuronLlamaDecoderLayer(config) for _ in range(config.num_hidden_layers)])\n"
    "        for number, layer in enumerate(self.layers):\n"
    "            layer.number = layer.mlp.number = number",
)
#: A gain in the MLP of layer 2; and one in the block of layer 1 that acts on far positions alone.
_GAIN = replaced(
    _NUMBERED, ("return self.down_proj(gated)", "return self.down_proj(gated) * (1.2 if self.number == 2 else 1.0)")
)
_FAR = replaced(
    _NUMBERED,
    (
        "        return hidden_states, attention.present_key_value",
        "        if self.number == 1:\n"
        "            hidden_states = torch.where(position_ids[..., None] > 90, 1.02 * hidden_states, hidden_states)\n"
        "        return hidden_states, attention.present_key_value",
    ),
)


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of four layers."""
    root = tmp_path_factory.mktemp("four")
    (root / "source").mkdir()
    (root / "source" / "config.json").write_text(json.dumps({**TINY_LLAMA, "num_hidden_layers": 4}))
    torch.set_num_threads(1)
    return materialize(root / "source", root / "model", WeightKind.PERTURBED, 3, tiny=False).folder


def context_of(model: Path, folder: Path, edit: Callable[[str], str]) -> StageContext:
    """An experiment with the edited example port, stage 0 done."""
    folder.mkdir(parents=True)
    file = folder / "modeling_llama_nxdi.py"
    file.write_text(edit(EXAMPLE.read_text()))
    adapter, options = load_adapter("nxdi"), StageOptions(quiet=True)
    subject = Subject(model, find_port_classes(file), "nxdi")
    stage0.run(options, subject, adapter, folder / "exp" / "model_tree")
    experiment = Experiment.open(folder / "exp")
    return StageContext(experiment, subject, adapter, Thresholds(), options, Progress(quiet=True))


def stored(context: StageContext, stage: int, verdict: Verdict) -> Path:
    """A fresh result of a stage, with that verdict and nothing else in it."""
    assert context.experiment is not None and context.subject is not None
    empty = ComponentMetrics(
        tests=1, comparisons=1, rows=[], unlabelled=[], uncovered=[], excitation=[], plots=[], instances=[]
    )
    files = [*model_files(context.port.model_path), *port_files(context.port.modeling_file)]
    result = StageResult(
        stage=stage,
        verdict=verdict,
        metrics=empty.model_dump(mode="json") if stage == 2 else {},
        inputs=hash_inputs(files, context.experiment.root),
        tool_version=__version__,
    )
    return result.save(context.experiment.result_path(stage))


def test_a_correct_port_has_no_bad_place_and_stage_3_says_so(four_layers: Path, tmp_path: Path) -> None:
    context = context_of(four_layers, tmp_path / "p", CORRECT[0].edit)
    assert context.experiment is not None
    file = stored(context, 2, Verdict.PASS)
    stored(context, 5, Verdict.FAIL)
    options = StageOptions(exp_dir=context.experiment.root, quiet=True)
    result = stage3.run(options, file, 1.2, context.subject, context.adapter)
    assert result.verdict is Verdict.FAIL and [item.code for item in result.reasons] == ["NO_SUSPECT"]
    found = LocalisationMetrics.model_validate(result.metrics).traced
    assert found.note == "" and {run.fixture.split("-")[0] for run in found.runs} == {"perturbed", "real"}
    assert [run.first_bad for run in found.runs] == [[], []]
    longest = max(position for curve in found.runs[0].curves for position in curve.positions)
    assert longest == 220 + 6 - 1
    for run in found.runs:
        assert {row.view for row in run.rows} == {"shadow", "free"}
        assert {row.layer for row in run.rows} == {None, 0, 1, 2, 3}


def test_both_views_name_the_layer_of_a_fault(four_layers: Path, tmp_path: Path) -> None:
    context = context_of(four_layers, tmp_path / "p", _GAIN)
    assert context.experiment is not None
    run = traced_runs(context, Thresholds(), long=False).runs[0]
    shadow, free = run.first("shadow"), run.first("free")
    assert shadow is not None and (shadow.module, shadow.layer) == ("layers.2.mlp", 2), run.first_bad
    assert free is not None and (free.module, free.layer) == ("layers.2.mlp", 2), run.first_bad
    # fed by the reference, layer 3 is as good as ever; on its own activations the error stays
    worst = {
        view: max(row.r32 or 0.0 for row in run.rows if row.view == view and row.layer == 3)
        for view in ("shadow", "free")
    }
    assert worst["shadow"] < 1e-3 < 1 < worst["free"]
    assert {curve.module for curve in run.curves} == {"layers.2.mlp"}
    assert (context.experiment.root / run.plots[0]).is_file()
    assert (context.experiment.results / "traced_run_perturbed.json").is_file()


def test_stage_3_localises_what_only_stage_5_sees(four_layers: Path, tmp_path: Path) -> None:
    context = context_of(four_layers, tmp_path / "p", _FAR)
    assert context.experiment is not None
    options = StageOptions(exp_dir=context.experiment.root, quiet=True)
    file = stored(context, 2, Verdict.PASS)
    nothing = stage3.run(options, file, 1.2, context.subject, context.adapter)
    assert nothing.verdict is Verdict.PASS and nothing.metrics["traced"]["runs"] == []
    stored(context, 5, Verdict.FAIL)
    result = stage3.run(options, file, 1.2, context.subject, context.adapter)
    found = LocalisationMetrics.model_validate(result.metrics)
    assert result.verdict is Verdict.PASS and found.traced.names_a_place
    run = found.traced.runs[0]
    assert {(item.view, item.module, item.layer) for item in run.first_bad} == {
        ("shadow", "layers.1", 1),
        ("free", "layers.1", 1),
    }
    free = next(curve for curve in run.curves if curve.view == "free")
    near = [r32 for position, r32 in zip(free.positions, free.r32, strict=True) if position <= 90]
    far = [r32 for position, r32 in zip(free.positions, free.r32, strict=True) if position > 90]
    assert max(near) < 1e-3 < 0.1 < min(far)


def row(layer: int, r_ratio: float, r32: float = 1e-5) -> TracedRow:
    return TracedRow(
        component="layers.{i}", component_type="decoder_layer", layer=layer, fixture="real", phase="prefill",
        r_ratio=r_ratio, r32=r32, r32_slice=r32, excess=0.0, view="free", module=f"layers.{layer}", order=layer,
    )  # fmt: skip


def test_precision_is_named_where_it_begins_to_stay() -> None:
    limits = Thresholds()
    found = first_bad("free", [row(0, 1.0), row(1, 1.3), row(2, 1.0), row(3, 1.25), row(4, 1.3)], limits)
    assert found is not None and found.layer == 3
    assert first_bad("free", [row(0, 1.0), row(1, 1.3), row(2, 1.1)], limits) is None
    assert first_bad("shadow", [row(0, 9.0)], limits) is None
