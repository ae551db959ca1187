"""Make the port with its weights for a stage, and turn what goes wrong inside it into reasons."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from equiport.compare.verdict import Reason
from equiport.stacks.contract import LoadReport, StackAdapter
from equiport.stacks.port_classes import PortClasses

_FINDINGS = (
    ("LOAD_MISSING", "missing", "is filled by no tensor of the checkpoint and keeps its random initial value"),
    ("LOAD_UNEXPECTED", "unexpected", "leaves the conversion and has no place in the port"),
    ("LOAD_MIS_SHAPED", "mis_shaped", "has another shape in the port than the conversion gives it"),
)


def make_port(
    adapter: StackAdapter,
    classes: PortClasses,
    weights: Path,
    dtype: torch.dtype,
    *,
    batch_size: int,
    seq_len: int,
    tp_degree: int = 1,
) -> tuple[nn.Module, LoadReport]:
    """The port's causal-LM with weights, and what the strict load found.

    Raises:
        EquiportError: the port does not import or instantiate, or the weights cannot be read.
    """
    adapter.init_distributed(tp_degree)
    model = adapter.create_model(
        classes.modeling_file,
        classes.causal,
        classes.config,
        weights,
        dtype=dtype,
        batch_size=batch_size,
        seq_len=seq_len,
        tp_degree=tp_degree,
    )
    return model, adapter.load_weights(model, weights, dtype)


def load_reasons(report: LoadReport) -> list[Reason]:
    """A reason for every finding of a strict load."""
    found = [Reason("LOAD_NAMES", text, "weight conversion") for text in report.faults]
    return found + [Reason(code, text, key) for code, field, text in _FINDINGS for key in getattr(report, field)]


def port_fault(error: BaseException, owned: Sequence[Path]) -> Reason | None:
    """The error as a fault of the port, if it was raised in one of the `owned` files or below a call from them."""
    frames = traceback.extract_tb(error.__traceback__)
    roots = [path.resolve() for path in owned]
    for frame in reversed(frames):
        file = Path(frame.filename).resolve()
        if any(file == root or root in file.parents for root in roots):
            text = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            place = f"{file.name}:{frame.lineno} ({frame.name})"
            return Reason("PORT_RAISES", f"{type(error).__name__}: {text}", place)
    return None
