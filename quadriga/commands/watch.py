"""The commands that meet a live run from another terminal: `quadriga watch RUN`, and `quadriga tell RUN …`."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from quadriga.commands.runs import add_root, roots_of
from quadriga.dashboard.catalog import RUN_KINDS, Catalog, Run
from quadriga.dashboard.configuration import schema_of
from quadriga.dashboard.files import Unreadable, finite, newest_lines, open_inside, parse_line, read_lines
from quadriga.errors import QuadrigaError, printable
from quadriga.tracking.events import Event
from quadriga.tracking.run_state import Validation

POLL_S = 0.5
OBEYED_WITHIN_S = 600.0
OLD_STEPS, OLD_EVENTS = 1000, 20
"""Of a run that has gone on for long, so many steps and messages from before are shown."""


def watch(argv: Sequence[str]) -> int:
    """`quadriga watch RUN`: the live panel of a run that was started elsewhere, until it ends."""
    options = watch_parser().parse_args(argv)
    run = Catalog(roots_of(options)).find(options.run)
    from quadriga.tracking.console import LiveView

    follower = Follower(run)
    with LiveView() as view:
        while True:
            state = run.state(time.time())
            view.update(follower.news(state))
            if state not in ("running", "stalled"):
                break
            time.sleep(POLL_S)
            run.refresh()
    error = str(run.status.get("error") or "")
    print(printable(f"{run.name} {state} at step {run.step}" + (f": {error}" if error else "")))
    return 0 if state == "finished" else 1


class Follower:
    """Turns what a run writes into the events that its own console would see; of what was before, only the newest."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._read: dict[str, tuple[int, int, float]] = {}
        """File → which one it was, how far it was read, and the time of its last line."""
        self._start: tuple[Any, ...] = ()
        self._phases: Any = None
        self._state = ""

    def news(self, state: str) -> list[Event]:
        """Events since the last call, in order of time. `state` is the run's, as seen from outside."""
        status, events = self._run.status, list[Event]()
        is_running = state in ("running", "stalled")
        start = tuple(status.get(name) for name in ("pid", "started", "start_step", "total_steps"))
        if start != self._start and (status.get("total_steps") is not None or not is_running):
            self._start = start  # it has begun, was resumed by another process, or got new workers
            known = {n: status[n] for n in ("project", "experiment", "total_steps") if status.get(n) is not None}
            where = {"run_directory": str(self._run.path), "start_step": status.get("start_step") or 0}
            validations = {
                source: Validation(int(seen["first_step"]), seen["first"], int(seen["last_step"]), seen["last"])
                for source, seen in self._run.validations().items()
            }
            events.append(
                {"kind": "start", "time": _time(status, "started"), **known, **where, "validations": validations}
            )
        happened = self._lines("events.jsonl", OLD_EVENTS, "message", "alarm", "steered", "restart")
        steps = [
            {"kind": "step", "time": line["time"], "step": line["step"], "metrics": _numbers(line)}
            for line in self._lines("metrics.jsonl", OLD_STEPS)
            if isinstance(line.get("step"), int)
        ]
        events += sorted([*happened, *steps], key=lambda event: event["time"])
        if is_running and status.get("phases") != self._phases:
            self._phases = status.get("phases")
            since = _time(status, "phase_since")
            events.append({"kind": "phase", "time": since, "step": self._run.step, "open": self._phases or []})
        if state != self._state:
            self._state = state
            kind = {"kind": "state", "state": state} if is_running else {"kind": "end", "status": state}
            events.append({"time": _time(status, "updated"), **kind})
        return events

    def _lines(self, name: str, most: int, *kinds: str) -> list[Event]:
        """New lines, of these kinds; of a file that was not read before, at most so many of the newest."""
        lines: deque[Event] = deque()
        try:
            with open_inside(self._run.path, name) as file:
                about = os.fstat(file.fileno())
                known, offset, newest = self._read.get(name, (0, 0, -math.inf))
                seen = -math.inf
                if (
                    about.st_ino != known or about.st_size < offset
                ):  # a resumed run has cut it, or another took its place
                    lines, offset, seen = deque(maxlen=most), newest_lines(file, most), newest
                file.seek(offset)
                for _, raw in read_lines(file):
                    offset = file.tell()
                    line = parse_line(raw) or {}
                    when = finite(line.get("time"))
                    if when is not None and when > seen and (not kinds or line.get("kind") in kinds):
                        lines.append(line)
                        newest = when
                self._read[name] = about.st_ino, offset, newest
        except (Unreadable, OSError):
            pass
        return list(lines)


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


def _time(status: dict[str, Any], name: str) -> float:
    return finite(status.get(name)) or 0.0


def _numbers(line: dict[str, Any]) -> dict[str, float | None]:
    return {k: v for k, v in line.items() if k not in ("step", "time") and (v is None or isinstance(v, (int, float)))}


def _settable() -> dict[tuple[str, ...], list[str]]:
    """Keys that can be set → kinds of runs that have these."""
    from quadriga.tracking.steering import SETTABLE

    kinds: dict[tuple[str, ...], list[str]] = {}
    for kind in RUN_KINDS:
        if schema := schema_of(kind):
            kinds.setdefault(SETTABLE[schema], []).append(kind)
    return kinds


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
