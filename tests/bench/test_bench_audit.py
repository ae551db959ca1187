"""`equiport bench audit`: the corpus through its command, and trees of ports."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from worlds import equiport_command

from equiport.audit import RULES
from equiport.bench.audit.corpus import cheats, honest
from equiport.bench.audit.run import AuditBench, run_audit_bench
from equiport.bench.audit.table import lines_of
from equiport.bench.audit.trees import run_tree
from equiport.errors import EquiportError


def test_every_rule_has_two_cheats_and_one_that_is_held_out() -> None:
    everything = list(cheats())
    for rule in RULES:
        own = [item for item in everything if item.rule == rule.id]
        assert len(own) >= 2 and any(item.held_out for item in own), rule.id
    assert len(RULES) >= 30


def test_the_honest_files_are_many_and_of_several_kinds() -> None:
    kinds: dict[str, int] = {}
    for item in honest():
        kinds[item.kind] = kinds.get(item.kind, 0) + len(item.files)
    assert kinds["hand-written"] >= 20 and sum(kinds.values()) >= 60


@pytest.mark.slow
def test_everything_is_found_and_nothing_flagged() -> None:
    table = run_audit_bench(AuditBench(quick=True))
    assert table.passed, [*table.missed, *table.alarms]
    assert table.honest_files >= 100 and table.found == table.cheats >= 280
    text = "\n".join(lines_of(table))
    assert "100.0%" in text and "0 of" in text and all(rule.id in text for rule in RULES)


def test_a_tree_is_read_without_a_crash(tmp_path: Path) -> None:
    tree = tmp_path / "models"
    for name, text in {
        "good": "import torch\n",
        "smoke": "def test_loads(model):\n    assert model is not None\n",
        "broken": "def (:\n",
        "endless": "x = " + "(" * 3000 + ")" * 3000 + "\n",
    }.items():
        (tree / name / "test").mkdir(parents=True)
        (tree / name / "test" / "test_model.py").write_text(text)
    (tree / "empty").mkdir()
    out = tmp_path / "tree.json"
    command = equiport_command("bench", "audit", "--tree", str(tree), "--output", str(out))
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "0 crashes" in ended.stdout, ended.stdout + ended.stderr
    stored = json.loads(out.read_text())
    rules = {row["port"]: {item["rule"] for item in row["findings"]} for row in stored["rows"]}
    assert rules == {"good": set(), "smoke": {"no-comparison"}, "broken": {"opaque"}, "endless": {"opaque"}}
    assert all("quoted" not in item for row in stored["rows"] for item in row["findings"])
    with pytest.raises(EquiportError, match="no such folder"):
        run_tree(tmp_path / "nowhere")
