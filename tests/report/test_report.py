"""The report says PASS only when everything is there, fresh, unforced and judged by the experiment's own limits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from worlds import Cli, World

from equiport.errors import ExitCode
from equiport.report import completion, verify_report, write_report

FAILED = [{"code": "COMPONENT_FAILS", "message": "R32 9", "subject": "layers.{i}.mlp"}]


def remove(world: World, stage: int) -> None:
    (world.exp / "results" / f"stage{stage}.json").unlink()


def touch(world: World, name: str) -> None:
    with (world.root / name).open("a") as stream:
        stream.write("\n")


@pytest.mark.parametrize(
    ("change", "state", "words"),
    [
        (lambda w: None, "PASS", ["PASS, stages 0-6", "on the CPU stand-in", "blind spots"]),
        *[(lambda w, n=n: remove(w, n), "INCOMPLETE", [f"stage {n} did not run"]) for n in (0, 1, 2, 5, 6)],
        (lambda w: w.edit_result(5, forced=True), "INCOMPLETE", ["stage 5 was forced"]),
        (lambda w: touch(w, "port/modeling_llama_nxdi.py"), "INCOMPLETE", ["stage 0 is stale", "modeling_llama_nxdi"]),
        (lambda w: touch(w, "exp/component_mapping.json"), "INCOMPLETE", ["stage 2 is stale", "component_mapping"]),
        (lambda w: w.edit_result(1, tool_version="0.0"), "INCOMPLETE", ["stage 1 is stale", "equiport 0.0"]),
        (lambda w: w.edit_result(5, settings={"tau_r": 50.0}), "INCOMPLETE", ["other limits", "--tau-r 50"]),
        (lambda w: w.edit_result(6, settings={"theta": 0.1}), "INCOMPLETE", ["--theta 0.1"]),
        (lambda w: w.edit_result(1, settings={"pass_threshold": 0.0}), "INCOMPLETE", ["--pass-threshold 0"]),
        (lambda w: w.edit_result(2, settings={"tau_r": 1.0}), "PASS", ["PASS"]),  # stricter is no lack
        (lambda w: w.edit_result(6, command=["x", "--thresholds", "y"]), "INCOMPLETE", ["thresholds file"]),
        (lambda w: w.edit_config(through=7), "INCOMPLETE", ["stage 7 did not run"]),
        (lambda w: w.edit_config(through=4), "PASS", ["PASS, stages 0-2;"]),
        (lambda w: w.edit_config(synthetic_weights=True), "PASS", ["synthetic weights"]),
        (lambda w: w.edit_result(2, verdict="INCONCLUSIVE"), "INCONCLUSIVE", ["stage 2 INCONCLUSIVE"]),
        (lambda w: w.edit_result(2, verdict="NOT RUN"), "INCONCLUSIVE", ["stage 2 NOT RUN"]),
        (lambda w: w.edit_result(2, verdict="FAIL", reasons=FAILED), "FAIL",
         ["FAIL at stage 2: layers.{i}.mlp: COMPONENT_FAILS"]),
        (lambda w: (w.edit_result(2, verdict="FAIL", reasons=FAILED), remove(w, 5)), "FAIL", ["FAIL at stage 2"]),
        (lambda w: (w.edit_result(1, verdict="FAIL"), w.edit_result(5, verdict="FAIL")), "FAIL", ["FAIL at stage 1;"]),
        (lambda w: w.edit_result(2, verdict="FAIL", tool_version="0.0"), "INCOMPLETE", ["stage 2 is stale"]),
        (lambda w: (w.edit_result(0, verdict="FAIL", tool_version="0.0"),
                    w.edit_result(2, verdict="FAIL", reasons=FAILED)), "FAIL", ["FAIL at stage 2"]),
    ],
)  # fmt: skip
def test_the_completion_gate(done: World, change: Callable[[World], object], state: str, words: list[str]) -> None:
    change(done)
    judged = completion(done.experiment)
    assert judged.state == state
    assert judged.headline.startswith(state)
    assert [word for word in words if word not in judged.headline] == []
    codes = {"PASS": ExitCode.PASS, "FAIL": ExitCode.FAIL, "INCONCLUSIVE": ExitCode.INCONCLUSIVE}
    assert judged.exit_code is codes.get(state, ExitCode.PREREQUISITE)
    assert bool(judged.lacks) or state != "INCOMPLETE"
    written = write_report(done.experiment)
    assert written.headline == judged.headline
    assert f"**{judged.headline}**" in written.path.read_text()


def test_an_experiment_in_which_nothing_ran(done: World, cli: Cli) -> None:
    for stage in (0, 1, 2, 5, 6):
        remove(done, stage)
    ran = cli("report", done.exp)
    assert ran.code == 4
    assert ran.out.startswith("INCOMPLETE, stage 0 did not run") and "nothing ran" in ran.out


def test_what_the_report_holds(done: World) -> None:
    text = done.experiment.report_file.read_text()
    assert text.splitlines()[2].startswith("**PASS, stages 0-6")
    for heading in ("What ran, and where", "Findings", "Structure (stage 0)", "Components (stage 2)",
                    "End to end (stages 5 and 6)", "Smoke test (stage 1)", "Audit", "Blind spots", "Plots",
                    "How to reproduce", "Hashes (sha256)"):  # fmt: skip
        assert f"## {heading}\n" in text
    assert "on the CPU stand-in" in text and "device trn" not in text
    assert "layers.{i}.self_attn" in text and "equiport report exp --verify" in text
    spots = completion(done.experiment).blind_spots
    assert spots and all(f"- {spot}" in text for spot in spots)
    for stage in (0, 1, 2, 5, 6):
        assert all(digest in text for digest in done.result(stage)["inputs"].values())


def test_the_page_is_self_contained(done: World) -> None:
    write_report(done.experiment)
    page = (done.exp / "EQUIVALENCE_REPORT.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(sources) >= 3
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "<script" not in page and "@import" not in page and "url(" not in page
    assert page.count("<table>") >= 5 and "<title>PASS, stages 0-6" in page


def test_text_from_outside_is_escaped(done: World) -> None:
    reasons = [{"code": "X", "message": "<script>alert(1)</script>", "subject": "<b>"}]
    done.edit_result(1, verdict="FAIL", reasons=reasons)
    write_report(done.experiment)
    page = (done.exp / "EQUIVALENCE_REPORT.html").read_text()
    assert "<script" not in page and "<b>" not in page


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: touch(w, "exp/EQUIVALENCE_REPORT.md"), "EQUIVALENCE_REPORT.md was edited"),
        (lambda w: touch(w, "exp/EQUIVALENCE_REPORT.html"), "EQUIVALENCE_REPORT.html was edited"),
        (lambda w: (w.exp / "EQUIVALENCE_REPORT.html").unlink(), "EQUIVALENCE_REPORT.html is gone"),
        (lambda w: touch(w, "exp/results/stage2.json"), "results/stage2.json changed"),
        (lambda w: remove(w, 6), "results/stage6.json is gone"),
        (lambda w: touch(w, "model/config.json"), "config.json changed"),
        (lambda w: touch(w, "port/modeling_llama_nxdi.py"), "modeling_llama_nxdi.py changed"),
        (lambda w: touch(w, "port/new_sibling.py"), "new_sibling.py (new) changed"),
        (lambda w: touch(w, "exp/tests/test_00_norm.py"), "tests/test_00_norm.py changed"),
        (lambda w: touch(w, "exp/component_mapping.json"), "component_mapping.json changed"),
        (lambda w: w.edit_config(through=1), "the verdict would now read: PASS, stages 0-1"),
    ],
)
def test_verify(done: World, cli: Cli, change: Callable[[World], object], words: str) -> None:
    write_report(done.experiment)
    assert cli("report", done.exp, "--verify").code == 0
    change(done)
    found = verify_report(done.experiment)
    assert any(words in problem for problem in found.problems), found.problems
    ran = cli("report", done.exp, "--verify")
    assert ran.code == 4 and "the report no longer holds" in ran.out


def test_verify_gives_the_reports_own_verdict(done: World, cli: Cli) -> None:
    done.edit_result(2, verdict="FAIL", reasons=FAILED)
    write_report(done.experiment)
    ran = cli("report", done.exp, "--verify")
    assert ran.code == 1 and "the report holds: FAIL at stage 2" in ran.out


def damage(name: str, content: str) -> Callable[[World], Path]:
    def change(world: World) -> Path:
        file = world.exp / name
        file.write_text(content)
        return file

    return change


@pytest.mark.parametrize(
    ("change", "flags", "words"),
    [
        (damage("results/stage2.json", "{"), [], ["stage2.json", "is no JSON"]),
        (damage("results/stage2.json", "{}"), [], ["stage2.json", "stage", "Run the stage again"]),
        (lambda w: w.edit_result(2, metrics={"tests": "many"}), [], ["stage2.json", "metrics.tests"]),
        (damage("results/report.json", "[]"), ["--verify"], ["report.json", "is no report stamp"]),
        (damage("results/report.json", "{"), ["--verify"], ["report.json", "is no JSON"]),
        (lambda w: (w.exp / "EQUIVALENCE_REPORT.md").unlink(), ["--verify"], ["has no report", "equiport report"]),
        (lambda w: (w.exp / "equiv_config.json").unlink(), [], ["equiv_config.json", "no such file"]),
        (lambda w: w.edit_config(thresholds="/no/t.json"), [], ["/no/t.json"]),
    ],
)
def test_bad_input(
    done: World, cli: Cli, change: Callable[[World], object], flags: list[str], words: list[str]
) -> None:
    change(done)
    assert cli("report", done.exp, *flags).is_clear_error(2, *words)


def test_no_such_experiment(cli: Cli, tmp_path: Path) -> None:
    assert cli("report", tmp_path / "no").is_clear_error(2, str(tmp_path / "no"), "no such experiment")
    assert cli("report", tmp_path).is_clear_error(2, "equiv_config.json", "no such file")
