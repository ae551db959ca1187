"""Runs the contract cases on one tier, in a process of its own, and compares two tiers' answers."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
STANDIN = ROOT / "adapters" / "nxdi" / "standin"
SOURCES = ("EQUIPORT_NXDI_SRC", "EQUIPORT_NXD_SRC")


@dataclass(frozen=True)
class Answer:
    """What one case returned on one tier: its values by name, or the failure of the whole case."""

    values: dict[str, Any]
    failure: str = ""


@dataclass(frozen=True)
class Figure:
    """One value of one case on both tiers: relative L2 of tensors, 0 or infinity for anything else."""

    case: str
    value: str
    difference: float
    note: str = ""


def why_no_real_tier() -> str:
    """Empty when the real stack can run here; else one line that says what is absent."""
    absent = [name for name in SOURCES if not os.environ.get(name)]
    if absent:
        return f"the real side is skipped: {' and '.join(absent)} not set"
    if not version("transformers").startswith("4.57."):
        return f"the real side is skipped: it needs transformers 4.57, {version('transformers')} is installed"
    return ""


def put_on_path(tier: str) -> None:
    """Make the stack of `tier` importable in this process."""
    sys.path.insert(0, str(ROOT / "src"))
    if tier == "standin":
        sys.path.insert(0, str(STANDIN))
        return
    folder = ROOT / "adapters" / "nxdi" / "fabricated"
    spec = importlib.util.spec_from_file_location("fabricated", folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["fabricated"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install()
    sys.path[:0] = [os.environ[name] for name in SOURCES]


@functools.cache
def answers(tier: str) -> dict[str, Answer]:
    """Every case's answer on `tier`, from one run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answers.pt"
        command = [sys.executable, str(HERE / "runner.py"), "--tier", tier, "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode or not out.is_file():
            raise RuntimeError(f"the {tier} runner failed:\n{done.stderr[-3000:]}")
        raw = torch.load(out, weights_only=False)
    return {name: Answer(values, failure) for name, (values, failure) in raw.items()}


def relative_l2(value: Tensor, reference: Tensor) -> float:
    """|value - reference| / |reference| in float64; infinity for another shape, dtype or a NaN on one side."""
    if value.shape != reference.shape or value.dtype != reference.dtype:
        return float("inf")
    a, b = value.detach().double(), reference.detach().double()
    if torch.equal(a.isnan(), b.isnan()):
        a, b = a.nan_to_num(), b.nan_to_num()
    size, off = b.norm().item(), (a - b).norm().item()
    if off == 0:
        return 0.0
    return off / size if size else float("inf")


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values inside dicts, lists and tuples, by path."""
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        items = [("type", type(value).__name__), *enumerate(value)]
    else:
        yield name, value
        return
    for key, item in items:
        yield from _leaves(f"{name}/{key}" if name else str(key), item)


def figures(case: str) -> list[Figure]:
    """Stand-in against real, for every value of `case`."""
    ours, real = answers("standin")[case], answers("real")[case]
    if ours.failure or real.failure:
        return [Figure(case, "(all)", float("inf"), f"standin {ours.failure or 'ran'} | real {real.failure or 'ran'}")]
    out = []
    ours_flat, real_flat = dict(_leaves("", ours.values)), dict(_leaves("", real.values))
    for name in sorted(ours_flat.keys() | real_flat.keys()):
        a, b = ours_flat.get(name), real_flat.get(name)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            out.append(Figure(case, name, relative_l2(a, b)))
        else:
            same = type(a) is type(b) and a == b
            out.append(Figure(case, name, 0.0 if same else float("inf"), "" if same else f"standin {a!r} | real {b!r}"))
    return out
