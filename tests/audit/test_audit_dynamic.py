"""What the audit finds when it runs a unit's test: in limited processes, with wrong ports and other conditions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from worlds import Cli

from equiport.audit import audit_path
from equiport.audit.dynamic.launch import DynamicOptions, add_dynamic
from equiport.audit.report import AuditReport, load_report
from equiport.audit.work import python_files

#: A port of a two-layer perceptron on plain torch, and its source: the stack costs seconds that say nothing here.
SOURCE = """
import torch
from torch import nn


class SourceMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(24, 40, bias=False)
        self.down = nn.Linear(40, 24, bias=False)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x)))
"""
BLOCK = """
import torch
from torch import nn


class PortMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(24, 40, bias=False)
        self.down_proj = nn.Linear(40, 24, bias=False)

    def forward(self, x):
        inner = self.up_proj(x)
        return self.down_proj(inner * torch.sigmoid(inner))
"""
_HEAD = """
import torch
import block_testing_utils
import nxdi_block
from source_mlp import SourceMLP

"""
_CALL = """
def test_mlp():
    block_testing_utils.test_block_correctness(
        {port}, SourceMLP, {{"up_proj.weight": "up.weight", "down_proj.weight": "down.weight"}},
        test_inputs=[torch.randn(2, 16, 24, generator=torch.Generator().manual_seed(1))],
    )
"""
TEST = _HEAD + _CALL.format(port="nxdi_block.PortMLP")
FORWARD = "        inner = self.up_proj(x)\n        return self.down_proj(inner * torch.sigmoid(inner))\n"
ALL = DynamicOptions(seconds=240.0, job_seconds=100.0, most_bugs=2)
#: What the cheats below need; the rest is tried on the honest unit.
SOME = DynamicOptions(
    seconds=240.0, job_seconds=60.0, most_bugs=0,
    jobs=("scaled", "poison", "seed-1", "seed-2", "shape-batch"),
)  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside of the audited one that holds the source's class."""
    folder = tmp_path_factory.mktemp("original")
    (folder / "source_mlp.py").write_text(SOURCE)
    return folder


def write(folder: Path, block: str = BLOCK, test: str = TEST) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nxdi_block.py").write_text(block)
    (folder / "test_block.py").write_text(test)
    return folder


def ran(folder: Path, source: Path, options: DynamicOptions = SOME) -> AuditReport:
    """The audit of a folder of units, its findings those of the dynamic half alone."""
    static = audit_path(folder).model_copy(update={"findings": []})
    return add_dynamic(static, python_files(folder), folder, options, extra=[source])


def rules_of(report: AuditReport, unit: str = "") -> set[str]:
    return {item.rule for item in report.counting if item.file.startswith(unit)}


def test_an_honest_unit_is_clean_and_its_test_notices_every_wrong_port(tmp_path: Path, source: Path) -> None:
    # what the port's file says when it is imported shows that this process never imports it
    write(tmp_path, f"import os\n\nassert os.getpid() != {os.getpid()}\n" + BLOCK)
    found = ran(tmp_path, source, ALL)
    assert found.clean and "nxdi_block" not in sys.modules and "source_mlp" not in sys.modules, found.counting
    (run,) = found.dynamic
    assert run.tests == run.subjects == 1 and not run.left_out and run.network
    rows = {row.mutant: (row.killed, row.total) for row in run.mutants}
    basic = ("noise", "zeros", "constant", "scaled", "row")
    assert {name: rows[name] for name in basic} == dict.fromkeys(basic, (1, 1))
    assert any(name.startswith("bug:") for name in rows) and run.killed == run.total
    assert {"control", "probe", "poison", "seed-1", "shape-batch", "shape-length"} <= set(run.checks)


SOFT = """
def test_mlp():
    x = torch.randn(2, 16, 24)
    port, source = nxdi_block.PortMLP(), SourceMLP()
    out = port(x)
    assert out.shape == source(x).shape
"""
ITSELF = """
def test_mlp():
    from equiport.compare import check_3tensor_result, compare_3tensors
    x = torch.randn(2, 16, 24)
    port = nxdi_block.PortMLP()
    first = port(x)
    low = port.bfloat16()
    assert check_3tensor_result(compare_3tensors(first, first + 1e-3 * torch.randn_like(first), port.float()(x)), "m")
"""
CHEATS: dict[str, tuple[str, str, str]] = {
    # block's forward, test's body, the rule that must speak
    "shapes alone": (FORWARD, SOFT, "mutant-lives"),
    "port against itself": (FORWARD, ITSELF, "mutant-lives"),
    "counts its calls": (
        "        self.calls = getattr(self, 'calls', 0) + 1\n        inner = self.up_proj(x)\n"
        "        out = self.down_proj(inner * torch.sigmoid(inner))\n"
        "        return out if self.calls < 2 else out * 3\n",
        "", "not-deterministic",
    ),
    "draws": (
        "        inner = self.up_proj(x)\n        out = self.down_proj(inner * torch.sigmoid(inner))\n"
        "        return out * (1 + 1e-2 * (torch.rand(1) - torch.rand(1)))\n",
        "", "not-deterministic",
    ),
    "changes its input": (
        "        x = x.to(x.dtype)\n        inner = self.up_proj(x)\n"
        "        out = self.down_proj(inner * torch.sigmoid(inner))\n        x.data[:] = 0\n        return out\n",
        "", "input-changed",
    ),
    "knows one shape": (
        "        inner = self.up_proj(x)\n        out = self.down_proj(inner * torch.sigmoid(inner))\n"
        "        return out if x.numel() == 768 else out * 0.9\n",
        "", "shape-bound",
    ),
    "knows one input": (
        "        inner = self.up_proj(x)\n        out = self.down_proj(inner * torch.sigmoid(inner))\n"
        "        return out if abs(float(x.float().flatten()[0]) - FIRST) < 0.01 else out * 0.9\n",
        "", "seed-bound",
    ),
    "reads fresh memory": (
        "        inner = self.up_proj(x)\n        rest = torch.empty(1, dtype=x.dtype)\n"
        "        return self.down_proj(inner * torch.sigmoid(inner)) + (rest.isnan().to(x.dtype))\n",
        "", "reads-uninitialised",
    ),
    "replaces the comparator": (
        FORWARD + "\n\nimport equiport.compare.gates_components as _g\n\n_old = _g.component_gate\n",
        "\n\ndef test_other():\n    import equiport.compare.gates as g\n    g.judge = lambda *a, **k: None\n",
        "comparator-changed",
    ),
    "never runs the port": (FORWARD, "\ndef test_mlp():\n    assert SourceMLP()(torch.ones(1, 24)).shape == (1, 24)\n",
                            "port-not-run"),
    "does not pass": (FORWARD, "\ndef test_mlp():\n    raise RuntimeError('needs a device')\n", "test-not-run"),
}  # fmt: skip


REFERENCE = (
    "import torch\nfrom torch import nn\nfrom transformers import LlamaConfig\n"
    "from transformers.models.llama import modeling_llama as m\n\n"
    "CONFIG = LlamaConfig(hidden_size=24, intermediate_size=40, num_attention_heads=4)\n\n\n"
    "class PortMLP(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.inner = m.LlamaMLP(CONFIG)\n\n    def forward(self, x):\n        return self.inner(x)\n"
)
REFERENCE_TEST = """
import block_testing_utils
import nxdi_block
from transformers.models.llama.modeling_llama import LlamaMLP


def test_mlp():
    names = ("gate_proj", "up_proj", "down_proj")
    block_testing_utils.test_block_correctness(
        nxdi_block.PortMLP, LlamaMLP, {f"inner.{n}.weight": f"{n}.weight" for n in names},
        pytorch_init_kwargs={"config": nxdi_block.CONFIG}, hidden_size=24,
    )
"""
LEAVING = {
    "network": "import socket; socket.create_connection(('192.0.2.1', 80), timeout=2)",
    "program": "import subprocess; subprocess.run(['true'])",
    "writing": "open('/var/tmp/audit-escape', 'w')",
    "memory": "import torch; torch.zeros(40_000_000_000)",
}


@pytest.fixture(scope="module")
def cheated(tmp_path_factory: pytest.TempPathFactory, source: Path) -> AuditReport:
    """All cheats, a unit each, in one limited process after the other."""
    root = tmp_path_factory.mktemp("cheats")
    first = float(torch.randn(2, 16, 24, generator=torch.Generator().manual_seed(1)).flatten()[0])
    for name, (forward, body, _) in CHEATS.items():
        block = BLOCK.replace(FORWARD, forward) + f"\n\nFIRST = {first}\n"
        test = TEST + body if body.lstrip().startswith("def test_other") else _HEAD + body if body else TEST
        write(root / name.replace(" ", "_"), block, test)
    write(root / "reference", REFERENCE, REFERENCE_TEST)
    leaving = "".join(f"\n\ndef test_{name}():\n    {line}\n" for name, line in LEAVING.items())
    write(root / "leaving", test=_HEAD + leaving + _CALL.format(port="nxdi_block.PortMLP"))
    return ran(root, source)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEATS)
def test_what_only_shows_when_it_runs_is_found(name: str, cheated: AuditReport) -> None:
    folder, rule = name.replace(" ", "_") + "/", CHEATS[name][2]
    said = [(item.rule, item.message) for item in cheated.findings if item.file.startswith(folder)]
    assert rule in rules_of(cheated, folder), said


@pytest.mark.slow
def test_a_port_that_runs_the_reference_is_blocked(cheated: AuditReport) -> None:
    said = [item.message for item in cheated.counting if item.rule == "runs-reference"]
    assert said and "LlamaMLP.forward" in said[0], cheated.counting


@pytest.mark.slow
def test_the_process_is_limited(cheated: AuditReport) -> None:
    mine = [item for item in cheated.counting if item.file.startswith("leaving")]
    said = {item.quoted.partition("test_")[2].rstrip("():"): item.message for item in mine}
    assert set(LEAVING) <= set(said), mine
    assert "no other programs" in said["program"] and "no writing outside" in said["writing"]
    assert not Path("/var/tmp/audit-escape").exists()


def test_an_endless_test_ends(tmp_path: Path) -> None:
    write(tmp_path, test="def test_x():\n    while True:\n        pass\n")
    found = ran(tmp_path, tmp_path, DynamicOptions(seconds=6.0, job_seconds=3.0))
    assert "test-not-run" in rules_of(found) and "timeout" in str(found.counting)


def test_the_command_adds_it_and_says_what_ran(tmp_path: Path, cli: Cli) -> None:
    write(tmp_path, test=_HEAD + "\ndef test_mlp():\n    assert nxdi_block.PortMLP()(torch.ones(1, 24)).shape\n")
    static = cli("audit", tmp_path, "--static-only")
    assert static.code == 1 and "test-not-run" not in static.out
    assert "nothing was run" in (tmp_path / "AUDIT.md").read_text()
    both = cli("audit", tmp_path, "--dynamic", "--seconds", "200")
    page = (tmp_path / "AUDIT.md").read_text()
    # the source's file is not where this process could import it from
    assert both.code == 1 and "test-not-run" in both.out and "source_mlp" in both.out
    assert "## What ran" in page and "Network: " in page and "mutant-lives" in page
    assert load_report(tmp_path / "audit.json").dynamic
    explained = cli("audit", "--explain", "mutant-lives")
    assert explained.code == 0 and "why:" in explained.out


def test_a_namespace_of_its_own_has_no_way_out() -> None:
    code = (
        "from equiport.audit.dynamic.sandbox import cut_network, refuse\nimport socket\nfrom pathlib import Path\n"
        "print(cut_network())\nrefuse([Path('/nowhere')])\n"
        "try:\n    socket.create_connection(('192.0.2.1', 80), timeout=2)\n"
        "except OSError as e:\n    print(type(e).__name__)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines()[0] in ("a namespace of its own", "refused in Python")
    assert ended.stdout.splitlines()[1] == "PermissionError"
