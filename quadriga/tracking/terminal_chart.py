"""A panel of curves for a terminal, drawn with braille dots: two by four to a character."""

from __future__ import annotations

from itertools import pairwise

from rich.text import Text

from quadriga.errors import printable
from quadriga.tracking.curves import Panel, Points, ticks

_COLORS = ("bold bright_blue", "yellow", "green", "magenta", "red")
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_EMPTY = 0x2800


def draw_chart(panel: Panel, width: int = 72, height: int = 11) -> Text:
    """The panel in `width` columns, and `height` lines besides the axis and the title; the most important curve on top."""
    cells = [[_EMPTY] * width for _ in range(height)]
    colors: list[list[int | None]] = [[None] * width for _ in range(height)]
    for curve in reversed(panel.curves):
        for column, row in _dots(curve.smooth, panel, width * 2, height * 4):
            cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
            colors[row // 4][column // 2] = curve.color
    labels = _y_labels(panel, height)
    margin = max(map(len, labels.values()))
    text = _title(panel, margin)
    for row in range(height):
        text.append(f"{labels.get(row, ''):>{margin}} ", "dim").append("┤" if row in labels else "│", "dim")
        for code, color in zip(cells[row], colors[row]):
            text.append(chr(code) if code != _EMPTY else " ", "" if color is None else _COLORS[color])
        text.append("\n")
    text.append(" " * (margin + 1) + "└" + "─" * width + "\n", "dim")
    low, high = panel.x_range
    left, right = f"step {low:g}", f"step {high:g}"
    return text.append(" " * (margin + 2) + left + right.rjust(width - len(left)), "dim")


def _title(panel: Panel, margin: int) -> Text:
    text = Text(" " * (margin + 2)).append(panel.title, "bold")
    for curve in panel.curves:
        label = printable(f"━ {curve.label} {panel.format(curve.smooth[-1][1])}")
        text.append("   ").append(label, _COLORS[curve.color])
    return text.append("\n")


def _dots(points: Points, panel: Panel, columns: int, rows: int) -> set[tuple[int, int]]:
    """The dots of the polyline, counted from the top left. The ends of the y axis are the middles of the outer lines."""
    (x_low, x_high), (y_low, y_high) = panel.x_range, panel.y_range
    places = [
        ((x - x_low) / (x_high - x_low) * (columns - 1), 1.5 + (y_high - y) / (y_high - y_low) * (rows - 4))
        for x, y in points
    ]
    dots = {(round(x), round(y)) for x, y in places}
    for (x0, y0), (x1, y1) in pairwise(places):
        count = max(round(abs(x1 - x0)), round(abs(y1 - y0)), 1)
        dots |= {(round(x0 + (x1 - x0) * k / count), round(y0 + (y1 - y0) * k / count)) for k in range(count)}
    return {(x, min(max(y, 0), rows - 1)) for x, y in dots}


def _y_labels(panel: Panel, height: int) -> dict[int, str]:
    low, high = panel.y_range
    labels = {}
    for value in ticks(low, high, about=max(height // 2, 2)):
        row = round((high - value) / (high - low) * (height - 1))
        labels[row] = f"{value:.0%}" if panel.is_share else f"{value:g}"
    return labels
