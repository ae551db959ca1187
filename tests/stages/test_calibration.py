"""run_calibration: limits come from data, are refused from unproven results, and change verdicts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from worlds import Cli, World

from equiport.cli.calibration import repeated
from equiport.compare.calibration import LOWEST_R, Calibration, calibrate, quantile
from equiport.compare.thresholds import Thresholds, load_thresholds
from equiport.compare.verdict import Verdict
from equiport.errors import EquiportError
from equiport.stages.component_evidence import collect_evidence
from equiport.stages.component_rows import component_rows

COMPONENT_TEST = """
import torch
from equiport.compare.comparison import Labels
from equiport.compare.threeway import compare_3tensors
from equiport.stages.component_check import check_components


def test_it():
    comparisons = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ref = torch.randn(64, 64, generator=generator)
        noise = torch.randn(64, 64, generator=generator), torch.randn(64, 64, generator=generator)
        baseline, target = (ref + 0.02 * noise[0]).bfloat16(), (ref + 0.02 * SIZE * noise[1])
        labels = Labels(component="model.mlp.down_proj", component_type="linear", layer=0, seed=seed, fixture="f")
        target_fp32 = ref + 1e-7 * noise[1]
        comparisons.append(compare_3tensors(ref, baseline, target, target_fp32=target_fp32, name="x", labels=labels))
    assert check_components(comparisons, "model.mlp.down_proj")
"""


@pytest.fixture
def outputs(done: World) -> list[str]:
    """The flags that name a good port's results."""
    results = done.exp / "results"
    return ["--stage2-outputs", str(results / "stage2.json"), "--teacher-forced-outputs",
            str(results / "teacher_forced.json")]  # fmt: skip


def test_limits_come_from_the_results_and_are_shown_beside_the_shipped_ones(
    done: World, outputs: list[str], cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "thresholds.json"
    before = {path: path.read_bytes() for path in (done.exp / "results").glob("*.json")}
    ran = cli("calibration", *outputs, "--output", file)
    assert ran.code == 0, ran.err
    limits = load_thresholds(file)
    rows = done.result(2)["metrics"]["rows"]
    kinds = {row["component_type"] for row in rows if row["r_geomean"] is not None}
    assert set(limits.tau_r_by_type) == kinds and limits.calibrated
    for kind in kinds:
        most = max(row["r_geomean"] for row in rows if row["component_type"] == kind and row["r_geomean"] is not None)
        assert limits.tau_r_by_type[kind] == pytest.approx(max(LOWEST_R, 1.1 * most), abs=1e-4)
    decode = json.loads((done.exp / "results" / "teacher_forced.json").read_text())["paths"]["decode"]
    assert limits.delta == pytest.approx(1.1 * quantile(decode["columns"]["kl"], 0.95))
    assert limits.tau_r == pytest.approx(max(LOWEST_R, 1.1 * decode["r_centred"]), abs=1e-4)
    assert limits.theta < decode["cosine_centred"]["p5"] < 1
    lines = ran.out.splitlines()
    assert sum("shipped" in line and "calibrated" in line for line in lines) == len(kinds) + 3
    assert all("LOOSER" in line or "tighter" in line or "unchanged" in line for line in lines if "shipped 1.1" in line)
    wide = cli("calibration", *outputs, "--output", file, "--safety-margin", 3, "--r-quantile", 0.5, "--quiet")
    assert wide.code == 0 and "LOOSER" in wide.out and load_thresholds(file).tau_r > limits.tau_r
    assert {path: path.read_bytes() for path in before} == before  # nothing of the experiment was touched


def test_calibrated_limits_change_the_verdict_of_stage_6(done: World, cli: Cli, tmp_path: Path) -> None:
    file = done.exp / "results" / "teacher_forced.json"
    worst = max(json.loads(file.read_text())["paths"]["decode"]["columns"]["kl"])
    for delta, code in ((worst * 2, 0), (worst / 1e6, 1)):
        Thresholds(delta=delta, calibrated=True).save(tmp_path / "t.json")
        ran = cli("stage6", "--teacher-forced", file, "--thresholds", tmp_path / "t.json")
        assert ran.code == code, ran.out


@pytest.mark.parametrize(
    ("size", "limit", "shipped", "calibrated"),
    [(1.3, 1.45, Verdict.FAIL, Verdict.PASS), (1.0, 0.9, Verdict.PASS, Verdict.FAIL)],
)
def test_limits_of_a_component_type_loosen_and_tighten_component_tests(
    tmp_path: Path, size: float, limit: float, shipped: Verdict, calibrated: Verdict
) -> None:
    file = tmp_path / "test_01_down_proj.py"
    file.write_text(COMPONENT_TEST.replace("SIZE", str(size)))
    limits = Thresholds(tau_r_by_type={"linear": limit})
    limits.save(tmp_path / "t.json")
    for thresholds, given, wanted in ((Thresholds(), None, shipped), (limits, tmp_path / "t.json", calibrated)):
        (evidence,) = collect_evidence([file], 100, tmp_path / "logs", given)
        (row,) = component_rows([evidence], thresholds)
        assert row.verdict is wanted
        # the test itself judged alike
        assert {reason.code for reason in evidence.reasons} == (set() if wanted is Verdict.PASS else {"TEST_FAILED"})


def test_what_is_not_proven_is_refused(done: World, outputs: list[str], cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    results = done.exp / "results"

    def refused(*words: str) -> bool:
        ran = cli("calibration", *outputs, "--output", file)
        return ran.is_clear_error(2, *words) and not file.exists()

    kept = (results / "stage2.json").read_text()
    done.edit_result(2, verdict="INCONCLUSIVE")
    assert refused("stage2.json", "is INCONCLUSIVE", "no known-good port")
    (results / "stage2.json").write_text(kept)
    done.edit_result(2, forced=True)
    assert refused("stage2.json", "was forced")
    (results / "stage2.json").write_text(kept[:-40])
    assert refused("stage2.json", "is no JSON")
    (results / "stage2.json").write_text(json.dumps({"stage": 2}))
    assert refused("stage2.json", "verdict")
    (results / "stage2.json").write_text(kept)
    done.edit_result(6, verdict="FAIL")
    assert refused("stage6.json", "is FAIL")
    done.edit_result(6, verdict="PASS")
    forced = results / "teacher_forced.json"
    text = forced.read_text()
    forced.write_text(text + "\n")
    assert refused("stale", "teacher_forced.json")
    forced.write_text("{}")
    assert refused("teacher_forced.json", "is damaged", "num_tokens")
    forced.write_text(text)
    done.port.write_text(done.port.read_text() + "\n")
    assert refused("stage2.json", "is stale", "modeling_llama_nxdi.py")


def test_bad_flags_are_refused(outputs: list[str], cli: Cli, tmp_path: Path) -> None:
    twice = ["--stage2-outputs", outputs[1], outputs[1], *outputs[2:]]
    assert cli("calibration", *twice, "--output", tmp_path / "t.json").is_clear_error(2, "is given twice")
    swapped = ["--stage2-outputs", str(Path(outputs[1]).with_name("stage1.json"))]
    assert cli("calibration", *swapped, "--output", tmp_path / "t.json").is_clear_error(2, "stage 1, not 2")


def test_several_files_after_one_flag() -> None:
    given = ["--stage2-outputs", "a", "b", "--output", "o", "--teacher-forced-outputs", "c", "d", "--quiet"]
    assert repeated(given) == [
        "--stage2-outputs", "a", "--stage2-outputs", "b", "--output", "o",
        "--teacher-forced-outputs", "c", "--teacher-forced-outputs", "d", "--quiet",
    ]  # fmt: skip


def test_nothing_and_nan_calibrate_nothing() -> None:
    with pytest.raises(EquiportError, match="no figure"):
        calibrate({"norm": []}, [], Calibration())
    with pytest.raises(EquiportError, match="NaN"):
        calibrate({"norm": [1.0, float("nan")]}, [], Calibration())
    limits, changes = calibrate({"norm": [0.5], "mlp": [1.3]}, [], Calibration())
    assert limits.tau_r_by_type == {"norm": LOWEST_R, "mlp": pytest.approx(1.43)}
    assert [change.looser for change in changes] == [True, False]
    assert limits.calibrated is False and limits.tau_r == Thresholds().tau_r


def test_the_shipped_limits_are_those_of_the_page() -> None:
    """What the calibration loosens does not ship."""
    page, shipped = (Path(__file__).parents[2] / "docs" / "calibration.md").read_text("utf-8"), Thresholds()
    rows = re.findall(r"^\| (\w+) \| \d+ \| ([\d.]+) \| ([\d.]+) \|", page, re.MULTILINE)
    assert len(rows) > 10
    for kind, calibrated, limit in rows:
        assert float(limit) == shipped.component_limit(kind) == min(float(calibrated), shipped.r_geomean), kind
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0 and quantile(list(range(1, 201)), 0.95) == 190


def test_an_experiment_stands_for_its_results(done: World, outputs: list[str], cli: Cli, tmp_path: Path) -> None:
    named, whole = tmp_path / "named.json", tmp_path / "whole.json"
    assert cli("calibration", *outputs, "--output", named).code == 0
    assert cli("calibration", "--exp-dir", done.exp, "--output", whole).code == 0
    assert whole.read_text() == named.read_text()


@pytest.mark.parametrize("flag", [["--force"], ["--seed", "7"]])
def test_flags_without_sense_are_refused_by_name(flag: list[str], outputs: list[str], cli: Cli, tmp_path: Path) -> None:
    refused = cli("calibration", *outputs, *flag, "--output", tmp_path / "limits.json")
    assert refused.is_clear_error(2, flag[0]) and not (tmp_path / "limits.json").exists()


def test_calibration_of_nothing_is_refused(cli: Cli, tmp_path: Path) -> None:
    assert cli("calibration", "--output", tmp_path / "limits.json").is_clear_error(2, "--stage2-outputs")
