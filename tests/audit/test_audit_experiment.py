"""What the audit changes elsewhere: validate, the report and its verification, stage 2, units."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from worlds import Cli, World

from equiport.audit import RULES
from equiport.audit.experiment import refusals
from equiport.bench.audit.held_out import CHEATS, HONEST, PORT
from equiport.port.port_run_units import run_unit_test, write_unit
from equiport.port.translate import UnitFiles

STAGE_0 = ("--through", "0")
RULE_COUNT = f"{len(RULES) + 1} rules"


def test_a_clean_port_passes_and_a_cheating_one_does_not(fresh: World, cli: Cli) -> None:
    honest = cli("validate", *fresh.validate_flags, *STAGE_0)
    assert honest.code == 0 and f"PASS, stages 0-0; audit clean ({RULE_COUNT}); " in honest.out, honest.out
    assert "## Audit" in (fresh.exp / "EQUIVALENCE_REPORT.md").read_text() and (fresh.exp / "AUDIT.md").is_file()
    assert cli("report", fresh.exp, "--verify").code == 0

    stored = fresh.exp / "results" / "audit.json"
    whole = stored.read_text()
    stored.write_text(json.dumps({**json.loads(whole), "findings": []}))
    edited = cli("report", fresh.exp, "--verify")
    assert edited.code == 4 and "audit.json changed after the report" in edited.out and "findings differ" in edited.out
    stored.write_text(whole)
    assert cli("report", fresh.exp, "--verify").code == 0

    tests = fresh.exp / "tests"
    tests.mkdir(exist_ok=True)
    (tests / "test_99_mine.py").write_text("def test_mine():\n    assert True\n")
    stale = cli("report", fresh.exp, "--verify")
    assert stale.code == 4 and "test_99_mine.py changed" in stale.out
    cheated = cli("validate", fresh.exp)
    assert (
        cheated.code == 4
        and "Stage 0 is up to date: PASS" in cheated.out
        and "INCOMPLETE, audit found no-comparison at tests/test_99_mine.py:1" in cheated.out
    )
    assert f"audit not clean ({RULE_COUNT})" in cheated.out
    (tests / "test_99_mine.py").unlink()
    assert cli("report", fresh.exp).code == 0

    (fresh.exp / "patches").mkdir(exist_ok=True)
    patch = fresh.exp / "patches" / "fast_patch.py"
    patch.write_text("import torch\n\n\ndef apply_fast_patch():\n    torch.allclose = lambda *a, **k: True\n")
    assert cli("report", fresh.exp).code == 4
    entry = {
        "rule": "foreign-attribute",
        "file": "patches/fast_patch.py",
        "reason": "mends a fault of the library itself",
    }
    (fresh.exp / "audit_suppressions.json").write_text(json.dumps({"suppressions": [entry]}))
    let = cli("report", fresh.exp)
    assert let.code == 0 and f"audit clean ({RULE_COUNT}, 1 suppressed)" in let.out
    assert "mends a fault of the library itself" in (fresh.exp / "EQUIVALENCE_REPORT.md").read_text()
    patch.unlink()

    fresh.port.write_text(fresh.port.read_text() + "\n\ntorch.allclose = lambda *_, **__: True\n")
    port = cli("report", fresh.exp)
    assert port.code == 4 and "audit found foreign-attribute" in port.out, port.out
    assert cli("audit", fresh.port.parent).code == 1


@pytest.mark.parametrize("name", ["golden file", "verdict printed", "tolerance by star-star"])
def test_stage_2_refuses_test_files_with_errors(name: str, tmp_path: Path) -> None:
    for file, text in CHEATS[name][0].items():
        (tmp_path / file).write_text(text)
    found = refusals(tmp_path, None, tmp_path)
    assert {item.file for item in found} == {"test_block.py"}
    honest = tmp_path / "honest"
    honest.mkdir()
    for file, text in HONEST["as the guide writes it"].items():
        (honest / file).write_text(text)
    assert refusals(honest, None, tmp_path) == []


def test_stage_2_names_the_finding(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_00_x.py").write_text(
        "import torch\nfrom tensor_compare import check_3tensor_result, compare_3tensors\n\n\ndef test_x():\n"
        "    a = torch.randn(64, 64)\n    b = a.bfloat16()\n"
        "    assert check_3tensor_result(compare_3tensors(a, b, b.clone()), 'x', 1.2)\n"
    )
    (tmp_path / "tests" / "tensor_compare.py").write_text(
        (Path(__file__).parents[2] / "scripts" / "tensor_compare.py").read_text()
    )
    ran = cli("stage2", "--tests-dir", tmp_path / "tests", "--output", tmp_path / "out.json")
    assert ran.code == 1, ran.out + ran.err
    reasons = json.loads((tmp_path / "out.json").read_text())["reasons"]
    assert any(item["code"] == "AUDIT_FINDING" and item["subject"] == "test_00_x.py:8" for item in reasons)


def test_a_unit_is_audited_before_its_test_runs(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    test = f"open({str(ran)!r}, 'w')\n\n\ndef test_mlp():\n    assert True\n"
    write_unit(tmp_path, "mlp", UnitFiles(PORT, test))
    ended = run_unit_test(tmp_path, "mlp")
    assert not ended.passed and not ran.exists() and "no-comparison at mlp/test_block.py" in ended.line
    assert (tmp_path / "mlp" / "audit.json").is_file() and (tmp_path / "mlp" / "AUDIT.md").is_file()


@pytest.mark.slow
def test_a_pass_needs_wrong_ports_and_a_run_in_limited_processes(done: World, cli: Cli) -> None:
    store = done.exp / "results" / "audit_dynamic.json"
    whole = json.loads(store.read_text())
    assert set(whole["port"]["report"]["checks"]) == {"plain", "elsewhere", "poison", "isolated", "compared"}
    rows = {row["mutant"]: row for row in whole["tests"]["report"]["mutants"]}
    assert set(rows) == {"noise", "zeros", "constant", "scaled", "row"}
    assert all(row["killed"] == row["total"] > 5 for row in rows.values())
    assert "wrong ports noticed" in (done.root / "validate.out").read_text()
    assert "## What ran" in (done.exp / "AUDIT.md").read_text()

    store.write_text(json.dumps({**whole, "tests": None}))
    lacking = cli("report", done.exp)
    assert lacking.code == 4 and "wrong ports were not tried on the tests" in lacking.out, lacking.out
    finding = {"rule": "mutant-lives", "severity": "error", "file": "tests/test_00_norm.py", "line": 1, "quoted": "",
               "message": "passes with zeros", "why": "w", "remedy": "r"}  # fmt: skip
    store.write_text(json.dumps({**whole, "tests": {**whole["tests"], "findings": [finding]}}))
    found = cli("report", done.exp)
    assert found.code == 4 and "audit found mutant-lives at tests/test_00_norm.py:1" in found.out
    # the port's half alone is run again by the report itself
    store.write_text(json.dumps({**whole, "port": None}))
    mended = cli("report", done.exp)
    assert mended.code == 0 and "PASS" in mended.out, mended.out
    assert json.loads(store.read_text())["port"] is not None
