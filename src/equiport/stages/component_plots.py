"""R and R32 of every component along the layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

from equiport.compare.comparison import Comparison

_FLOOR = 1e-7


def plot_r_per_layer(comparisons: Sequence[Comparison], folder: Path) -> Path:
    """Two panels: geometric mean of R, and worst R32, of each component at each layer (real weights if there are)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    real = [item for item in comparisons if item.labels.fixture == "real"] or list(comparisons)
    curves: dict[str, dict[int, list[Comparison]]] = defaultdict(lambda: defaultdict(list))
    for item in real:
        if item.labels.layer is not None and item.mode == "ratio":
            curves[item.labels.component][item.labels.layer].append(item)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for number, (component, layers) in enumerate(curves.items()):
        x = sorted(layers)
        style = {"linewidth": 1, "marker": ".", "markersize": 4, "color": f"C{number % 10}", "label": component}
        style["linestyle"] = "-" if number < 10 else "--"
        left.plot(x, [geometric_mean(max(item.r_ratio, 1e-3) for item in layers[layer]) for layer in x], **style)
        right.plot(x, [max(_FLOOR, *(item.r32 or 0.0 for item in layers[layer])) for layer in x], **style)
    left.axhline(1.2, color="grey", linestyle=":", linewidth=1)
    left.set(xlabel="layer", ylabel="R (bf16), mean over seeds and phases", title="R per layer (documented limit 1.2)")
    right.axhline(1e-3, color="grey", linestyle=":", linewidth=1)
    right.set(
        xlabel="layer", ylabel="worst R32", yscale="log", title=f"R32 per layer (limit 1e-3, drawn from {_FLOOR:g})"
    )
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", fontsize=7)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "r_per_layer.png"
    figure.savefig(path, dpi=110)
    return path
