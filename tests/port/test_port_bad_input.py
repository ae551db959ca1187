"""Bad input of `equiport plan` and `equiport port`: one line with file, field, remedy; exit 2; nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from equiport.cli import app

from .families import FAMILIES, make_model

VERBS = ("plan", "port")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("bad"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Run a verb that must end with exit 2 and one line, and leave nothing; returns the line."""
    monkeypatch.setattr("os._exit", lambda code: None)

    def ran(verb: str, folder: Path, *more: object, out: Path | None = None) -> str:
        target = out or tmp_path / "out"
        before = sorted(tmp_path.rglob("*"))
        ended = CliRunner().invoke(app, [verb, str(folder), "--out", str(target), *map(str, more)])
        lines = [line for line in ended.output.splitlines() if line.startswith("equiport: ")]
        assert ended.exit_code == 2, ended.output
        assert len(lines) == 1 and "Traceback" not in ended.output, ended.output
        assert sorted(tmp_path.rglob("*")) == before
        return lines[0].removeprefix("equiport: ")

    return ran


def config(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**FAMILIES["llama"], **changes}))
    return folder


@pytest.mark.parametrize("verb", VERBS)
def test_folders_and_configs(verb: str, run: Callable[..., str], tmp_path: Path) -> None:
    assert "nowhere: no such model folder. Give a HuggingFace folder" in run(verb, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "empty/config.json: no such file" in run(verb, tmp_path / "empty")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"a":')
    assert "broken/config.json: is no JSON: Expecting value" in run(verb, broken)
    unknown = config(tmp_path / "unknown", model_type="lalama")
    assert "unknown/config.json: model_type: 'lalama' is unknown to transformers" in run(verb, unknown)
    activation = config(tmp_path / "activation", hidden_act="nope")
    assert "config.json: hidden_act: transformers cannot build it: it knows no 'nope'" in run(verb, activation)
    layers = config(tmp_path / "layers", num_hidden_layers="two")
    assert "layers/config.json: " in run(verb, layers)


@pytest.mark.parametrize("verb", VERBS)
def test_flags(verb: str, run: Callable[..., str], tmp_path: Path) -> None:
    folder = config(tmp_path / "model")
    assert "--stack: no plan can be made for stack 'vlllm'. Stacks that can be planned for: nxdi" in run(
        verb, folder, "--stack", "vlllm"
    )
    assert "no.json: no such file. Give the answers file" in run(verb, folder, "--answers", tmp_path / "no.json")
    answers = tmp_path / "answers.json"
    entry = {"id": "nope", "question": "", "evidence": [], "choices": [], "answer": "yes"}
    answers.write_text(json.dumps({"questions": [entry]}))
    assert "answers.json: nope: is asked by nobody for this model" in run(verb, folder, "--answers", answers)
    answers.write_text(json.dumps({"questions": [], "more": 1}))
    assert "answers.json: more: " in run(verb, folder, "--answers", answers)
    file = tmp_path / "file"
    file.write_text("x")
    assert "file: --out: is no folder. Choose another folder." in run(verb, folder, out=file)
    assert "file: --out: is no folder" in run(verb, folder, out=file / "below")


@pytest.mark.parametrize("verb", VERBS)
def test_damaged_weights(verb: str, model: Path, run: Callable[..., str], tmp_path: Path) -> None:
    tensors, settings = load_file(model / "model.safetensors"), (model / "config.json").read_text()
    name = "model.layers.1.mlp.up_proj.weight"

    def folder(kind: str) -> Path:
        made = tmp_path / kind
        made.mkdir()
        (made / "config.json").write_text(settings)
        return made

    truncated = folder("truncated")
    data = (model / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert "truncated/model.safetensors: is truncated or no safetensors file" in run(verb, truncated)
    lacking = folder("lacking")
    save_file({key: value for key, value in tensors.items() if key != name}, lacking / "model.safetensors")
    assert f"lacking: weights lack {name}, which other layers have. Download" in run(verb, lacking)
    shaped = folder("shaped")
    save_file({**tensors, name: tensors[name][:5].contiguous()}, shaped / "model.safetensors")
    said = run(verb, shaped)
    assert f"model.safetensors: {name} has shape [5, 48], config.json asks for [80, 48]" in said


def test_a_port_that_is_refused_late_says_so_early(run: Callable[..., str], tmp_path: Path) -> None:
    folder = config(tmp_path / "model")
    assert "--through: there is no stage 9. Give one of 0, 1" in run("port", folder, "--through", 9)
    assert "--engine: no engine 'wizard'" in run("port", folder, "--engine", "wizard")


def test_the_bench_names_its_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os._exit", lambda code: None)
    ended = CliRunner().invoke(app, ["bench", "families", "--family", "lalama"])
    assert ended.exit_code == 2
    assert "equiport: --family: no family 'lalama'. Give one of llama, qwen2" in ended.output
