"""What the user sees while a run goes on: a live panel on a terminal, one line a step everywhere else.

The driver asks the runner for news (`EventLog.since`) and hands them to `LiveView.update`, a few times a second, also
when there are none: then the view can say what the run is waiting for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quadriga.errors import printable
from quadriga.tracking import metric_names
from quadriga.tracking.events import Event
from quadriga.tracking.figures import clock, in_words
from quadriga.tracking.metric_names import METRICS, format_value
from quadriga.tracking.run_state import MAIN_METRICS, SPEEDS, RunState, sparkline

_FIRST_REMINDER_S = 30.0
_LONGEST_REMINDER_S = 600.0
_SPARKLINE = 40
_PHASE_BAR = 40
_PHASE_COLORS = ("cyan", "yellow", "blue", "magenta", "bright_black", "white", "red", "green")
_DETAILS = [
    name
    for section in (
        metric_names.POLICY,
        metric_names.CRITIC,
        metric_names.LENGTHS,
        metric_names.SCORES,
        metric_names.SUPERVISED,
    )
    for name, metric in section.items()
    if metric.label and name not in (*MAIN_METRICS, *SPEEDS)
]


class LiveView:
    """Draws a run from its events. Use it as a context manager; `update` may come from any thread.

    Args:
        console: where to draw; standard output by default.
        line_every: of lines, one every so many steps; a validation is always shown.
        live: panel (True) or lines (False); by default a panel if the console is a terminal that can redraw.
        now: the clock of the events, in seconds.
    """

    def __init__(
        self,
        console: Console | None = None,
        live: bool | None = None,
        now: Callable[[], float] = time.time,
        line_every: int = 1,
    ) -> None:
        self.console = console or Console()
        self.state = RunState()
        self._now = now
        self._lock = threading.RLock()
        self._began = self._heard = self._phase_began = self._stepped = now()
        self._ended: float | None = None
        self._is_stalled = False
        self._reminded = 0.0
        self._usual: dict[str, float] = {}
        self._line_every = line_every
        if live is None:
            live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._live = (
            Live(console=self.console, get_renderable=self.render, refresh_per_second=4, vertical_overflow="visible")
            if live
            else None
        )

    def __enter__(self) -> LiveView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live:
            self._live.stop()

    def update(self, events: Iterable[Event]) -> None:
        """Show what is new. Call it without events now and then, so that a run that waits is seen to wait."""
        with self._lock:
            lines: list[Text] = []
            heard = False
            for event in events:
                heard = True
                self.state.apply(event)
                lines += self._lines_of(event)
            if heard:
                self._heard, self._reminded = self._now(), 0.0
            elif self._live is None:
                lines += self._reminder()
        # Printing takes the console's lock, which the redrawing thread holds when it calls `render`: never inside ours.
        for line in lines:
            self.console.print(line, soft_wrap=True, highlight=False)

    def render(self) -> Panel:
        """The panel as it is now."""
        with self._lock:
            state = self.state
            rows = Table.grid(padding=(0, 2))
            rows.add_column(style="dim", min_width=10)
            rows.add_column()
            for name, label in MAIN_METRICS.items():
                if history := state.histories.get(name):
                    value = format_value(name, state.metrics.get(name)).rjust(6)
                    rows.add_row(
                        label, Text.assemble((value, "bold green"), "  ", (sparkline(history, _SPARKLINE), "green"))
                    )
            for source, seen in state.validations.items():
                rows.add_row(
                    "validation", _validation_text(source, seen.first, seen.last, seen.first_step, seen.last_step)
                )
            if details := _labelled(state.metrics, _DETAILS):
                rows.add_row("details", Text(details))
            if speed := self._speed():
                rows.add_row("speed", Text(speed))
            if phases := state.phase_seconds():
                rows.add_row("phases", _phase_bar(_large_parts(phases)))
            rows.add_row("now", self._doing())
            title = " / ".join(part for part in (state.project, state.experiment) if part) or "quadriga"
            return Panel(
                Group(self._progress(), rows),
                title=Text(printable(title), "bold"),
                title_align="left",
                border_style="dim",
            )

    # ---- the panel's parts

    def _progress(self) -> Table:
        state = self.state
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column()
        bar.add_column(ratio=1)
        bar.add_column(justify="right")
        if state.total_steps:
            middle: Any = ProgressBar(
                total=state.total_steps, completed=state.step, complete_style="green", finished_style="green"
            )
            step = f"step {state.step:,}/{state.total_steps:,}"
        else:
            middle, step = "", f"step {state.step:,}"
        times = f"{clock((self._ended or self._now()) - self._began)} elapsed"
        if state.seconds_left is not None and not state.status:
            times += f" · {clock(state.seconds_left - (self._now() - self._stepped))} left"
        bar.add_row(Text(step, "bold"), middle, Text(times))
        return bar

    def _speed(self) -> str:
        state = self.state
        parts = [_labelled(state.metrics, SPEEDS)]
        if state.seconds_per_step is not None:
            parts.append(f"{in_words(state.seconds_per_step)} per step")
        return " · ".join(part for part in parts if part)

    def _doing(self) -> Text:
        if self.state.status:
            return Text(self.state.status, "bold" if self.state.status == "finished" else "bold yellow")
        seconds = max(self._now() - self._phase_began, 0.0)
        name = _innermost(self.state.open_phases)
        if self._is_stalled:
            return Text(f"stalled: {_phase_label(name)} {in_words(seconds)}" if name else "stalled", "bold yellow")
        if not name:
            resting = "between phases" if self.state.step > self.state.start_step else "starting"
            return Text("training" if self.state.open_phases else resting, "dim")
        usual = self._usual.get(name)
        slow = usual is not None and seconds > max(5 * usual, 5.0)
        text = f"{_phase_label(name)} {in_words(seconds)}"
        return Text(
            f"{text} (usually {in_words(usual)})" if slow and usual is not None else text, "yellow" if slow else ""
        )

    # ---- lines

    def _lines_of(self, event: Event) -> list[Text]:
        """What to print for an event; the panel shows most of them itself."""
        kind = event["kind"]
        if kind == "step":
            self._stepped = event["time"]
            self._usual = self.state.phase_seconds() or self._usual
            is_due = event["step"] % self._line_every == 0 or event["step"] == self.state.total_steps
            shown = is_due or any(name.startswith("val/") for name in event["metrics"])
            return [Text(printable(self._step_line(event)))] if shown and not self._live else []
        if kind == "start":
            self._began = min(self._began, event["time"])
            name = f"{event.get('project', '')}/{event.get('experiment', '')}"
            return [] if self._live else [Text(printable(f"{name}: {self._plan()}"))]
        if kind == "phase":
            self._phase_began = event["time"]
        elif kind == "state":
            self._is_stalled = event["state"] == "stalled"
            return [self._doing()] if self._is_stalled and not self._live else []
        elif kind == "end":
            self._ended = event["time"]
        elif kind == "message" and event.get("level") == "warning":
            return [Text(printable(f"warning: {event['text']}"), "yellow")]
        elif kind == "message":
            return [Text(printable(event["text"]))]
        elif kind == "alarm":
            return [Text(printable(f"alarm at step {event['step']}: {event['text']}. {event['look']}"), "bold yellow")]
        elif kind == "restart":
            return [Text(printable(event["text"]), "yellow")]
        elif kind == "steered":
            told = f"steered after step {event['step']}: {event['command']}: {event['result']}"
            return [Text(printable(told), "cyan")]
        elif kind == "lost":
            return [Text(f"{event['count']:,} events were not shown; metrics.jsonl has every step", "dim")]
        return []

    def _plan(self) -> str:
        state = self.state
        steps = "training" if state.total_steps is None else f"{state.total_steps:,} steps"
        resumed = f", resumed after step {state.start_step:,}" if state.start_step else ""
        where = f", files in {state.run_directory}" if state.run_directory else ""
        return f"{steps}{resumed}{where}"

    def _step_line(self, event: Event) -> str:
        state, metrics = self.state, event["metrics"]
        parts = [f"step {state.step}" + (f"/{state.total_steps}" if state.total_steps else "")]
        parts += [
            f"validation {source} {seen.last:.1%}"
            for source, seen in state.validations.items()
            if seen.last_step == state.step
        ]
        if state.step > 0:
            parts.append(_labelled(metrics, [*MAIN_METRICS, *_DETAILS]))
            spent = _large_parts(state.phase_seconds())
            phases = ", ".join(f"{_phase_label(name)} {s:.2f}" for name, s in spent.items() if s >= 0.005)
            total = metrics.get("timing_s/step")
            if total is not None:
                parts.append(f"{total:.2f} s" + (f" ({phases})" if phases else ""))
            parts.append(_labelled(metrics, SPEEDS))
            if state.seconds_left is not None:
                parts.append(f"{clock(state.seconds_left)} left")
        return " · ".join(part for part in parts if part)

    def _reminder(self) -> list[Text]:
        """After half a minute without news, then at doubling distances: what the run has been doing all the time."""
        waited = self._now() - self._heard
        due = _FIRST_REMINDER_S if not self._reminded else self._reminded + min(self._reminded, _LONGEST_REMINDER_S)
        if waited < due or self.state.status:
            return []
        self._reminded = waited
        name = _innermost(self.state.open_phases)
        usual = self._usual.get(name)
        hint = f" (usually {in_words(usual)})" if usual is not None else ""
        what = f"{_phase_label(name)} has been running" if name else "no news"
        seconds = max(waited, self._now() - self._phase_began) if name else waited
        return [Text(f"step {self.state.step + 1}: {what} for {in_words(seconds)}{hint}", "dim")]


def _labelled(metrics: dict[str, float | None], names: Iterable[str]) -> str:
    """`label value` of those that are there; a share of exactly 0 (nothing cut off, no errors) is left out."""
    parts = []
    for name in names:
        value, metric = metrics.get(name), METRICS[name]
        always_zero = metric.unit == "share" or name == "actor/ppo_kl"  # the latter where a step is one optimiser step
        if name in metrics and not (value == 0 and always_zero and name not in MAIN_METRICS):
            number = format_value(name, value)
            parts.append(f"{number} {metric.label}" if metric.label == metric.unit else f"{metric.label} {number}")
    return " · ".join(parts)


def _validation_text(source: str, first: float, last: float, first_step: int, last_step: int) -> Text:
    source = printable(source)
    if first_step == last_step:
        return Text.assemble(f"{source} ", (f"{last:.1%}", "bold blue"), (f"  at step {last_step}", "dim"))
    return Text.assemble(f"{source} {first:.1%} → ", (f"{last:.1%}", "bold blue"), (f"  at step {last_step}", "dim"))


def _large_parts(phases: dict[str, float]) -> dict[str, float]:
    """Those that take at least a hundredth of the time; the others would only make it harder to read."""
    least = sum(phases.values()) / 100
    return {name: seconds for name, seconds in phases.items() if seconds >= least}


def _phase_bar(phases: dict[str, float]) -> Text:
    """A bar whose parts are as long as the phases took, and the names with their seconds in the same colours."""
    total = sum(phases.values())
    bar, names = Text(), Text()
    for i, (name, seconds) in enumerate(phases.items()):
        color = _PHASE_COLORS[i % len(_PHASE_COLORS)]
        bar.append("━" * round(_PHASE_BAR * seconds / total) if total else "", color)
        names.append(f"{' · ' if names else ''}")
        names.append(f"{_phase_label(name)} {in_words(seconds)}", color)
    return Text.assemble(bar, "\n", names)


def _phase_label(name: str) -> str:
    metric = METRICS.get(f"timing_s/{name}")
    return metric.label if metric and metric.label else printable(name).replace("_", " ")


def _innermost(phases: list[str]) -> str:
    return phases[-1] if phases and phases[-1] != "step" else ""
