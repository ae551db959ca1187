"""A tiny Llama, the example port, and one experiment validated by the real command, shared by the whole session."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

# test files run side by side: one thread each, in the commands they start too
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from worlds import EXAMPLE_PORT, TINY_LLAMA, Cli, Ran, World, equiport_command

from equiport.fixtures.weights import WeightKind
from equiport.reference.model import materialize

# files of minutes come first, so that the workers end together
_LONGEST = (
    "test_port_families.py", "test_right_from_wrong.py", "test_draft_patches.py", "test_stage7.py",
    "test_cli_validate.py", "test_whole_port.py", "test_engine_agent.py", "test_audit_dynamic.py",
    "test_skills_scenarios.py", "test_invariance.py", "test_cli_stage2_honesty.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, the others in their order."""
    places = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process: `cli("stage1", ...)` for a script, `cli("validate", ...)` for a verb."""
    monkeypatch.setattr(os, "_exit", lambda code: None)  # commands end hard where torch is loaded; SystemExit follows

    def run(command: str, *arguments: object) -> Ran:
        is_verb = command in ("audit", "inspect", "validate", "report", "doctor")
        module = import_module("equiport.cli" if is_verb else f"equiport.cli.{command}")
        words = [command, *map(str, arguments)] if is_verb else list(map(str, arguments))
        monkeypatch.setattr(sys, "argv", [f"run_{command}.py", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            module.main()
        said = capsys.readouterr()
        return Ran(int(ended.value.code or 0), said.out, said.err)

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF folder of a tiny tied Llama under which faults show."""
    root = tmp_path_factory.mktemp("tiny")
    (root / "source").mkdir()
    (root / "source" / "config.json").write_text(json.dumps(TINY_LLAMA))
    torch.set_num_threads(1)
    return materialize(root / "source", root / "model", WeightKind.PERTURBED, 3, tiny=False).folder


@pytest.fixture(scope="session")
def fresh_template(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Model and port, nothing run. Copied, never changed."""
    root = tmp_path_factory.mktemp("world") / "w"
    (root / "port").mkdir(parents=True)
    shutil.copytree(tiny_model, root / "model")
    shutil.copy(EXAMPLE_PORT, root / "port")
    return World(root)


@pytest.fixture(scope="session")
def done_template(fresh_template: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    """The same, validated once by `equiport validate`. Copied, never changed."""
    root = tmp_path_factory.mktemp("done") / "w"
    shutil.copytree(fresh_template.root, root)
    world = World(root)
    done = subprocess.run(
        equiport_command("validate", *world.validate_flags), capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (root / "validate.out").write_text(done.stdout)
    return world


@pytest.fixture
def fresh(fresh_template: World, tmp_path: Path) -> World:
    """A world of one's own in which nothing has run."""
    return _copied(fresh_template, tmp_path / "w")


@pytest.fixture
def done(done_template: World, tmp_path: Path) -> World:
    """A world of one's own with a finished, fresh experiment."""
    return _copied(done_template, tmp_path / "w")


def _copied(template: World, root: Path) -> World:
    """A copy at another place: results name their inputs by absolute paths, which move along."""
    shutil.copytree(template.root, root)
    for file in [*(root / "exp").glob("*.json"), *(root / "exp").glob("results/stage?.json")]:
        file.write_text(file.read_text().replace(str(template.root), str(root)))
    return World(root)
