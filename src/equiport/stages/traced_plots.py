"""Plots of a traced run: error along the layers and along the positions, fed by the reference and free-running."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from equiport.stages.traced_run import TracedRun, View

_FLOOR = {"r_ratio": 1e-2, "r32": 1e-7}
_LIMITS = {"r_ratio": 1.2, "r32": 1e-3}
_LABELS = {"r_ratio": "R (bf16)", "r32": "R32"}
_VIEWS: tuple[tuple[View, str], ...] = (("shadow", "fed by the reference"), ("free", "on its own activations"))


def plot_traced_run(run: TracedRun, folder: Path, name: str) -> Path:
    """Six panels: R (top) and R32 (below) along the layers in either view, and along the positions in both."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # a layout engine takes longer than the traced run itself
    figure = Figure(figsize=(16, 8))
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3)
    figure.subplots_adjust(left=0.05, right=0.83, top=0.91, bottom=0.07, wspace=0.22, hspace=0.3)
    colours: dict[str, str] = {}
    for row, key in enumerate(_LABELS):
        for column, (view, title) in enumerate(_VIEWS):
            _layers(panels[row][column], run, view, key, title, colours)
        _positions(panels[row][2], run, key)
        for panel in panels[row]:
            panel.axhline(_LIMITS[key], color="grey", linestyle=":", linewidth=1)
    handles, labels = panels[0][1].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="center right", fontsize=7)
    figure.suptitle(f"traced run, {run.fixture} weights, {run.tokens}", fontsize=10)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    figure.savefig(path, dpi=90)
    return path


def _layers(panel: Any, run: TracedRun, view: View, key: str, title: str, colours: dict[str, str]) -> None:
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for item in run.rows:
        value = getattr(item, key)
        if item.view == view and item.layer is not None and value is not None:
            values[item.component][item.layer].append(max(value, _FLOOR[key]))
    for component, layers in values.items():
        colour = colours.setdefault(component, f"C{len(colours) % 10}")
        x = sorted(layers)
        y = [geometric_mean(layers[layer]) if key == "r_ratio" else max(layers[layer]) for layer in x]
        panel.plot(x, y, marker=".", linewidth=1, color=colour, label=component)
    first = run.first(view)
    if first is not None and first.layer is not None:
        panel.axvline(first.layer, color="red", linewidth=1, alpha=0.5)
    panel.set(xlabel="layer", ylabel=_LABELS[key], yscale="log", title=title)


def _positions(panel: Any, run: TracedRun, key: str) -> None:
    for curve in run.curves:
        y = [max(value, _FLOOR[key]) for value in getattr(curve, key)]
        panel.plot(curve.positions, y, marker=".", linewidth=1, label=f"{curve.view}: {curve.module}")
    panel.set(xlabel="position", ylabel=_LABELS[key], yscale="log", title="error against position")
    if run.curves:
        panel.legend(fontsize=7)
