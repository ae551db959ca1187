"""`equiport bench families`: what it reports is what ran; a wrong port fails; exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from equiport.bench.commands import given_sources
from equiport.bench.families import FamiliesTable, FamilyRow, TierRow, lines_of
from equiport.bench.family_models import FAMILIES, VARIANTS, family_names
from equiport.cli import app
from equiport.errors import EquiportError


def test_a_quick_run_and_a_port_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os._exit", lambda code: None)
    for name in ("EQUIPORT_NXDI_SRC", "EQUIPORT_NXD_SRC"):
        monkeypatch.delenv(name, raising=False)
    work, output = tmp_path / "work", tmp_path / "table.json"
    call = ["bench", "families", "--quick", "--family", "qwen3", "--work", str(work), "--output", str(output)]
    ended = CliRunner().invoke(app, call)
    assert ended.exit_code == 0, ended.output
    row = json.loads(output.read_text())["rows"][0]
    assert row["family"] == "qwen3" and row["tiers"][0]["tier"] == "stand-in"
    assert 0 < row["tiers"][0]["r32"] < 1e-3 and 0.9 < row["tiers"][0]["r"] < 1.3
    assert "1 of 1 pass" in ended.output
    port = next((work / "qwen3" / "src").glob("*.py"))
    port.write_text(port.read_text().replace("base=config.rope_theta", "base=1.1 * config.rope_theta"))
    ended = CliRunner().invoke(app, call)
    assert ended.exit_code == 1 and "0 of 1 pass; not: qwen3" in ended.output
    assert "FAIL" in json.loads(output.read_text())["rows"][0]["tiers"][0]["verdict"]


def test_a_table_passes_only_when_every_tier_does_and_they_agree() -> None:
    good = TierRow(tier="stand-in", verdict="PASS", seconds=1.0, r32=1e-4, r=1.0, r_logits=1.0)
    bad = good.model_copy(update={"verdict": "INCONCLUSIVE", "said": "why"})
    rows = [FamilyRow(family="a", tiers=(good, good), logits_apart=0.0)]
    assert FamiliesTable(quick=False, versions={}, rows=tuple(rows)).passed
    for wrong in (
        FamilyRow(family="b", tiers=(good, bad)),
        FamilyRow(family="c", tiers=()),
        FamilyRow(family="d", tiers=(good, good), logits_apart=1e-3),
    ):
        assert not FamiliesTable(quick=False, versions={}, rows=(*rows, wrong)).passed
    assert not FamiliesTable(quick=False, versions={}).passed
    assert lines_of([FamilyRow(family="b", tiers=(good, bad))])[2].endswith("INCONCLUSIVE  why")


def test_names() -> None:
    assert family_names("stablelm") == ("stablelm", "stablelm parallel, head norms")
    assert family_names("llama yarn", variants=False) == ("llama yarn",)
    assert set(family_names()) == set(FAMILIES) and not set(family_names(variants=False)) & set(VARIANTS)


def test_sources_come_in_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EQUIPORT_NXDI_SRC", "EQUIPORT_NXD_SRC"):
        monkeypatch.delenv(name, raising=False)
    assert given_sources(None, None) == {}
    with pytest.raises(EquiportError, match="EQUIPORT_NXD_SRC: one of the two sources is missing"):
        given_sources(tmp_path, None)
    with pytest.raises(EquiportError, match="EQUIPORT_NXD_SRC: no such folder"):
        given_sources(tmp_path, tmp_path / "nowhere")
