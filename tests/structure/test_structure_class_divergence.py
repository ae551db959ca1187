"""Every way in which a port may pick another class on the CPU than on the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from worlds import EXAMPLE_PORT, World

from equiport.errors import EquiportError
from equiport.structure.class_divergence import detect_class_divergence

CASES = {
    "ternary": ("norm = HfNorm if cpu_mode() else KernelNorm\n", "ternary", "HfNorm", "KernelNorm"),
    "negated ternary": ("norm = KernelNorm if not cpu_mode() else HfNorm\n", "ternary", "HfNorm", "KernelNorm"),
    "ternary call": (
        "class M:\n    def __init__(self):\n        self.n = (HfNorm if cpu_mode() else KernelNorm)(4)\n",
        "ternary", "HfNorm", "KernelNorm",
    ),
    "early return": (
        "def get():\n    if cpu_mode():\n        return HfNorm\n    return KernelNorm\n",
        "factory", "HfNorm", "KernelNorm",
    ),
    "early return negated": (
        "def get():\n    if not cpu_mode():\n        return KernelNorm(3)\n    return HfNorm(3)\n",
        "factory", "HfNorm", "KernelNorm",
    ),
    "returned ternary": ("def get():\n    return A if cpu_mode() else B\n", "factory", "A", "B"),
    "if else": ("if cpu_mode():\n    N = A\nelse:\n    N = B\n", "if", "A", "B"),
    "overwritten": ("N = A\nif not cpu_mode():\n    N = B\n", "if", "(nothing)", "B"),
    "conditional import": (
        "if cpu_mode():\n    from a import Plain as N\nelse:\n    from b import Fast as N\n",
        "conditional import", "Plain", "Fast",
    ),
    "by environment": ('import os\nN = A if os.environ.get("NXD_CPU_MODE") else B\n', "ternary", "A", "B"),
    "by config": ("def f(config):\n    return A if config.neuron_config.on_cpu else B\n", "factory", "A", "B"),
    "kernel import": (
        "from neuronxcc.nki.kernels import flash\n", "kernel import", "(plain PyTorch path)",
        "neuronxcc.nki.kernels: flash",
    ),
    "plain kernel import": ("import nki.language as nl\n", "kernel import", "(plain PyTorch path)",
                            "nki.language: nki.language"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_branch_is_found(tmp_path: Path, name: str) -> None:
    text, kind, cpu, device = CASES[name]
    (tmp_path / "port.py").write_text(text)
    found = detect_class_divergence(tmp_path / "port.py")
    assert [(item.kind, item.cpu_class, item.device_class) for item in found] == [(kind, cpu, device)]
    assert found[0].file == "port.py" and found[0].line >= 1 and "second test" in found[0].recommendation


def test_behind_an_import(tmp_path: Path) -> None:
    (tmp_path / "port.py").write_text("from layers import make\nfrom stack.blocks import Block\nN = make()\n")
    (tmp_path / "layers.py").write_text(
        "from deeper import pick\n\ndef make():\n    return A if cpu_mode() else B\n\ndef unused():\n"
        "    return C if cpu_mode() else D\n"
    )
    root = tmp_path / "root" / "stack"
    root.mkdir(parents=True)
    (root / "blocks.py").write_text("class Block:\n    def __init__(self):\n        self.n = E if cpu_mode() else F\n")
    found = detect_class_divergence(tmp_path / "port.py", [tmp_path / "root"])
    assert {(item.file, item.where, item.device_class) for item in found} == {
        ("layers.py", "make", "B"), ("blocks.py", "Block.__init__", "F"),
    }  # fmt: skip
    assert len(detect_class_divergence(tmp_path / "port.py")) == 1  # without the root


def test_files_that_import_one_another(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from b import g\n\ndef f():\n    return A if cpu_mode() else B\n")
    (tmp_path / "b.py").write_text("from a import f\n\ndef g():\n    return C if cpu_mode() else D\n")
    assert {item.device_class for item in detect_class_divergence(tmp_path / "a.py")} == {"B", "D"}


@pytest.mark.parametrize(
    "text", ["N = A if fast else B\n", "if debug:\n    N = A\nelse:\n    N = B\n", "import torch\n"]
)
def test_other_branches_are_none_of_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "port.py").write_text(text)
    assert detect_class_divergence(tmp_path / "port.py") == ()


def test_unreadable(tmp_path: Path) -> None:
    (tmp_path / "port.py").write_text("def f(:\n")
    with pytest.raises(EquiportError, match=r"port\.py: does not parse: .*line 1"):
        detect_class_divergence(tmp_path / "port.py")
    with pytest.raises(EquiportError, match=r"no\.py: cannot be read"):
        detect_class_divergence(tmp_path / "no.py")


def test_the_example_port_and_its_report(done: World) -> None:
    found = detect_class_divergence(EXAMPLE_PORT)
    assert [(item.where, item.cpu_class, item.device_class) for item in found] == [
        ("make_rmsnorm", "LlamaRMSNorm", "CustomRMSNorm")
    ]
    report = json.loads((done.exp / "class_divergence_report.json").read_text())
    assert report[0]["device_class"] == "CustomRMSNorm"
    assert any("make_rmsnorm" in spot for spot in done.result(0)["blind_spots"])
