"""`equiport bench fidelity`: the table of ports on two tiers, and whether it sees a stack that computes otherwise."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from worlds import EXAMPLE_PORT, equiport_command

from equiport.bench.fidelity import FidelityBench, apart, contributed, identity, port_files, run_fidelity
from equiport.bench.fidelity_table import Apart, FidelityRow, FidelityTable, TierEnd, lines_of, summary_lines
from equiport.content import content_dir
from equiport.errors import EquiportError

SOURCES = ("EQUIPORT_NXDI_SRC", "EQUIPORT_NXD_SRC")
MODEL = "neuronx_distributed_inference/models/_base_model.py"
real_packages = pytest.mark.skipif(
    not version("transformers").startswith("4.57."), reason="the real packages' tier needs transformers 4.57"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A port that runs, one that fails while it is made, one that calls a kernel where there is one, one without a
    counterpart, and a folder that is no port."""
    root = tmp_path / "ports"
    text = EXAMPLE_PORT.read_text("utf-8")
    for name, port in {
        "good": text,
        "broken": text.replace("def init_model(self", "def init_model_not(self"),
        "kernel": _calling_a_kernel(text),
        "nothing": "x = 1\n",
    }.items():
        folder = root / name / "src"
        folder.mkdir(parents=True)
        (folder / EXAMPLE_PORT.name).write_text(port, "utf-8")
    (root / "empty").mkdir()
    return root


def _calling_a_kernel(port: str) -> str:
    """The port with an activation by a kernel of a closed package; a plain one where that is not importable."""
    imported = "try:\n    from nkilib.core.act import silu\nexcept ImportError:\n    silu = None\n"
    changed = port.replace("\n\nclass LlamaNeuronConfig", f"\n\n{imported}\n\nclass LlamaNeuronConfig", 1)
    changed = changed.replace("ACT2FN[config.hidden_act]", "silu or ACT2FN[config.hidden_act]", 1)
    changed = changed.replace("silu or ACT2FN", "silu if silu is not None else ACT2FN", 1)
    assert changed.count("silu") == 4
    return changed


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, str]:
    """Sources that stand for the real packages: a copy of the stand-in, which a test may change."""
    copy = tmp_path / "stack"
    shutil.copytree(content_dir("adapters") / "nxdi" / "standin", copy, ignore=shutil.ignore_patterns("__pycache__"))
    return dict.fromkeys(SOURCES, str(copy))


def test_distances() -> None:
    wanted = torch.randn(3, 7, 11, generator=torch.Generator().manual_seed(0))
    assert apart(wanted.clone(), wanted) == Apart(prefill=0.0, decode=0.0)
    off = wanted.clone()
    off[:, 0] *= 1.5
    assert apart(off, wanted).prefill == apart(off, wanted).worst == pytest.approx(0.5)
    assert apart(off, wanted).decode == 0.0
    off = wanted.clone()
    off[1, 3, 2] = float("nan")
    assert apart(off, wanted) == Apart(prefill=0.0, decode=float("inf"))
    assert apart(wanted[..., :5], wanted).worst == float("inf")


def test_ports_by_name_and_pattern(tree: Path) -> None:
    assert [file.parents[1].name for file in port_files(tree)] == ["broken", "good", "kernel", "nothing"]
    assert [file.parents[1].name for file in port_files(tree, ("g*", "nothing"))] == ["good", "nothing"]
    with pytest.raises(EquiportError, match="no port is called 'better'"):
        port_files(tree, ("good", "better"))
    with pytest.raises(EquiportError, match="no port matches"):
        port_files(tree / "empty")
    (tree / "contrib" / "models").mkdir(parents=True)
    assert contributed(tree) == contributed(tree / "src") == tree / "contrib" / "models"
    with pytest.raises(EquiportError, match="--tree"):
        contributed(tree / "good" / "src")


def test_a_tree_is_named_by_its_commit_or_its_content(tree: Path) -> None:
    before = identity(tree)
    assert before.startswith("content ")
    (tree / "nothing" / "src" / EXAMPLE_PORT.name).write_text("x = 2\n")
    assert identity(tree) != before
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(tree), *command], check=True)
    asked = subprocess.run(["git", "-C", str(tree), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert identity(tree) == f"commit {asked.stdout.strip()}"
    (tree / "nothing" / "src" / EXAMPLE_PORT.name).write_text("x = 3\n")
    assert identity(tree).startswith("content ")


def test_what_counts_as_passed() -> None:
    def row(worst: float, status: str = "ran", dtype: str = "float32") -> FidelityRow:
        tiers = {tier: TierEnd(status=status, phase="making", said="why") for tier in ("stand-in", "real-cpu")}
        found = {dtype: Apart(prefill=0.0, decode=worst)} if status == "ran" else {}
        return FidelityRow(port="p", model_type="llama", tiers=tiers, apart=found)

    def table(*rows: FidelityRow) -> FidelityTable:
        more = {"tree": "t", "sources": {}, "stand_in": "s", "versions": {}, "prompts": (5,), "decode_steps": 6}
        return FidelityTable(dtypes=("float32",), rows=rows, **more)

    assert table(row(0.0), row(9e-6), row(0.0, "failed")).passed
    assert not table(row(0.0), row(2e-5)).passed
    assert not table(row(float("inf"))).passed
    assert not table(row(0.02, dtype="bfloat16")).passed and table(row(0.009, dtype="bfloat16")).passed
    assert not table(row(0.0, "failed")).passed and not table().passed
    text = "\n".join([*lines_of([row(2e-5), row(0.0, "failed")]), *summary_lines(table(row(2e-5), row(0.0, "failed")))])
    assert "2.0e-05" in text and "both tiers failed, making: why" in text
    assert "1 run on the real packages, 1 on the stand-in, 1 on both" in text and "0 of 1 within the limits" in text


def test_without_sources_the_command_says_so(tree: Path) -> None:
    command = equiport_command("bench", "fidelity", "--tree", str(tree))
    environment = {name: value for name, value in os.environ.items() if name not in SOURCES}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 2 and "--nxdi-src" in ended.stderr, ended.stderr
    half = equiport_command("bench", "fidelity", "--tree", str(tree), "--nxdi-src", str(tree))
    ended = subprocess.run(half, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 2 and "EQUIPORT_NXD_SRC" in ended.stderr, ended.stderr


@real_packages
def test_the_same_stack_twice_and_one_that_computes_otherwise(
    tree: Path, sources: dict[str, str], tmp_path: Path
) -> None:
    bench = FidelityBench(sources, tree, quick=True, work=tmp_path / "work")
    table = run_fidelity(bench)
    rows = {row.port.partition("/")[0]: row for row in table.rows}
    assert rows["good"].apart["float32"] == Apart(prefill=0.0, decode=0.0)
    assert rows["good"].source is not None and 0 < rows["good"].source.worst < 1e-5
    assert rows["nothing"].obstacle and not rows["nothing"].tiers
    for tier in ("stand-in", "real-cpu"):
        assert rows["broken"].tiers[tier].status == "failed" and "init_model" in rows["broken"].tiers[tier].said
    kernel = rows["kernel"].tiers["real-cpu"]
    assert kernel.status == "refused" and kernel.phase == "logits (float32)"
    assert "nkilib.core.act.silu was called on a tensor" in kernel.said
    assert table.passed and table.tree.startswith("content ")

    said = []
    kept = tmp_path / "work" / "good" / EXAMPLE_PORT.stem
    before = (kept / "stand-in.json").stat().st_mtime_ns
    model = Path(sources[SOURCES[0]]) / MODEL
    text = model.read_text("utf-8")
    patched = text.replace("self.lm_head(hidden_states)", "self.lm_head(hidden_states * 1.001)", 1)
    assert patched != text
    model.write_text(patched, "utf-8")
    again = run_fidelity(bench, said.append)
    assert (kept / "stand-in.json").stat().st_mtime_ns == before  # taken from the first run
    other = next(row for row in again.rows if row.port.startswith("good"))
    assert 1e-5 < other.apart["float32"].worst < 1e-1 and not other.passed and not again.passed
    assert again.sources != table.sources and tuple(said) == again.rows


@real_packages
def test_the_command_writes_its_table(tree: Path, sources: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    given = ("--nxdi-src", sources[SOURCES[0]], "--nxd-src", sources[SOURCES[1]])
    command = equiport_command(
        "bench", "fidelity", "--tree", str(tree), *given, "--ports", "[bg]*", "--output", str(out)
    )
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    stored = json.loads(out.read_text("utf-8"))
    assert stored["passed"] and stored["summary"]["compared"] == stored["summary"]["bit_equal_fp32"] == 1
    assert set(stored["rows"][1]["apart"]) == {"float32", "bfloat16"}
    assert "good/" in ended.stdout and "1 of 1 within the limits" in ended.stdout
    few = [*command[: command.index("--ports")], "--ports", "broken", "--limit", "1"]
    assert subprocess.run(few, capture_output=True, text=True, check=False).returncode == 3


@pytest.mark.skipif(not all(map(os.environ.get, SOURCES)), reason=f"{' and '.join(SOURCES)} are not set")
@real_packages
def test_contributed_ports_compute_the_same_on_both(tmp_path: Path) -> None:
    given = {name: os.environ[name] for name in SOURCES}
    ports = ("gpt2", "vaultgemma-1b", "Mixtral-8x7B-Instruct-v0.1")
    table = run_fidelity(FidelityBench(given, ports=ports, work=tmp_path))
    assert table.passed and table.summary()["compared"] == 3, "\n".join(lines_of(table.rows))
