"""Records are the evidence: written whatever a test does with the result, and checked when read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import equiport
from equiport.compare import (
    RECORDS_ENV,
    ComparisonError,
    Labels,
    Record,
    Thresholds,
    Verdict,
    check_3tensor_result,
    compare_3tensors,
    read_records,
)
from equiport.content import content_dir
from equiport.errors import EquiportError


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "records.jsonl"
    monkeypatch.setenv(RECORDS_ENV, str(path))
    return path


def reference() -> torch.Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(0))


def test_a_round_trip(records: Path) -> None:
    ref = reference()
    labels = Labels(component="mlp", component_type="mlp", layer=3, seed=7, fixture="stress", phase="decode")
    found = compare_3tensors(ref, ref.bfloat16(), ref.bfloat16(), name="inner", labels=labels)
    check_3tensor_result(found, "mlp", 1.3)
    check_3tensor_result(compare_3tensors(ref, ref.bfloat16(), -ref), "wrong")  # the result is ignored
    first, second = read_records(records)
    assert first.comparison == found and first.labels == labels and first.name == "mlp"
    assert first.verdict is Verdict.PASS and first.tolerance_ratio == 1.3 and first.pid == os.getpid()
    assert first.test.endswith("test_compare_records.py::test_a_round_trip")
    assert [item.code for item in first.blind_spots] == ["NO_FP32_EVIDENCE"]
    assert second.verdict is Verdict.FAIL and "R_SINGLE" in {item.code for item in second.reasons}


def test_a_record_can_be_judged_with_other_thresholds(records: Path) -> None:
    ref = reference()
    noisy = ref * (1 + 0.004 * torch.randn(32, 32, generator=torch.Generator().manual_seed(1)))
    assert check_3tensor_result(compare_3tensors(ref, ref.bfloat16(), noisy), "lenient", 1000.0)
    (record,) = read_records(records)
    assert record.verdict is Verdict.PASS and record.tolerance_ratio == 1000.0
    assert record.judged(Thresholds()).verdict is Verdict.FAIL


def test_tensors_that_do_not_fit_leave_a_failed_record(records: Path) -> None:
    with pytest.raises(ComparisonError):
        compare_3tensors(reference(), reference().bfloat16(), torch.ones(4), name="mlp", labels=Labels(component="mlp"))
    (record,) = read_records(records)
    assert record.verdict is Verdict.FAIL and record.comparison is None and record.labels.component == "mlp"
    assert [item.code for item in record.reasons] == ["SHAPE_MISMATCH"]
    assert record.judged().verdict is Verdict.FAIL


def test_without_the_variable_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RECORDS_ENV, raising=False)
    monkeypatch.chdir(tmp_path)
    ref = reference()
    assert check_3tensor_result(compare_3tensors(ref, ref.bfloat16(), ref.bfloat16()), "x")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECORDS_ENV, str(tmp_path / "missing" / "records.jsonl"))
    ref = reference()
    with pytest.raises(EquiportError, match="cannot append"):
        check_3tensor_result(compare_3tensors(ref, ref.bfloat16(), ref.bfloat16()), "x")


@pytest.mark.parametrize("damage", ["verdict", "ratio", "field", "text", "version", "no_comparison"])
def test_damaged_records_are_refused(records: Path, damage: str) -> None:
    ref = reference()
    check_3tensor_result(compare_3tensors(ref, ref.bfloat16(), 2 * ref), "wrong")
    data = json.loads(records.read_text())
    if damage == "verdict":
        data["verdict"] = "PASS"
    elif damage == "ratio":
        data["comparison"]["r_ratio"] = "large"
    elif damage == "field":
        del data["comparison"]["elements"]
    elif damage == "version":
        data["format"] = 2
    elif damage == "no_comparison":
        data["comparison"], data["verdict"] = None, "PASS"
    line = json.dumps(data)
    records.write_text("\n" + line if damage == "text" else line)
    with pytest.raises(EquiportError, match=r"records.jsonl:1"):
        read_records(records)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(EquiportError, match="cannot read"):
        read_records(tmp_path / "records.jsonl")
    (tmp_path / "records.jsonl").write_text("")
    assert read_records(tmp_path / "records.jsonl") == ()


def test_a_record_is_one_line(records: Path) -> None:
    ref = reference()
    ref[0, 0] = float("nan")
    found = compare_3tensors(ref, ref.bfloat16(), ref.bfloat16(), name="two\nlines")
    check_3tensor_result(found, "two\nlines")
    assert len(records.read_text().splitlines()) == 1
    assert isinstance(read_records(records)[0], Record)


TEST_FILE = """
import torch
from tensor_compare import check_3tensor_result, compare_3tensors

TOLERANCE_RATIO = 1.2

def outputs(factor):
    torch.manual_seed(42)
    out1 = torch.randn(2, 8, 64)
    out2 = out1.to(torch.bfloat16).float()
    return out1, out2, (out1 * factor).to(torch.bfloat16).float()

def test_right():
    result = compare_3tensors(*outputs(1.0))
    assert check_3tensor_result(result, "rmsnorm", TOLERANCE_RATIO)

def test_wrong():
    result = compare_3tensors(*outputs(1.1))
    assert check_3tensor_result(result, "rmsnorm", TOLERANCE_RATIO)

def test_ignored():
    check_3tensor_result(compare_3tensors(*outputs(1.1)), "rmsnorm", TOLERANCE_RATIO)
"""


def test_the_door_copied_into_a_tests_folder(tmp_path: Path) -> None:
    shutil.copy(content_dir("scripts") / "tensor_compare.py", tmp_path)
    (tmp_path / "test_00_rmsnorm.py").write_text(TEST_FILE)
    path = tmp_path / "records.jsonl"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_00_rmsnorm.py"],
        cwd=tmp_path,
        env={**os.environ, RECORDS_ENV: str(path), "PYTHONPATH": str(Path(equiport.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "1 failed, 2 passed" in run.stdout
    verdicts = {record.test: record.verdict for record in read_records(path)}
    assert verdicts == {
        "test_00_rmsnorm.py::test_right": Verdict.PASS,
        "test_00_rmsnorm.py::test_wrong": Verdict.FAIL,
        "test_00_rmsnorm.py::test_ignored": Verdict.FAIL,
    }
