"""The dashboard as one file: the page, its scripts and styles, and the data of some runs. It opens from disk, anywhere.

The scripts become `data:` addresses of the import map; the policy in the page allows these, and no connection to anything.
"""

from __future__ import annotations

import base64
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga.atomic_file import write_atomically
from quadriga.dashboard import configuration, events, logs, samples, timeline
from quadriga.dashboard.catalog import STATES, Catalog, Run
from quadriga.dashboard.files import Unreadable
from quadriga.dashboard.metrics import X_AXES, Metrics
from quadriga.dashboard.server import STATIC, script_hashes
from quadriga.errors import QuadrigaError
from quadriga.version import __version__

MOST_RUNS = 50
POINTS = 500
"""Of a curve; more are thinned."""
STEPS_WITH_SAMPLES, SAMPLES_OF_A_STEP = 12, 64
STEPS_OF_TIMELINE = 20
STALL_CHARACTERS = 100_000
LOG_FILES = 30


@dataclass(frozen=True)
class ExportedPage:
    """What was written."""

    path: Path
    runs: int
    left_out: tuple[str, ...]
    """What was there and is not on the page, in words."""


def export_page(roots: list[Path], path: Path) -> ExportedPage:
    """Write the runs below `roots`, the newest ones where there are many, into one page.

    Raises:
        QuadrigaError: there are no runs, or the file cannot be written.
    """
    catalog, metrics, timelines = Catalog(roots), Metrics(), timeline.Timelines()
    there = sorted(catalog.look(), key=lambda run: run.updated, reverse=True)
    runs = there[:MOST_RUNS]
    if not runs:
        raise QuadrigaError(f"there are no runs in {', '.join(map(str, roots))}", "name the folder that holds them")
    now = time.time()
    rows = [run.row(now) | {"spark": run.spark_line()} for run in runs]
    held = {run.id: _run_data(run, metrics, timelines) for run in runs}
    left_out = [f"{len(runs)} newest of {len(there):,} runs"] if len(there) > len(runs) else []
    data = {
        "date": time.strftime("%Y-%m-%d %H:%M", time.localtime(now)),
        "states": STATES,
        "table": {
            "rows": rows,
            "total": len(rows),
            "all": len(rows),
            "left_out": ", ".join(left_out),
            "counts": {state: sum(row["state"] == state for row in rows) for state in STATES},
            "roots": [],
            "problems": [],
            "now": now,
            "version": __version__,
        },
        "runs": held,
        "config": configuration.config_table(runs),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, render(data).encode(errors="replace"))
    except OSError as error:
        raise QuadrigaError(f"{path} cannot be written: {error.strerror}", "choose another file") from None
    for kind in ("samples_left_out", "timeline_left_out"):
        found = [f"{run.name}: {held[run.id][kind]}" for run in runs if held[run.id][kind]]
        left_out += found[:1] + ([f"and so of {len(found) - 1} other runs"] if len(found) > 1 else [])
    return ExportedPage(path, len(runs), tuple(left_out))


def _run_data(run: Run, metrics: Metrics, timelines: timeline.Timelines) -> dict[str, Any]:
    length = configuration.max_response_length(run)
    try:
        names = metrics.names(run)
    except Unreadable:
        names = []
    known = [metric["name"] for metric in names]
    all_steps = samples.sample_steps(run)
    steps = {kind: _spread(own, STEPS_WITH_SAMPLES) for kind, own in all_steps.items()}
    pages, is_cut = {}, False
    for kind, own in steps.items():
        for step in own:
            query = samples.Query(kind, step, limit=SAMPLES_OF_A_STEP)
            try:
                page = samples.sample_page(run, query, length)
            except Unreadable:
                page = {"rows": [], "next": None}
            pages[f"{kind} {step}"] = page["rows"]
            is_cut = is_cut or page["next"] is not None
    left_out = [
        f"samples of {len(steps[kind])} of {len(own):,} {name} steps"
        for (kind, own), name in zip(all_steps.items(), ("training", "validation"))
        if len(own) > len(steps[kind])
    ]
    left_out += [f"the first {SAMPLES_OF_A_STEP} of a step"] if is_cut else []
    try:
        timeline_steps = timelines.steps(run)
    except Unreadable:
        timeline_steps = {"steps": [], "full": False}
    timed = _spread(timeline_steps["steps"], STEPS_OF_TIMELINE)
    has_all = len(timed) == len(timeline_steps["steps"])
    files = logs.log_files(run)[:LOG_FILES]
    stalls = events.stall_reports(run)
    return {
        "metrics": names,
        "series": {x: _rounded(metrics.series(run, known, x, points=POINTS)) for x in X_AXES} if names else {},
        "sample_steps": steps,
        "samples": pages,
        "samples_left_out": ", ".join(left_out),
        "timeline_steps": {**timeline_steps, "steps": timed},
        "timeline_left_out": ""
        if has_all
        else f"{len(timed)} of {len(timeline_steps['steps']):,} steps of its timeline",
        "timelines": {step: timelines.events(run, step, step) for step in timed},
        "events": {"events": events.Events().of(run, 500), "stalls": stalls},
        "stalls": {s["file"]: events.stall_text(run, s["file"])[:STALL_CHARACTERS] for s in stalls[:50]},
        "log_files": files,
        "logs": {file["file"]: logs.log_page(run, file["file"]) for file in files},
    }


def render(data: dict[str, Any]) -> str:
    """The page with everything in it."""
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    modules = {f"dash/{file.name}": file for file in sorted((STATIC / "js").glob("*.js"))}
    modules["uplot"] = STATIC / "vendor" / "uplot" / "uPlot.esm.js"
    imports = {name: _data_address("text/javascript", file.read_bytes()) for name, file in modules.items()}
    page = re.sub(
        r'(<script type="importmap">).*?(</script>)',
        lambda match: f"{match[1]}{json.dumps({'imports': imports})}{match[2]}",
        page,
        flags=re.DOTALL,
    )
    page = re.sub(
        r'<script type="module" src="[^"]*main.js"></script>',
        lambda match: '<script type="module">import "dash/main.js";</script>',
        page,
    )
    for sheet in re.findall(r'<link rel="stylesheet" href="static/([^"]+)">', page):
        style = (STATIC / sheet).read_text(encoding="utf-8")
        page = page.replace(f'<link rel="stylesheet" href="static/{sheet}">', f"<style>\n{style}</style>")
    icon = _data_address("image/svg+xml", (STATIC / "icon.svg").read_bytes())
    page = page.replace("static/icon.svg", icon)
    licence = (STATIC / "vendor" / "uplot" / "LICENSE").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src data: {' '.join(script_hashes(page))}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    # In a script element, "</script" and "<!--" are the only texts that mean anything: no "<" is left in the data.
    held = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return page.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<!-- Made by quadriga {__version__}. Charts by uPlot:\n{licence}-->",
    ).replace("</body>", f'<script type="application/json" id="exported">{held}</script>\n</body>')


def _data_address(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _spread(values: list[int], most: int) -> list[int]:
    """The first, the last, and others evenly between."""
    if len(values) <= most:
        return values
    return [values[k * (len(values) - 1) // (most - 1)] for k in range(most)]


def _rounded(series: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, list[float]]]:
    """Seven digits are more than a picture shows, and half the size."""
    return {n: {k: [float(f"{v:.7g}") for v in values] for k, values in s.items()} for n, s in series.items()}
