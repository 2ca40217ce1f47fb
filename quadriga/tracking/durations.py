"""Durations for people."""

from __future__ import annotations


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
