"""`equiport port` as a user calls it: what it leaves, that it goes on where it stopped, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from equiport.errors import EquiportError, ExitCode, OpenQuestionError
from equiport.port import port_run, port_run_translate
from equiport.port.port_run import PortOptions, run_port

from .families import FAMILIES, make_model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(model, port folder) of one port whose experiment was left out: the pipeline has tests of its own."""
    root = tmp_path_factory.mktemp("port")
    model, out = make_model("granite", root), root / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(port_run, "_experiment", lambda *_: ExitCode.PASS)
        assert run_port(PortOptions(model, out, quiet=True)) is ExitCode.PASS
    return model, out


def test_what_a_port_leaves(made: tuple[Path, Path]) -> None:
    _, out = made
    names = (
        "port_plan.json",
        "PORT_PLAN.md",
        "port_state.json",
        "README.md",
        "HANDOVER.md",
        "src/modeling_granite_nxdi.py",
    )
    assert all((out / name).is_file() for name in names)
    units = json.loads((out / "port_plan.json").read_text())["units"]
    assert len(units) == 5
    for unit in units:
        folder = out / "units" / unit["id"]
        test = (folder / "test_block.py").read_text()
        assert (folder / "nxdi_block.py").is_file() and "block_testing_utils.test_block_correctness" in test
        assert "PASS" in (folder / "test_block.log").read_text()
    state = json.loads((out / "port_state.json").read_text())
    assert {step["status"] for step in state["steps"].values()} == {"done"}
    assert "NeuronGraniteForCausalLM" in (out / "README.md").read_text()


def test_what_is_done_is_not_done_again(
    made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = made
    monkeypatch.setattr(port_run, "_experiment", lambda *_: ExitCode.PASS)
    monkeypatch.setattr(port_run_translate, "run_unit_test", lambda *_: pytest.fail("a test was run again"))
    assert run_port(PortOptions(model, out)) is ExitCode.PASS
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.endswith(": up to date")]) == 9, lines


def test_an_edited_port_is_made_again(made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = made
    monkeypatch.setattr(port_run, "_experiment", lambda *_: ExitCode.PASS)
    port = out / "src" / "modeling_granite_nxdi.py"
    whole = port.read_text()
    port.write_text(whole.replace("granite", "marble"))
    assert run_port(PortOptions(model, out, quiet=True)) is ExitCode.PASS
    assert port.read_text() == whole


def test_a_conversion_that_loses_a_tensor_fails(made: tuple[Path, Path], tmp_path: Path) -> None:
    from equiport.port.weights import check_weights
    from equiport.stacks.loading import load_adapter
    from equiport.stacks.port_classes import find_port_classes

    model, out = made
    whole = (out / "src" / "modeling_granite_nxdi.py").read_text()
    line = '        converted["rank_util.rank"] = ranks.clone()\n'
    edits = {
        "lose": (
            '        converted.pop("layers.1.mlp.up_proj.weight")\n',
            "layers.1.mlp.up_proj.weight: the port has no",
        ),
        "write": ('        state_dict["norm.weight"].mul_(2.0)\n', "norm.weight: the conversion changes the dict"),
        "take": ('        state_dict.pop("norm.weight")\n', "norm.weight: the conversion changes the dict"),
        "add": (
            '        converted["layers.0.mlp.more.weight"] = ranks.clone()\n',
            "layers.0.mlp.more.weight: reaches no",
        ),
    }
    for name, (statement, finding) in edits.items():
        port = tmp_path / name / "modeling_granite_nxdi.py"
        port.parent.mkdir()
        port.write_text(whole.replace(line, line + statement))
        found = check_weights(load_adapter("nxdi"), port, find_port_classes(port), out / "tiny", model)
        assert any(text.startswith(finding) for text in found.findings), (name, found.findings)


def test_a_block_without_recipe_is_an_open_question_that_names_it(tmp_path: Path) -> None:
    config = {
        "model_type": "bloom", "architectures": ["BloomForCausalLM"], "hidden_size": 48, "n_head": 6, "n_layer": 2,
        "vocab_size": 131, "num_hidden_layers": 2, "num_attention_heads": 6,
    }  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(OpenQuestionError) as stopped:
        run_port(PortOptions(tmp_path / "model", tmp_path / "out", quiet=True))
    assert stopped.value.exit_code is ExitCode.INCONCLUSIVE
    assert "position.alibi" in str(stopped.value) or "questions are open" in str(stopped.value)


def test_bad_calls_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EquiportError, match="no such model folder"):
        run_port(PortOptions(tmp_path / "nowhere", tmp_path / "out"))
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"]))
    with pytest.raises(EquiportError, match="--engine: no engine 'wizard'"):
        run_port(PortOptions(tmp_path, tmp_path / "out", engine="wizard"))
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for engine in ("agent", "auto"):
        with pytest.raises(EquiportError, match="no key for a model is set|claude-agent-sdk, which is not installed"):
            run_port(PortOptions(tmp_path, tmp_path / "out", engine=engine))
    assert not (tmp_path / "out").exists()
