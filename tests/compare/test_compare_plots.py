"""Plots are written for tensors of any rank, and matplotlib is not imported without need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from equiport.compare import compare_3tensors


@pytest.mark.parametrize("shape", [(), (40,), (6, 40), (2, 3, 20, 8)])
def test_plots_are_written(tmp_path: Path, shape: tuple[int, ...]) -> None:
    ref = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = compare_3tensors(ref, ref.bfloat16(), ref.bfloat16(), name="layers.0/mlp", plots_dir=tmp_path / "plots")
    assert len(found.plots) == (2 if shape else 1)
    for path in map(Path, found.plots):
        assert path.parent == tmp_path / "plots" and path.name.startswith("layers.0_mlp_")
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG") and 2_000 < len(data) < 100_000


def test_plots_of_masked_and_exact_tensors(tmp_path: Path) -> None:
    ref = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).masked_fill(torch.eye(8).bool(), -torch.inf)
    assert compare_3tensors(ref, ref.bfloat16(), ref.bfloat16(), plots_dir=tmp_path).plots
    exact = ref.bfloat16()
    assert compare_3tensors(exact.float(), exact, exact.clone(), name="exact", plots_dir=tmp_path).plots


def test_importing_the_package_imports_neither_matplotlib_nor_torch() -> None:
    probe = (
        "import sys, equiport.compare; assert 'torch' not in sys.modules\n"
        "import torch; from equiport.compare import compare_3tensors\n"
        "ref = torch.randn(4, 4); compare_3tensors(ref, ref.bfloat16(), ref.bfloat16())\n"
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)
