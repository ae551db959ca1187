"""The wheel carries the content folders, and finds them where it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from worlds import EXAMPLE_PORT

from equiport.content import content_dir
from equiport.errors import EquiportError

ROOT = EXAMPLE_PORT.parents[2]


@pytest.mark.slow
def test_a_wheel_works_away_from_the_checkout(tmp_path: Path) -> None:
    isolation = ["--no-build-isolation"] if find_spec("hatchling") else []  # else pip fetches it
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", *isolation, "-q", "-w", tmp_path, ROOT],
        capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("equiport-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    for wanted in ("adapters/nxdi/adapter.py", "scripts/run_stage2.py", "scripts/tensor_compare.py",
                   "templates/report.md.j2", "benchmarks/kinds.jsonl",
                   "examples/llama/modeling_llama_nxdi.py"):  # fmt: skip
        assert f"equiport/_content/{wanted}" in names
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]
    probe = (
        "import equiport.content as c, equiport.stacks.loading as l\n"
        "print(c.content_dir('templates')); print(l.load_adapter('nxdi').check_environment().tier.value)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [str(site / "equiport" / "_content" / "templates"), "stand-in"]


def test_content_of_a_checkout() -> None:
    assert content_dir("examples") == ROOT / "examples"
    with pytest.raises(EquiportError, match="content folder 'no_such' is missing.*Reinstall"):
        content_dir("no_such")
