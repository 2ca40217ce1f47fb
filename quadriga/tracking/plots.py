"""Panels of curves as one self-contained SVG picture: no script, no font, no library. It follows a dark colour scheme."""

from __future__ import annotations

import importlib.util
from html import escape
from pathlib import Path
from typing import Any

from quadriga.tracking.curves import Curve, Panel, Points, ticks

WIDTH, HEIGHT = 980, 410
_TOP, _BOTTOM, _LEFT, _RIGHT = 116, 56, 70, 100
_GAP = 4
_LABEL_DISTANCE = 32
COLORS = ("#2563eb", "#e8710a", "#0f9d58", "#a142f4", "#d93025")
_DARK_COLORS = ("#7aa7ff", "#ffa04d", "#57d08c", "#c792ff", "#ff7b72")

_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #5f6368 }
.title { font-size: 19px; font-weight: 600; fill: #202124 }
.panel { font-size: 14px; font-weight: 600; fill: #202124 }
.value { font-weight: 600 }
.background { fill: #ffffff }
.grid { stroke: #e8eaed; stroke-width: 1 }
.axis { stroke: #9aa0a6; stroke-width: 1 }
.line { fill: none; stroke-width: 2.4; stroke-linejoin: round; stroke-linecap: round }
.raw { fill: none; stroke-width: 1; opacity: 0.28; stroke-linejoin: round }
.dot { stroke: #ffffff; stroke-width: 1.5 }
"""


def render_svg(panels: list[Panel], title: str, subtitle: str = "") -> str:
    """The picture: panels side by side, each curve with its name and last value at its end."""
    width = (WIDTH - _GAP * (len(panels) - 1)) / max(len(panels), 1)
    drawn = [_draw_panel(panel, i * (width + _GAP), width) for i, panel in enumerate(panels)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            f'role="img" aria-label="{escape(title)}">',
            f"<style>{_STYLE}{_color_rules()}</style>",
            f'<rect class="background" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
            f'<text class="title" x="24" y="38">{escape(title)}</text>',
            f'<text x="24" y="61">{escape(subtitle)}</text>',
            *drawn,
            "</svg>\n",
        ]
    )


def _color_rules() -> str:
    rules = [f".c{i} {{ stroke: {color} }} .f{i} {{ fill: {color} }}" for i, color in enumerate(COLORS)]
    dark = [f".c{i} {{ stroke: {color} }} .f{i} {{ fill: {color} }}" for i, color in enumerate(_DARK_COLORS)]
    dark += [
        "text { fill: #9aa0a6 }",
        ".title, .panel { fill: #e8eaed }",
        ".background { fill: #17181c }",
        ".grid { stroke: #2d2f34 }",
        ".axis { stroke: #5f6368 }",
        ".dot { stroke: #17181c }",
    ]
    return "\n".join(rules) + "\n@media (prefers-color-scheme: dark) {\n" + "\n".join(dark) + "\n}\n"


class _Scale:
    """From values to places on the picture."""

    def __init__(self, panel: Panel, left: float, width: float) -> None:
        self.left, self.right = left + _LEFT, left + width - _RIGHT
        self.top, self.bottom = float(_TOP), float(HEIGHT - _BOTTOM)
        self.x_range, self.y_range = panel.x_range, panel.y_range

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def path(self, points: Points) -> str:
        return "M" + "L".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def _draw_panel(panel: Panel, left: float, width: float) -> str:
    scale = _Scale(panel, left, width)
    parts = [f'<text class="panel" x="{scale.left:.1f}" y="{_TOP - 14}">{escape(panel.title)}</text>']
    for value in ticks(*panel.y_range, about=5):
        y = scale.y(value)
        label = f"{value:.0%}" if panel.is_share else f"{value:g}"
        parts.append(f'<path class="grid" d="M{scale.left:.1f},{y:.1f}H{scale.right:.1f}"/>')
        parts.append(f'<text x="{scale.left - 8:.1f}" y="{y + 4.5:.1f}" text-anchor="end">{label}</text>')
    parts.append(f'<path class="axis" d="M{scale.left:.1f},{scale.bottom:.1f}H{scale.right:.1f}"/>')
    for value in ticks(*panel.x_range, about=6, smallest=1):
        x = scale.x(value)
        parts.append(f'<path class="axis" d="M{x:.1f},{scale.bottom:.1f}v5"/>')
        parts.append(f'<text x="{x:.1f}" y="{scale.bottom + 20:.1f}" text-anchor="middle">{value:g}</text>')
    middle = (scale.left + scale.right) / 2
    parts.append(f'<text x="{middle:.1f}" y="{scale.bottom + 40:.1f}" text-anchor="middle">step</text>')
    for curve in reversed(panel.curves):  # the first is the most important: on top
        parts += _draw_curve(panel, curve, scale)
    parts += _draw_labels(panel, scale)
    return "\n".join(parts)


def _draw_curve(panel: Panel, curve: Curve, scale: _Scale) -> list[str]:
    smooth, color = curve.smooth, curve.color
    parts = []
    if smooth != curve.points:
        parts.append(f'<path class="raw c{color}" d="{scale.path(curve.points)}"/>')
    parts.append(f'<path class="line c{color}" d="{scale.path(smooth)}"/>')
    if curve.is_sparse:
        for x, y in curve.points:
            tip = f"<title>step {x:g}: {panel.format(y)}</title>"
            parts.append(
                f'<circle class="dot f{color}" cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="4.5">{tip}</circle>'
            )
    return parts


def _draw_labels(panel: Panel, scale: _Scale) -> list[str]:
    """Name and last value beside each curve's end, moved apart where they would touch."""
    ends = sorted((scale.y(curve.smooth[-1][1]), i) for i, curve in enumerate(panel.curves))
    places: list[float] = []
    for y, _ in ends:
        places.append(max(y, places[-1] + _LABEL_DISTANCE) if places else max(y, scale.top + 4))
    overflow = max(places[-1] + 14 - scale.bottom, 0.0) if places else 0.0
    parts = []
    for (_, i), place in zip(ends, places):
        curve = panel.curves[i]
        x, y = scale.right + 12, place - overflow
        parts.append(f'<text class="value f{curve.color}" x="{x:.1f}" y="{y:.1f}">{escape(curve.label)}</text>')
        value = panel.format(curve.smooth[-1][1])
        parts.append(f'<text class="f{curve.color}" x="{x:.1f}" y="{y + 15:.1f}">{value}</text>')
    return parts


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
