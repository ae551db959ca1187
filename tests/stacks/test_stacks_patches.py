"""Monkey patches: applied to the port's classes, idempotent, refused with a remedy otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from equiport.errors import EquiportError
from equiport.stacks.loading import load_adapter
from equiport.stacks.patches import apply_patches, patch_files

PORT = "class Norm:\n    eps = 1e-6\n\n    def forward(self, x):\n        return x\n"


@pytest.fixture
def port(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A small port file under a name of its own."""
    name = "modeling_patched_" + "".join(c if c.isalnum() else "_" for c in request.node.name)
    file = tmp_path / f"{name}.py"
    file.write_text(PORT)
    (tmp_path / "patches").mkdir()
    return file


def patch(port: Path, body: str, name: str = "norm_patch.py") -> Path:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    (port.parent / "patches" / name).write_text(f"def apply_norm_patch():\n    import {port.stem} as port\n{lines}\n")
    return port.parent / "patches"


def test_a_patch_changes_the_class_and_not_the_file(port: Path) -> None:
    before = port.read_bytes()
    folder = patch(
        port, "if getattr(port.Norm, '_patched', False):\n    return\nport.Norm.eps = 1e-5\nport.Norm._patched = True"
    )
    applied = apply_patches(load_adapter("nxdi"), port, folder)
    assert [(item.file.name, item.functions, item.changed) for item in applied] == [
        ("norm_patch.py", ("apply_norm_patch",), ("Norm.eps",))
    ]
    assert load_adapter("nxdi").import_port(port).Norm.eps == 1e-5
    assert port.read_bytes() == before


def test_a_patch_without_a_guard_is_refused(port: Path) -> None:
    folder = patch(port, "old = port.Norm.forward\nport.Norm.forward = lambda self, x: old(self, x) * 2")
    with pytest.raises(EquiportError, match="not idempotent.*Norm.forward.*_patched"):
        apply_patches(load_adapter("nxdi"), port, folder)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("pass", "changes no class"),
        ("raise ValueError('broken')", "raises ValueError: broken"),
        ("port.Nothing", "Nothing"),
    ],
)
def test_a_patch_that_does_nothing_or_raises_is_refused(port: Path, body: str, words: str) -> None:
    with pytest.raises(EquiportError, match=words):
        apply_patches(load_adapter("nxdi"), port, patch(port, body))


def test_a_file_without_an_entry_point_or_a_missing_folder_is_refused(port: Path) -> None:
    (port.parent / "patches" / "fix.py").write_text("x = 1\n")
    with pytest.raises(EquiportError, match="apply_"):
        apply_patches(load_adapter("nxdi"), port, port.parent / "patches")
    with pytest.raises(EquiportError, match="no such folder"):
        apply_patches(load_adapter("nxdi"), port, port.parent / "nowhere")


def test_helpers_are_no_patches(port: Path) -> None:
    folder = patch(port, "pass")
    (folder / "_shared.py").write_text("x = 1\n")
    assert [file.name for file in patch_files(folder)] == ["norm_patch.py"]
