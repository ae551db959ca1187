"""`--nxdi-src` and `--nxd-src`: the real packages by flags, in every command that runs a port."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from worlds import EXAMPLE_PORT, TINY_LLAMA, equiport_command

from equiport.content import content_dir

FITS = version("transformers").startswith("4.57.")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EQUIPORT_NX")}
    return subprocess.run(equiport_command(*arguments), capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def stack(tmp_path: Path) -> tuple[str, ...]:
    """Flags that give a copy of the stand-in for the real packages."""
    copy = tmp_path / "stack"
    shutil.copytree(content_dir("adapters") / "nxdi" / "standin", copy, ignore=shutil.ignore_patterns("__pycache__"))
    return ("--nxdi-src", str(copy), "--nxd-src", str(copy))


def test_doctor_says_whether_sources_can_be_used(stack: tuple[str, ...], tmp_path: Path) -> None:
    ended = _run("doctor", *stack)
    if FITS:
        assert ended.returncode == 0 and "nxdi: real-cpu, NxDI" in ended.stdout, ended.stdout + ended.stderr
    else:
        assert ended.returncode == 2 and "needs transformers 4.57.*" in ended.stdout, ended.stdout + ended.stderr
    assert f"EQUIPORT_NXD_SRC {stack[3]}" in ended.stdout
    (tmp_path / "empty").mkdir()
    ended = _run("doctor", "--nxdi-src", str(tmp_path / "empty"), *stack[2:])
    assert ended.returncode == 2 and "holds no neuronx_distributed_inference" in ended.stdout
    plain = _run("doctor")
    assert plain.returncode == 0 and "stand-in" in plain.stdout and "no sources given" in plain.stdout


@pytest.mark.parametrize("command", ["doctor", "validate", "port"])
def test_a_folder_that_is_not_there(command: str, tmp_path: Path) -> None:
    more = ("x", "--out", str(tmp_path / "out")) if command == "port" else ()
    ended = _run(command, *more, "--nxdi-src", str(tmp_path / "nowhere"))
    assert ended.returncode == 2, ended.stdout
    assert "--nxdi-src: no such folder" in ended.stderr and "nowhere" in ended.stderr


@pytest.mark.skipif(not FITS, reason="the real packages' tier needs transformers 4.57")
def test_results_are_stamped_with_the_tier(stack: tuple[str, ...], tmp_path: Path) -> None:
    model, exp = tmp_path / "config.json", tmp_path / "exp"
    model.write_text(json.dumps(TINY_LLAMA))
    given = ("--port", str(EXAMPLE_PORT), "--model", str(model), "--out", str(exp), "--through", "0", "--quiet")
    ended = _run("validate", *given, *stack)
    found = [json.loads(file.read_text("utf-8")) for file in sorted(exp.rglob("stage0*.json"))]
    stamps = [one["backend"] for one in found if one.get("backend")]
    assert stamps and {stamp["kind"] for stamp in stamps} == {"real"}, ended.stdout + ended.stderr
    assert "real NxDI in CPU mode" in ended.stdout
    assert stamps[0]["version"].count("+") == 2  # no commit and no version: named by what their files hold
