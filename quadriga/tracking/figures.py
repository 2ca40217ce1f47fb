"""Figures: metrics as plain finite numbers, which every sink and every JSON reader can take, and durations for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def plain_metrics(metrics: Mapping[str, Any]) -> tuple[dict[str, float | None], dict[str, str]]:
    """Metrics as ints and finite floats, and what was wrong with the others, which become None.

    Numbers of numpy and tensors of one element are accepted.

    Returns:
        `(values, problems)`; `problems` maps a name to what it held instead of a finite number, e.g. "nan".
    """
    values: dict[str, float | None] = {}
    problems: dict[str, str] = {}
    for name, value in metrics.items():
        number = _number(value)
        if number is None or not math.isfinite(number):
            problems[name] = _short(value) if number is None else str(number)
            number = None
        values[name] = number
    return values, problems


def _number(value: Any) -> float | None:
    if not isinstance(value, (bool, int, float)) and hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError, TypeError):  # more than one element
            return None
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, int):
        return value if abs(value) < 2**63 else float("inf")
    return value if isinstance(value, float) else None


def _short(value: Any) -> str:
    text = f"a {type(value).__name__}, {value!r}".replace("\n", " ")
    return text if len(text) <= 80 else f"{text[:79]}…"


def clock(seconds: float) -> str:
    """`0:42`, `1:07:42`: for what changes while one looks at it."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def in_words(seconds: float) -> str:
    """`0.42 s`, `42 s`, `1 min 31 s`, `3 h 07 min`, `12 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
