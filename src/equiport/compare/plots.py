"""Pictures of one comparison: error histograms, QQ plot, error against position, slice heatmap.

A healthy port's errors follow the 45-degree line of the QQ plot. matplotlib is imported on first use.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equiport.compare.comparison import Comparison
from equiport.compare.measure import Measured, walk
from equiport.errors import EquiportError

#: Elements that histograms and the QQ plot look at, spread evenly over the tensor.
SAMPLE = 200_000
_GRID = 64
_DPI = 80
_BLUE, _ORANGE, _GREY = "#1f77b4", "#d95f02", "#777777"

_Array = npt.NDArray[np.float64]


def plot_comparison(measured: Measured, comparison: Comparison, folder: Path) -> tuple[Path, ...]:
    """Write the comparison's PNGs into `folder` (made when missing) and return their paths.

    Raises:
        EquiportError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise EquiportError("matplotlib is missing", field="plots_dir", remedy="pip install matplotlib")
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", comparison.name) or "comparison"
    target, base = _sampled_errors(measured)
    figure, left, right = _panels(comparison)
    _histogram(left, target, base)
    _quantiles(right, target, base)
    paths = [folder / f"{stem}_errors.png"]
    figure.savefig(paths[0], dpi=_DPI)
    if measured.slices.axes:
        figure, left, right = _panels(comparison)
        _along_axis(left, measured)
        _heatmap(right, figure, measured)
        paths.append(folder / f"{stem}_slices.png")
        figure.savefig(paths[1], dpi=_DPI)
    return tuple(paths)


def _panels(comparison: Comparison) -> tuple[Any, Any, Any]:
    """A figure of two panels. Its margins are fixed: a layout that is solved for takes as long as the drawing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2))
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.075, right=0.97, bottom=0.12, top=0.83, wspace=0.2)
    figure.suptitle(_title(comparison), fontsize=11)
    return figure, left, right


def _title(c: Comparison) -> str:
    figures = f"R = {c.r_ratio:.3g}" if c.mode == "ratio" else "exact baseline"
    fp32 = f", R32 = {c.r32:.2g}" if c.r32 is not None else ""
    return f"{c.name or 'comparison'}: {figures}{fp32}, {c.elements} elements, baseline {c.baseline}"


def _sampled_errors(measured: Measured) -> tuple[_Array, _Array]:
    stride = max(1, measured.sources.ref.numel() // SAMPLE)
    target: list[Tensor] = []
    base: list[Tensor] = []
    skip = 0
    for block in walk(measured.sources, measured.chunk):
        error, gap = (block.target - block.ref).flatten(), (block.bases[0] - block.ref).flatten()
        if block.aside is not None:
            kept = ~block.aside.flatten()
            error, gap = error[kept], gap[kept]
        target.append(error[skip::stride].clone())
        base.append(gap[skip::stride].clone())
        skip = (skip - error.numel()) % stride
    return torch.cat(target).numpy(), torch.cat(base).numpy()


def _histogram(axes: Any, target: _Array, base: _Array) -> None:
    # The common bulk sets the range: one outlier must not squeeze both curves into one bin.
    edge = max(float(np.quantile(np.abs(np.concatenate([target, base])), 0.999)), 1e-300)
    bins = np.linspace(-edge, edge, 81)
    axes.hist(base.clip(-edge, edge), bins, histtype="stepfilled", color=_BLUE, alpha=0.55, label="ref_bf16 − ref_fp32")
    axes.hist(target.clip(-edge, edge), bins, color=_ORANGE, histtype="step", linewidth=1.6, label="target − ref_fp32")
    axes.set(xlabel="error (ends hold everything beyond)", ylabel="elements", title="Error distributions")
    axes.ticklabel_format(axis="x", scilimits=(-2, 3))
    axes.legend(fontsize=8)


def _quantiles(axes: Any, target: _Array, base: _Array) -> None:
    shares = np.linspace(0.0, 1.0, min(len(target), 400))
    x, y = np.quantile(base, shares), np.quantile(target, shares)
    edge = max(float(np.abs(np.concatenate([x, y])).max()), 1e-300) * 1.05
    axes.plot([-edge, edge], [-edge, edge], color=_GREY, linestyle="--", linewidth=1, label="45°: same distribution")
    axes.plot(x, y, color=_ORANGE, marker=".", markersize=4, linewidth=0, label="quantiles")
    axes.set(
        xlim=(-edge, edge),
        ylim=(-edge, edge),
        xlabel="quantile of ref_bf16 − ref_fp32",
        ylabel="quantile of target − ref_fp32",
        title="QQ plot",
    )
    axes.ticklabel_format(scilimits=(-2, 3))
    axes.legend(fontsize=8, loc="upper left")


def _along_axis(axes: Any, measured: Measured) -> None:
    # Positions are the last axis but one of [.., positions, channels]; a vector has one axis only.
    tables = measured.slices.axes
    wanted = max(measured.sources.ref.dim() - 2, 0)
    table = min(tables, key=lambda item: (abs(item.axis - wanted), item.axis))
    counts = table.counts.clamp(min=1.0)
    x = np.arange(len(counts)) * table.group
    marker = "." if len(x) <= 200 else ""
    for name, colour, label in (("base", _BLUE, "ref_bf16"), ("err", _ORANGE, "target")):
        axes.plot(x, (table.sums[name] / counts).sqrt().numpy(), color=colour, marker=marker, linewidth=1, label=label)
    axes.set(xlabel=f"index on axis {table.axis}", ylabel="RMS error", title="Error against position")
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", scilimits=(-2, 3))
    axes.legend(fontsize=8)


def _heatmap(axes: Any, figure: Any, measured: Measured) -> None:
    shape = tuple(measured.sources.ref.shape)
    long = [axis for axis in range(len(shape)) if shape[axis] > 1]
    if len(long) < 2:
        axes.text(0.5, 0.5, "one axis only", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    rows, columns = long[-2:]
    grid = _grid(measured, rows, columns)
    high, wide = grid.shape
    image = axes.imshow(
        grid.numpy(), aspect="auto", origin="lower", cmap="magma", extent=(0, shape[columns], 0, shape[rows])
    )
    axes.set(xlabel=f"axis {columns}", ylabel=f"axis {rows}", title=f"RMS error of the target, {high}×{wide} cells")
    figure.colorbar(image, ax=axes, format="%.1e")


def _grid(measured: Measured, rows: int, columns: int) -> Tensor:
    shape = measured.sources.ref.shape
    high, wide = min(shape[rows], _GRID), min(shape[columns], _GRID)
    sums = torch.zeros(high, wide, dtype=torch.float64)
    counts = torch.zeros(high, wide, dtype=torch.float64)
    for block in walk(measured.sources, measured.chunk):
        others = tuple(axis for axis in range(len(shape)) if axis not in (rows, columns))
        square = (block.target - block.ref).square()
        flat = square.sum(dim=others) if others else square
        per_cell = square.numel() // flat.numel()
        row = torch.arange(block.index[rows].start, block.index[rows].stop) * high // shape[rows]
        column = torch.arange(block.index[columns].start, block.index[columns].stop) * wide // shape[columns]
        cells = (row[:, None] * wide + column[None, :]).flatten()
        sums.view(-1).index_add_(0, cells, flat.flatten())
        counts.view(-1).index_add_(0, cells, torch.full((cells.numel(),), float(per_cell), dtype=torch.float64))
    return (sums / counts.clamp(min=1.0)).sqrt()
