"""The commands that read runs on the terminal: `quadriga runs`, `quadriga compare A B` and `quadriga samples RUN`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quadriga.dashboard.catalog import STATES, Catalog, Run
from quadriga.errors import QuadrigaError, printable
from quadriga.tracking.figures import in_words
from quadriga.tracking.metric_names import describe, format_value
from quadriga.tracking.run_state import sparkline

_CONTROLS = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
STATE_STYLES = {"running": "green", "stalled": "yellow", "finished": "blue", "interrupted": "dim", "failed": "red"}


def list_runs(argv: Sequence[str]) -> int:
    """`quadriga runs`: one line a run, the newest first."""
    options = runs_parser().parse_args(argv)
    catalog, now = Catalog(roots_of(options)), time.time()
    runs = sorted(catalog.look(), key=lambda run: run.updated, reverse=True)
    runs = [run for run in runs if not options.state or run.state(now) == options.state]
    shown = runs if options.json else runs[: options.limit]  # the others' files need not be read
    rows = [run.row(now) | {"spark": run.spark_line()} for run in shown]
    if options.json:
        print(_json(rows, indent=1))
        return 0
    if not rows:
        raise QuadrigaError(
            f"there are no such runs in {', '.join(map(str, catalog.roots))}", "name the folder with --root"
        )
    _print_runs(rows, now, len(catalog.roots) > 1)
    if len(runs) > len(rows):
        print(f"{len(runs) - len(rows):,} more; --limit shows them")
    return 0


def compare(argv: Sequence[str]) -> int:
    """`quadriga compare A B …`: what was set differently, and what came of it."""
    options = compare_parser().parse_args(argv)
    catalog = Catalog(roots_of(options))
    runs = [catalog.find(name) for name in options.runs]
    from quadriga.dashboard.configuration import config_table
    from quadriga.dashboard.metrics import Metrics

    metrics = Metrics()
    keys = [
        key
        for key in config_table(runs)["keys"]
        if key["differs"] and not key["key"].startswith("trainer.default_local")
    ]
    figures = _last_figures(runs, metrics, options.metric)
    if options.json:
        comparison = {
            "runs": [run.name for run in runs],
            "keys": {key["key"]: key["values"] for key in keys},
            "metrics": figures,
        }
        print(_json(comparison, indent=1))
        return 0
    _print_comparison(runs, keys, figures)
    return 0


def show_samples(argv: Sequence[str]) -> int:
    """`quadriga samples RUN --step N`: what was asked and answered."""
    options = samples_parser().parse_args(argv)
    run = Catalog(roots_of(options)).find(options.run)
    from quadriga.dashboard.configuration import max_response_length
    from quadriga.dashboard.samples import Query, sample_page, sample_steps

    steps = sample_steps(run)
    kind = options.kind or ("val" if steps["val"] else "train")
    if not steps[kind]:
        raise QuadrigaError(f"{run.name} has kept no samples of {kind}", "use --kind train or --kind val")
    step = steps[kind][-1] if options.step is None else options.step
    if step not in steps[kind]:
        near = min(steps[kind], key=lambda one: abs(one - step))
        raise QuadrigaError(f"{run.name} has kept no samples of {kind} step {step}", f"the nearest is --step {near}")
    rows: list[dict[str, Any]] = []
    offset: int | None = 0
    while offset is not None and len(rows) < options.limit:
        query = Query(kind, step, offset, options.limit - len(rows), options.text, options.only or "")
        page = sample_page(run, query, max_response_length(run))
        rows += page["rows"]
        offset = page["next"]
    if options.json:
        for row in rows:
            print(_json(row))
        return 0
    _print_samples(run, kind, step, rows)
    return 0


def _json(value: Any, indent: int | None = None) -> str:
    """JSON in which no character is left that a terminal would obey."""
    return json.dumps(value, ensure_ascii=False, indent=indent).translate(_CONTROLS)


def _print_runs(rows: list[dict[str, Any]], now: float, several_roots: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("run", "kind", "state", "step", "left", "course", "", "held-out", "updated"):
        table.add_column(heading, overflow="fold", no_wrap=heading not in ("run", "state"))
    for row in rows:
        state = Text(row["state"], STATE_STYLES[row["state"]])
        if row["alarms"]:
            state.append(printable(f" ⚠ {', '.join(row['alarms'])}").replace("_", " "), "yellow")
        if row["error"]:
            state.append(f" {printable(row['error'].splitlines()[0][:60])}", "dim")
        held = ", ".join(
            f"{v['first']:.1%} → {v['last']:.1%}" if v["first_step"] != v["last_step"] else f"{v['last']:.1%}"
            for v in row["validations"].values()
        )
        table.add_row(
            Text(printable(f"{row['root']}/{row['name']}" if several_roots else row["name"]), "bold"),
            row["kind"],
            state,
            f"{row['step']:,}" + (f"/{row['total']:,.0f}" if row["total"] else ""),
            "" if row["eta_s"] is None else in_words(row["eta_s"]),
            Text(sparkline(row["spark"], 16), "green"),
            row["main"]["text"] if row["main"] else "",
            held,
            f"{in_words(max(now - row['updated'], 0))} ago",
        )
    Console(width=None if Console().is_terminal else 160).print(table)


def _last_figures(runs: list[Run], metrics: Any, wanted: list[str] | None) -> dict[str, list[float | None]]:
    """Name → the newest value in each run, of those metrics that most say how a run went, or that were asked for."""
    newest = [{metric["name"]: metric["last"] for metric in metrics.names(run)} for run in runs]
    names = list(dict.fromkeys(name for figures in newest for name in figures))
    if wanted:
        names = [name for name in names if any(part in name for part in wanted)]
    else:
        names = [n for n in names if describe(n).label or n.startswith(("val/", "train/loss", "train/accuracy"))]
    return {name: [figures.get(name) for figures in newest] for name in names}


def _print_comparison(runs: list[Run], keys: list[dict[str, Any]], figures: dict[str, list[float | None]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if Console().is_terminal else 160)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for run in runs:
        table.add_column(Text(printable(run.name)), justify="right", overflow="fold")
    now = time.time()
    table.add_row("state", *(Text(state, STATE_STYLES[state]) for state in (run.state(now) for run in runs)))
    table.add_row("step", *(f"{run.step:,}" for run in runs))
    table.add_section()
    for key in keys:
        table.add_row(
            Text(printable(key["key"]), "dim"),
            *(Text(printable(json.dumps(v, ensure_ascii=False).strip('"'))) for v in key["values"]),
        )
    table.add_section()
    for name, values in figures.items():
        table.add_row(Text(printable(name)), *("" if value is None else format_value(name, value) for value in values))
    console.print(table)


def _print_samples(run: Run, kind: str, step: int, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.text import Text

    from quadriga.tracking.before_after import shortened

    console = Console(highlight=False)
    head = f"{run.name}, {'validation' if kind == 'val' else 'training'} step {step}"
    console.print(Text(printable(head), "bold"))
    styles = {"correct": "green", "wrong": "red"}
    before = None
    for row in rows:
        if row["uid"] != before or before is None:
            before = row["uid"]
            console.print(Text(printable(f"\n{shortened(row['prompt'] or '')}"), "bold"))
            if row["ground_truth"] is not None:
                console.print(Text(printable(f"right answer {row['ground_truth']}"), "dim"))
        facts = [row["outcome"], *(["cut off"] if "cut off" in row["flags"] else [])]
        facts += [f"{name} {row[name]:.3g}" for name in ("score", "advantage") if row[name] is not None]
        console.print(Text(printable("  " + " · ".join(filter(None, facts))), styles.get(row["outcome"], "yellow")))
        for name in ("chosen", "rejected"):
            if name in row:
                reward = "" if row[name]["reward"] is None else f" (reward {row[name]['reward']:.3g})"
                console.print(Text(printable(f"    {name}{reward}: {shortened(row[name]['text'] or '')}")))
        if row["response"] is not None:
            console.print(Text(printable("    " + shortened(row["response"]).replace("\n", "\n    "))))
    if not rows:
        console.print("no sample is like that")


def roots_of(options: argparse.Namespace) -> list[Path]:
    return [Path(root).expanduser() for root in options.root or ["outputs"]]


def _parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"quadriga {command}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=description,
        epilog=f"examples:\n{examples}",
    )
    add_root(parser)
    return parser


def add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", action="append", help="folder with runs (outputs); may be given several times")


def runs_parser() -> argparse.ArgumentParser:
    parser = _parser(
        "runs", "List runs, the newest first.", "  quadriga runs\n  quadriga runs --state failed --root ~/runs"
    )
    parser.add_argument("--state", choices=STATES, help="only these")
    parser.add_argument("--limit", type=int, default=40, help="at most so many (40)")
    parser.add_argument("--json", action="store_true", help="as JSON instead of a table")
    return parser


def compare_parser() -> argparse.ArgumentParser:
    parser = _parser(
        "compare",
        "Compare runs: keys that differ, and the newest values of their metrics.",
        "  quadriga compare quickstart quickstart_2\n  quadriga compare outputs/a/b outputs/a/c --metric entropy --metric kl",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or its name below the root")
    parser.add_argument("--metric", action="append", help="metrics whose names contain this (default: the main ones)")
    parser.add_argument("--json", action="store_true", help="as JSON instead of a table")
    return parser


def samples_parser() -> argparse.ArgumentParser:
    from quadriga.dashboard.samples import FLAGS, KINDS

    parser = _parser(
        "samples",
        "Read what a run asked and answered.",
        "  quadriga samples quickstart\n  quadriga samples quickstart --kind train --step 12 --only wrong",
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run, or its name below the root")
    parser.add_argument("--step", type=int, help="of this step (default: the newest)")
    parser.add_argument("--kind", choices=KINDS, help="training or validation (default: validation where there is one)")
    parser.add_argument("--only", choices=FLAGS, help="only those that are wrong, cut off, …")
    parser.add_argument("--text", default="", help="only those that contain this text")
    parser.add_argument("--limit", type=int, default=10, help="at most so many (10)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of text")
    return parser
