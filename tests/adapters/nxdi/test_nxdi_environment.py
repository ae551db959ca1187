"""Which tier is chosen, what it is called, and what is refused."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from equiport.errors import EquiportError
from equiport.stacks.contract import StackAdapter, Tier
from equiport.stacks.loading import load_adapter

NXDI, NXD = "neuronx_distributed_inference", "neuronx_distributed"


@pytest.fixture
def environment(adapter: StackAdapter, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module(f"{type(adapter).__module__.rpartition('.')[0]}.environment")
    for name in module.SOURCE_VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "_installed", lambda name: False)
    monkeypatch.setattr(module, "_version_of", lambda name: {"transformers": "4.57.6"}.get(name, "1.2.3"))
    return module


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (NXDI, NXD):
        folder = tmp_path / name.replace("_", "-") / "src" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "_version.py").write_text('__version__ = "9.8.7"\n')
    monkeypatch.setenv("EQUIPORT_NXDI_SRC", str(tmp_path / NXDI.replace("_", "-")))
    monkeypatch.setenv("EQUIPORT_NXD_SRC", str(tmp_path / NXD.replace("_", "-") / "src"))
    return tmp_path


def test_nothing_there_is_the_stand_in(environment: Any) -> None:
    found = load_adapter("nxdi").check_environment()
    assert found.tier is Tier.STAND_IN
    assert found.headline == "on the CPU stand-in"
    assert "not installed" in found.why
    assert environment.resolve_environment().paths == (environment.STAND_IN,)


def test_sources_by_root_or_src(environment: Any, sources: Path) -> None:
    adapter = load_adapter("nxdi")
    found = adapter.check_environment()
    assert found.tier is Tier.REAL_CPU
    assert found.headline == "real NxDI in CPU mode"
    first = re.fullmatch(rf"{NXDI} 9\.8\.7\+(\w{{8}}), {NXD} 9\.8\.7\+\w{{8}}", found.version)
    assert first is not None
    absent = importlib.util.find_spec("neuronxcc") is None
    assert not absent or "fabricated, as they are not installed: " in found.why
    assert adapter.source_roots() == tuple((sources / name.replace("_", "-") / "src").resolve() for name in (NXDI, NXD))


def test_sources_that_are_edited_are_other_sources(environment: Any, sources: Path) -> None:
    before = load_adapter("nxdi").check_environment().version
    environment._digest.cache_clear()
    (sources / NXD.replace("_", "-") / "src" / NXD / "__init__.py").write_text("x = 1\n")
    after = load_adapter("nxdi").check_environment().version
    assert before.split(",")[0] == after.split(",")[0] and before != after


def test_a_checkout_is_named_by_its_commit(environment: Any, sources: Path) -> None:
    root = sources / NXDI.replace("_", "-")
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    head = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert f"{NXDI} {head}" in load_adapter("nxdi").check_environment().version


def test_another_transformers(environment: Any, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_version_of", lambda name: "5.24.0")
    with pytest.raises(EquiportError, match=r"EQUIPORT_NXDI_SRC: .*needs transformers 4\.57\.\*, here is 5\.24\.0"):
        load_adapter("nxdi").check_environment()
    monkeypatch.delenv("EQUIPORT_NXDI_SRC")
    monkeypatch.delenv("EQUIPORT_NXD_SRC")
    monkeypatch.setattr(environment, "_installed", lambda name: True)
    found = load_adapter("nxdi").check_environment()
    assert found.tier is Tier.STAND_IN
    assert "needs transformers 4.57.*, here is 5.24.0" in found.why


def test_bad_source_folders(environment: Any, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPORT_NXD_SRC", str(sources / "nowhere"))
    with pytest.raises(EquiportError, match=r"nowhere: EQUIPORT_NXD_SRC: holds no neuronx_distributed\b"):
        load_adapter("nxdi").check_environment()
    monkeypatch.delenv("EQUIPORT_NXD_SRC")
    with pytest.raises(EquiportError, match="neither installed nor given.*Set EQUIPORT_NXD_SRC"):
        load_adapter("nxdi").check_environment()


def test_cpu_mode_beside_a_device_is_still_cpu_mode(
    environment: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environment, "_installed", lambda name: True)
    adapter: Any = load_adapter("nxdi")
    assert adapter.check_environment().tier is Tier.REAL_CPU
    assert adapter.check_environment(compiled=True).tier is Tier.REAL_CPU
    monkeypatch.setattr(environment, "DEVICE_NODE", tmp_path)
    assert adapter.check_environment().tier is Tier.REAL_CPU
    compiled = adapter.check_environment(compiled=True)
    assert (compiled.tier, compiled.headline) == (Tier.DEVICE, "device neuron")
