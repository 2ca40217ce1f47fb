"""Draw steps of one or more runs from their timeline.json: a lane for each role and rank, a bar for each call.

    python scripts/timeline_picture.py docs/images/placement.svg colocated=RUN_A split=RUN_B --step 3 [--steps 4]

All runs share one scale. Bars are what the workers measured themselves; waiting is white.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from html import escape
from pathlib import Path

COLOURS = {
    "generate": ("#4c78a8", "generate"),
    "compute_log_prob": ("#72b7b2", "log-probs"),
    "compute_ref_log_prob": ("#9ecae9", "reference log-probs"),
    "compute_values": ("#eeca3b", "values"),
    "update_critic": ("#f58518", "update critic"),
    "update_actor": ("#e45756", "update actor"),
    "update_weights": ("#b279a2", "hand over weights"),
    "push_weights": ("#b279a2", "hand over weights"),
    "take_weights": ("#b279a2", "hand over weights"),
}
WIDTH, LEFT, LANE, GAP = 900, 130, 24, 34


@dataclass
class Bar:
    lane: str
    name: str
    start: float
    seconds: float


def bars_of(run: Path, step: int, steps: int) -> list[Bar]:
    """What the workers did from a step on, for so many steps; times in seconds from its start."""
    events = json.loads((run / "timeline.json").read_text())
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    shown = [e for e in events if e["name"] == "step" and step <= e["args"]["step"] < step + steps]
    begin, end = min(e["ts"] for e in shown), max(e["ts"] + e["dur"] for e in shown)
    bars = []
    for e in events:
        first, last = max(begin, e.get("ts", 0)), min(end, e.get("ts", 0) + e.get("dur", 0))
        if e["name"] in COLOURS and lanes[e["tid"]] != "driver" and first < last:
            bars.append(Bar(lanes[e["tid"]], e["name"], (first - begin) / 1e6, (last - first) / 1e6))
    return bars


def draw(runs: dict[str, list[Bar]]) -> str:
    longest = max(bar.start + bar.seconds for bars in runs.values() for bar in bars)
    scale = (WIDTH - LEFT - 20) / longest
    parts, y = [], 20
    for title, bars in runs.items():
        total = max(bar.start + bar.seconds for bar in bars)
        parts.append(f'<text x="10" y="{y}" font-weight="bold">{escape(title)}: {total:.2f} s</text>')
        y += 10
        for lane in sorted({bar.lane for bar in bars}):
            parts.append(f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(lane)}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{longest * scale:.1f}" height="{LANE - 4}" fill="#f2f2f2"/>')
            for bar in (b for b in bars if b.lane == lane):
                colour, label = COLOURS[bar.name]
                parts.append(
                    f'<rect x="{LEFT + bar.start * scale:.1f}" y="{y}" width="{max(1.0, bar.seconds * scale):.1f}" '
                    f'height="{LANE - 4}" fill="{colour}"><title>{label}: {bar.seconds:.3f} s</title></rect>'
                )
            y += LANE
        y += GAP
    used = {bar.name for bars in runs.values() for bar in bars}
    x = LEFT
    for colour, label in dict.fromkeys(COLOURS[name] for name in COLOURS if name in used):
        parts.append(f'<rect x="{x}" y="{y - 12}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y - 2}">{label}</text>')
        x += 26 + round(6.2 * len(label))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 10}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y + 10}" fill="white"/>', *parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("runs", nargs="+", metavar="TITLE=RUN_DIRECTORY")
    parser.add_argument("--step", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1)
    options = parser.parse_args()
    runs = dict(run.split("=", 1) for run in options.runs)
    options.output.write_text(
        draw({title: bars_of(Path(run), options.step, options.steps) for title, run in runs.items()})
    )


if __name__ == "__main__":
    main()
