"""The same panels as a PNG picture, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from quadriga.tracking.curves import Panel, ticks
from quadriga.tracking.svg_plot import COLORS, HEIGHT, WIDTH


def write_png(path: Path, panels: list[Panel], title: str, subtitle: str = "") -> bool:
    """Write the picture; False, and nothing written, without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=200, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, max(len(panels), 1), squeeze=False)[0]
    figure.text(0.025, 0.915, title, fontsize=13.5, fontweight="bold", color="#202124")
    figure.text(0.025, 0.855, subtitle, fontsize=9, color="#5f6368")
    figure.subplots_adjust(left=0.06, right=0.885, top=0.74, bottom=0.15, wspace=0.5)
    for axis, panel in zip(axes, panels):
        axis.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", color="#202124")
        axis.set_xlim(*panel.x_range)
        axis.set_ylim(*panel.y_range)
        axis.set_xlabel("step", fontsize=9, color="#5f6368")
        axis.grid(axis="y", color="#e8eaed", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(colors="#5f6368", labelsize=8.5, length=3, left=False)
        axis.set_xticks(ticks(*panel.x_range, about=6, smallest=1))
        axis.set_yticks(ticks(*panel.y_range, about=5))
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.spines["bottom"].set_color("#9aa0a6")
        if panel.is_share:
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        _draw_curves(axis, panel)
    figure.savefig(path)
    return True


def _draw_curves(axis: Any, panel: Panel) -> None:
    for curve in reversed(panel.curves):
        color, smooth = COLORS[curve.color], curve.smooth
        if smooth != curve.points:
            axis.plot(*zip(*curve.points), color=color, linewidth=0.7, alpha=0.3)
        marker = {"marker": "o", "markersize": 5, "markeredgecolor": "white"} if curve.is_sparse else {}
        axis.plot(*zip(*smooth), color=color, linewidth=1.7, solid_capstyle="round", clip_on=False, **marker)
    low, high = panel.y_range
    place = float("inf")
    for end, i in sorted(((curve.smooth[-1][1], i) for i, curve in enumerate(panel.curves)), reverse=True):
        curve = panel.curves[i]
        place = min((end - low) / (high - low), place - 0.13)  # labels from the top down, none on another
        label = f"{curve.label}\n{panel.format(end)}"
        look = {"va": "center", "fontsize": 8.5, "color": COLORS[curve.color], "annotation_clip": False}
        axis.annotate(label, (1.03, place), xycoords="axes fraction", **look)
