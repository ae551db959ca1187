"""A file is written whole or not at all."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from equiport.compare.verdict import Verdict
from equiport.errors import EquiportError, ExitCode
from equiport.experiment import StageResult, load_result
from equiport.experiment.atomic import plain, read_json, write_json, write_text
from equiport.stages.instances import InstanceRow


def test_json_goes_round(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, "ü"], "nan": float("nan"), "inf": float("-inf"), "path": tmp_path}
    write_json(tmp_path / "new" / "x.json", value)
    assert read_json(tmp_path / "new" / "x.json") == {
        "a": [1, 2.5, "ü"], "nan": "nan", "inf": "-inf", "path": str(tmp_path),
    }  # fmt: skip
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x.json"]


def test_infinite_figures_of_a_model_are_read_back_as_they_were(tmp_path: Path) -> None:
    row = InstanceRow(
        component="embed_tokens", component_type="embedding", layer=None, fixture="perturbed", phase="",
        r_ratio=None, r32=7e3, r32_slice=float("nan"), excess=float("inf"),
    )  # fmt: skip
    read = InstanceRow.model_validate(read_json(write_json(tmp_path / "x.json", {"rows": [row]}))["rows"][0])
    assert read.excess == float("inf") and read.r32_slice != read.r32_slice and read.r_ratio is None
    stored = StageResult(stage=2, verdict=Verdict.FAIL, metrics=plain(row)).save(tmp_path / "stage2.json")
    assert InstanceRow.model_validate(load_result(stored).metrics).excess == float("inf")


def test_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    file = write_text(tmp_path / "x.json", "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(EquiportError, match=r"x\.json: cannot be written: .*Free some disk space") as raised:
            write_text(file, "n" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.exit_code is ExitCode.BAD_INPUT
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("call", ["fdopen", "chmod", "replace"])
def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    file = write_text(tmp_path / "x.json", "old")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text(file, "new")
    monkeypatch.undo()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("parent", ["file", "file/deeper"])
def test_a_folder_that_cannot_be(tmp_path: Path, parent: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(EquiportError, match=r"out\.json: cannot be written"):
        write_json(tmp_path / parent / "out.json", {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"x\.json: is no JSON: .* at line 1, column 2\. Mend it"),
        (b"", r"x\.json: is no JSON"),
        (b"\xff\xfe", r"x\.json: cannot be read"),
        (None, r"x\.json: no such file\. Mend it"),
    ],
)
def test_what_is_no_json(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(EquiportError, match=message) as raised:
        read_json(tmp_path / "x.json", remedy="Mend it.")
    assert "\n" not in raised.value.line()
