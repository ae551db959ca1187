"""End-to-end plots: error, KL and R32 against the position."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from equiport.compare.logits import LogitComparison

_FLOOR = 1e-9


def plot_logits(paths: Mapping[str, LogitComparison], folder: Path) -> list[Path]:
    """One PNG: centred R, KL and R32 of every position of every path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3)
    panels = (
        ("r_centred", "R, centred logits", 1.2, False),
        ("kl", "KL(source‖port), nats", 0.01, True),
        ("r32", "R32", 1e-3, True),
    )
    for axis, (column, label, limit, logarithmic) in zip(axes, panels, strict=True):
        for number, (path, found) in enumerate(paths.items()):
            values = np.asarray(getattr(found.columns, column), dtype=float)
            if not values.size:
                continue
            if logarithmic:
                values = np.maximum(values, _FLOOR)
            axis.plot(
                found.columns.position, values, "o" if number else ".", markersize=4, color=f"C{number}", label=path
            )
        axis.axhline(limit, color="grey", linestyle=":", linewidth=1)
        axis.set(xlabel="position in the sequence", ylabel=label, title=f"{label} against position")
        if logarithmic:
            axis.set_yscale("log")
        axis.legend(fontsize=8)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "end_to_end_positions.png"
    figure.savefig(file, dpi=110)
    return [file]
