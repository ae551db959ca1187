"""The compiled-folder loader rebuilds the settings by the stack's own API and refuses to load without a device."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from nxdi_llama_cases import CAUSAL, CONFIG, PORT

from equiport.content import content_dir
from equiport.stacks.contract import StackAdapter

MAIN: Any = runpy.run_path(str(content_dir("scripts") / "nxdi_compiled_loader.py"))["main"]


@pytest.fixture
def compiled(adapter: StackAdapter, plain_folder: Path, tmp_path: Path) -> Path:
    model: Any = adapter.create_model(
        PORT, CAUSAL, CONFIG, plain_folder, dtype=torch.bfloat16, batch_size=3, seq_len=24
    )
    model.config.save(str(tmp_path))
    return tmp_path


def run(folder: Path, *more: str, config: str = CONFIG) -> int:
    given = ["--compiled-model-path", str(folder), "--model-class", f"{PORT}:{CAUSAL}"]
    return int(MAIN([*given, "--config-class", f"{PORT}:{config}" if config else "nothing", *more]))


def test_settings_come_back(compiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(compiled) == 0
    printed = capsys.readouterr().out
    for wanted in ("LlamaInferenceConfig with LlamaNeuronConfig", "batch_size: 3", "seq_len: 24", "bfloat16"):
        assert wanted in printed


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("load", "needs a Neuron device"),
        ("empty", "neuron_config.json: no such file"),
        ("damaged", "cannot be rebuilt"),
        ("class", "has no class 'Nope'"),
        ("form", "--config-class: 'nothing' is not FILE:CLASS"),
    ],
)
def test_refusals(compiled: Path, capsys: pytest.CaptureFixture[str], case: str, message: str) -> None:
    if case == "empty":
        (compiled / "neuron_config.json").unlink()
    if case == "damaged":
        (compiled / "neuron_config.json").write_text("{")
    names = {"class": "Nope", "form": ""}
    assert run(compiled, *(["--load"] if case == "load" else []), config=names.get(case, CONFIG)) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.strip().splitlines()) == 1
