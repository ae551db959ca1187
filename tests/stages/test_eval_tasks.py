"""The shipped tasks: what the seed gives, distinct, of enough items, and known to the bench config."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from equiport.content import content_dir
from equiport.stages.bench_config import SHIPPED_TASKS

SHIPPED = content_dir("benchmarks")


def test_the_script_writes_the_committed_files(tmp_path: Path) -> None:
    script = content_dir("scripts") / "build_eval_tasks.py"
    ran = subprocess.run([sys.executable, script, "--output", tmp_path, "--seed", "42"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in SHIPPED.iterdir() if path.is_file()}
    other = tmp_path / "other"
    subprocess.run([sys.executable, script, "--output", other, "--seed", "1"], check=True, capture_output=True)
    assert (other / "kinds.jsonl").read_bytes() != made["kinds.jsonl"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    script = content_dir("scripts") / "build_eval_tasks.py"
    ran = subprocess.run([sys.executable, script, "--output", tmp_path / "file"], capture_output=True, text=True)
    assert ran.returncode == 2 and len(ran.stderr.splitlines()) == 1 and "Traceback" not in ran.stderr


@pytest.mark.parametrize("name", ["agreement", "kinds"])
def test_items_are_distinct_enough_and_balanced(name: str) -> None:
    items = [json.loads(line) for line in (SHIPPED / f"{name}.jsonl").read_text().splitlines()]
    assert len(items) >= 500 and len({item["context"] for item in items}) == len(items)
    choices = {len(item["choices"]) for item in items}
    assert len(choices) == 1 and all(len(set(item["choices"])) == len(item["choices"]) for item in items)
    assert all(len(item["context"].split()) <= 12 and " " not in "".join(item["choices"]) for item in items)
    answers = Counter(item["answer"] for item in items)
    assert min(answers.values()) > 0.7 * len(items) / choices.pop()
    assert (SHIPPED / f"{name}.jsonl").stat().st_size < 100_000
    task = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text())
    assert task["task"] == f"equiport_{name}" and task["task"] in SHIPPED_TASKS
