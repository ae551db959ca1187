"""`equiport bench ports`: verdict, first bad component and cause of each port of a tree."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from worlds import EXAMPLE_PORT, TINY_LLAMA, equiport_command

from equiport.bench.port_check import PortCheck
from equiport.bench.port_table import PortVerdict, checked_verdict, lines_of
from equiport.bench.ports import PortsBench, run_ports
from equiport.compare.verdict import Verdict

WRONG_EPS = ("eps=config.rms_norm_eps)", "eps=config.rms_norm_eps / 10)")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A right port, a wrong one, one that does not load, one without classes; and what their counterparts are."""
    text = EXAMPLE_PORT.read_text("utf-8")
    ports = {
        "right": text,
        "wrong": text.replace(*WRONG_EPS),
        "broken": text.replace("def init_model(self", "def init_model_not(self"),
        "nothing": "x = 1\n",
    }
    assert ports["wrong"] != text
    for name, port in ports.items():
        folder = tmp_path / "ports" / name / "src"
        folder.mkdir(parents=True)
        (folder / EXAMPLE_PORT.name).write_text(port, "utf-8")
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text(json.dumps(TINY_LLAMA))
    return tmp_path


def _bench(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(equiport_command("bench", "ports", *words), capture_output=True, text=True, check=False)


def _by_name(rows: tuple[PortVerdict, ...]) -> dict[str, PortVerdict]:
    return {row.port.split("/")[0]: row for row in rows}


def test_a_quick_table_tells_right_from_wrong(tree: Path) -> None:
    said: list[PortVerdict] = []
    bench = PortsBench(tree / "ports", {}, models=tree / "models", work=tree / "work", jobs=2, quick=True)
    table = run_ports(bench, said.append)
    rows = _by_name(table.rows)
    assert list(rows) == ["broken", "nothing", "right", "wrong"] and len(said) == 4
    assert table.tree.startswith("content ")
    right, wrong = rows["right"], rows["wrong"]
    assert (right.verdict, right.kind, right.model_type, right.tier) == ("PASS", "decoder", "llama", "stand-in")
    assert right.decode is not None and right.decode < 1e-5 and right.r32 is not None and right.r32 < 1e-3
    assert wrong.verdict == "FAIL" and wrong.proven and "norm" in wrong.component and "eps" in wrong.cause
    assert rows["broken"].verdict == "NOT RUN" and "init_model" in rows["broken"].said
    assert rows["nothing"].verdict == "NOT RUN" and "NeuronBaseForCausalLM" in rows["nothing"].said
    assert any("eps" in line for line in lines_of([wrong]))


def test_what_a_check_makes_of_a_verdict() -> None:
    row = PortVerdict(port="p/p", kind="decoder", model_type="llama", verdict="")
    right = PortCheck(tier="stand-in", decode=1e-6, prefill=1e-6)
    assert right.verdict is Verdict.PASS
    assert right.model_copy(update={"decode": 2e-5}).verdict is Verdict.FAIL
    assert right.model_copy(update={"prefill": float("nan")}).verdict is Verdict.FAIL
    assert right.model_copy(update={"prefill": None}).verdict is Verdict.FAIL
    unmapped = right.model_copy(update={"open_points": ["UNMAPPED x: no entry"]})
    assert unmapped.verdict is Verdict.INCONCLUSIVE
    nothing = checked_verdict(row, PortCheck(tier="stand-in", said="does not load"))
    assert nothing.verdict == "NOT RUN" and nothing.said == "does not load"
    lost = right.model_copy(update={"structure": ["LOAD_MISSING lm_head.weight: is not there"], "decode": None})
    told = checked_verdict(row, lost)
    assert told.verdict == "FAIL" and told.component == "LOAD_MISSING lm_head.weight"


@pytest.mark.slow
def test_the_stages_themselves_and_a_second_run(tree: Path) -> None:
    words = ["--tree", tree / "ports", "--models", tree / "models", "--ports", "[rw]*"]
    words += ["--work", tree / "work", "--output", tree / "table.json"]
    for _ in range(2):
        ended = _bench(*words)
        assert ended.returncode == 0, ended.stderr
        rows = _by_name(tuple(PortVerdict(**row) for row in json.loads((tree / "table.json").read_text())["rows"]))
        assert rows["right"].verdict == "PASS" and rows["right"].stages["5"] == "PASS", rows["right"]
        assert rows["wrong"].verdict == "FAIL" and rows["wrong"].proven and "eps" in rows["wrong"].cause


def test_bad_input(tmp_path: Path) -> None:
    assert _bench().returncode == 2
    ended = _bench("--tree", tmp_path)
    assert ended.returncode == 2 and "no port matches" in ended.stderr
