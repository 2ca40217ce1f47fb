"""The commands that meet a live run from another terminal: `quadriga watch RUN`, and `quadriga tell RUN …`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

from quadriga.commands.runs import add_root, roots_of
from quadriga.dashboard.catalog import RUN_KINDS, Catalog, Run
from quadriga.dashboard.configuration import schema_of
from quadriga.dashboard.files import Unreadable, open_inside, parse_line, read_lines
from quadriga.errors import QuadrigaError

POLL_S = 0.5
OBEYED_WITHIN_S = 600.0


def watch(argv: Sequence[str]) -> int:
    """`quadriga watch RUN`: the live panel of a run that was started elsewhere, until it ends."""
    options = watch_parser().parse_args(argv)
    run = Catalog(roots_of(options)).find(options.run)
    from quadriga.tracking.console import LiveView

    follower = Follower(run)
    with LiveView() as view:
        while True:
            state = run.state(time.time())
            view.update(follower.news())
            if state not in ("running", "stalled"):
                break
            time.sleep(POLL_S)
            run.refresh()
    print(f"{run.name} {state} at step {run.step}" + (f": {run.status['error']}" if run.status.get("error") else ""))
    return 0 if state == "finished" else 1


class Follower:
    """Turns what a run writes into the events that its own console would see."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._offsets = {"metrics.jsonl": 0, "events.jsonl": 0}
        self._status: dict[str, Any] = {}
        self._start: tuple[Any, ...] = ()

    def news(self) -> list[dict[str, Any]]:
        """Events since the last call, in order of time."""
        status, events = self._run.status, []
        start = tuple(status.get(name) for name in ("pid", "start_step", "total_steps"))
        if start != self._start and (status.get("total_steps") is not None or status.get("state") != "running"):
            self._start = start  # it has begun, or was resumed by another process
            names = ("project", "experiment", "total_steps")
            known = {name: status[name] for name in names if status.get(name) is not None}
            where = {"run_directory": str(self._run.path), "start_step": status.get("start_step") or 0}
            events.append({"kind": "start", "time": status.get("started") or 0.0, **known, **where})
        happened = [e for e in self._lines("events.jsonl") if e.get("kind") in ("message", "alarm", "steered", "restart")]
        steps = [
            {"kind": "step", "time": line.get("time") or 0.0, "step": line["step"], "metrics": _numbers(line)}
            for line in self._lines("metrics.jsonl")
            if isinstance(line.get("step"), int)
        ]
        events += sorted([*happened, *steps], key=lambda event: event["time"])
        if status.get("phases") != self._status.get("phases") and status.get("state") == "running":
            since, phases = status.get("phase_since") or 0.0, status.get("phases") or []
            events.append({"kind": "phase", "time": since, "step": status.get("step", 0), "open": phases})
        if status.get("state") != self._status.get("state") and status.get("state") not in (None, "running"):
            events.append({"kind": "end", "time": status.get("updated") or 0.0, "status": status["state"]})
        self._status = status
        return events

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        try:
            with open_inside(self._run.path, name) as file:
                if file.seek(0, 2) < self._offsets[name]:  # a resumed run has cut it, or another run took its place
                    self._offsets[name] = 0
                file.seek(self._offsets[name])
                for _, raw in read_lines(file):
                    self._offsets[name] = file.tell()
                    line = parse_line(raw)
                    if line is not None and isinstance(line.get("time"), (int, float)):
                        yield line
        except (Unreadable, OSError):
            return


def tell(argv: Sequence[str]) -> int:
    """`quadriga tell RUN save|validate|stop|set key=value`: steer a live run."""
    options = tell_parser().parse_args(argv)
    from quadriga.tracking import steering

    run = Catalog(roots_of(options)).find(options.run)
    schema = schema_of(run.kind)
    if schema is None:
        raise QuadrigaError(f"{run.name} is an evaluation: it cannot be told anything", "end it with Ctrl-C")
    command = steering.parse_command(options.words, schema)
    state = run.state(time.time())
    if state not in ("running", "stalled"):
        raise QuadrigaError(f"{run.name} is not running: it is {state}", "a run can be told something while it lives")
    if not run.status.get("steering"):
        raise QuadrigaError(
            f"{run.name} does not listen", "start it with trainer.steering=True; a run that is resumed may have it too"
        )
    sent = steering.tell(run.path, command)
    print(f"told {run.name}: {command}; it acts when step {run.step + 1} ends")
    if options.no_wait:
        return 0
    deadline = time.monotonic() + OBEYED_WITHIN_S
    while time.monotonic() < deadline:
        if done := steering.was_obeyed(run.path, sent):
            print(f"step {done.step}: {done.result}")
            return 1 if done.result.startswith(steering.NOT_DONE) else 0
        run.refresh()
        if run.state(time.time()) not in ("running", "stalled"):
            raise QuadrigaError(f"{run.name} ended before it heard", "look at it with `quadriga runs`")
        time.sleep(POLL_S)
    raise QuadrigaError(
        f"{run.name} has not acted within {OBEYED_WITHIN_S:.0f} s",
        "it still will when its step ends; --no-wait does not wait",
    )


def _numbers(line: dict[str, Any]) -> dict[str, float | None]:
    return {k: v for k, v in line.items() if k not in ("step", "time") and (v is None or isinstance(v, (int, float)))}


def _settable() -> dict[tuple[str, ...], list[str]]:
    """Keys that can be set → kinds of runs that have these."""
    from quadriga.tracking.steering import SETTABLE

    found: dict[tuple[str, ...], list[str]] = {}
    for kind in RUN_KINDS:
        if schema := schema_of(kind):
            found.setdefault(SETTABLE[schema], []).append(kind)
    return found


def watch_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quadriga watch",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="The live panel of a run that was started in another terminal. Ctrl-C ends the watching, not the run.",
        epilog="examples:\n  quadriga watch my_run\n  quadriga watch outputs/quadriga/my_run",
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run, or its name below the root")
    add_root(parser)
    return parser


def tell_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quadriga tell",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Tell a live run something; it acts when the step at hand ends. The run must have been started with "
        "trainer.steering=True. All of it is recorded in the run directory, and a resumed run sets the same again.",
        epilog="""examples:
  quadriga tell quickstart save
  quadriga tell quickstart set actor.optim.lr=5e-4
  quadriga tell quickstart stop

keys that can be set: """
        + "; ".join(f"of {', '.join(kinds)}: {', '.join(keys)}" for keys, kinds in _settable().items()),
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run, or its name below the root")
    parser.add_argument("words", nargs="+", metavar="save|validate|stop|set key=value", help="what to do")
    add_root(parser)
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is done")
    return parser
