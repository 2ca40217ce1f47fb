from __future__ import annotations

import io
import threading
from typing import Any

import pytest
from recorded_run import STEPS, step_metrics
from rich.console import Console

from quadriga.tracking import EventLog
from quadriga.tracking.console import LiveView
from quadriga.tracking.figures import in_words
from quadriga.tracking.run_state import RunState, sparkline


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def start_event() -> dict[str, Any]:
    names = {"project": "project", "experiment": "experiment", "run_directory": "outputs/project/experiment"}
    return {"kind": "start", "time": 1000.0, "total_steps": STEPS, "start_step": 0, **names}


def step_event(step: int, **more: float | None) -> dict[str, Any]:
    metrics = {"val/arithmetic/acc/mean@1": 0.41} if step == 0 else step_metrics(step)
    return {"kind": "step", "time": 1002.0 + 1.5 * step, "step": step, "metrics": metrics | more}


def lines_view(clock: Clock | None = None) -> tuple[LiveView, io.StringIO]:
    output = io.StringIO()
    return LiveView(Console(file=output, width=80), now=clock or Clock()), output


def panel_text(view: LiveView) -> str:
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(view.render())
    return console.export_text()


def test_without_a_terminal_each_step_is_one_line() -> None:
    view, output = lines_view()
    with view:
        view.update([start_event()])
        view.update([step_event(0)])
        view.update([step_event(1), step_event(2)])
    lines = output.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0] == f"project/experiment: {STEPS} steps, files in outputs/project/experiment"
    assert lines[1] == f"step 0/{STEPS} · validation arithmetic 41.0%"
    assert lines[3] == (
        f"step 2/{STEPS} · reward 0.470 · accuracy 42.0% · kl 0.00123 · entropy 0.456 · length 11.8 · "
        "1.00 s (gen 0.60, update actor 0.40) · 12,345 tokens/s · 0:57 left"
    )


def test_lines_carry_no_terminal_codes() -> None:
    view, output = lines_view()
    view.update(
        [start_event(), step_event(1), {"kind": "message", "time": 1.0, "level": "warning", "text": "[bold]x[/]"}]
    )
    assert "\x1b" not in output.getvalue()
    assert "warning: [bold]x[/]" in output.getvalue()


def test_a_value_that_was_not_finite_is_shown_as_missing() -> None:
    view, output = lines_view()
    view.update([start_event(), step_event(1, **{"actor/entropy": None})])
    assert "entropy –" in output.getvalue()


def test_rare_trouble_is_shown_only_when_there_is_some() -> None:
    view, output = lines_view()
    view.update([start_event(), step_event(1, **{"reward/timeouts": 0.0})])
    assert "timed out" not in output.getvalue()
    view.update([step_event(2, **{"reward/timeouts": 0.03, "response_length/clip_ratio": 0.25})])
    assert "timed out 3.0%" in output.getvalue()
    assert "cut off 25.0%" in output.getvalue()


def test_a_run_that_hangs_says_in_which_phase_ever_more_rarely() -> None:
    clock = Clock()
    view, output = lines_view(clock)
    view.update([start_event(), step_event(1)])
    view.update([{"kind": "phase", "time": 1004.0, "step": 2, "open": ["step", "gen"]}])
    output.truncate(0)
    output.seek(0)
    for _ in range(600):
        clock.seconds += 1
        view.update([])
    lines = output.getvalue().splitlines()
    assert lines[0] == "step 2: gen has been running for 30 s (usually 0.6 s)"
    assert 3 <= len(lines) <= 6
    view.update([step_event(2)])
    assert "step 2/" in output.getvalue().splitlines()[-1]


def test_the_panel_shows_progress_quality_speed_and_phases() -> None:
    clock = Clock()
    view = LiveView(Console(file=io.StringIO()), live=True, now=clock)
    clock.seconds += 32
    view.update([start_event(), *(step_event(step) for step in range(21))])
    view.update([{"kind": "phase", "time": 1032.0, "step": 21, "open": ["step", "update_actor"]}])
    clock.seconds += 2
    text = panel_text(view)
    for expected in (
        "project / experiment",
        f"step 20/{STEPS}",
        "0:34 elapsed · 0:28 left",
        "reward",
        "0.650",
        "accuracy",
        "60.0%",
        "arithmetic 41.0% → 62.0%",
        "at step 20",
        "kl 0.00123",
        "entropy 0.456",
        "length 11.8",
        "12,345 tokens/s",
        "1.5 s per step",
        "gen 0.6 s",
        "update actor 0.4 s",
        "update actor 2 s",
        "█",
    ):
        assert expected in text, f"{expected!r} is not in\n{text}"


def test_a_phase_that_takes_far_longer_than_usual_is_marked() -> None:
    clock = Clock()
    view = LiveView(Console(file=io.StringIO()), live=True, now=clock)
    view.update([start_event(), step_event(1)])
    view.update([{"kind": "phase", "time": 1004.0, "step": 2, "open": ["step", "gen"]}])
    assert "usually" not in panel_text(view)
    clock.seconds = 1024
    assert "gen 20 s (usually 0.6 s)" in panel_text(view)


def test_durations_in_words_go_from_parts_of_a_second_to_days() -> None:
    seconds = (0.42, 42, 91, 3 * 3600 + 7 * 60, 47 * 3600, 12 * 86400 + 4 * 3600)
    assert [in_words(s) for s in seconds] == ["0.42 s", "42 s", "1 min 31 s", "3 h 07 min", "47 h 00 min", "12 d 4 h"]


def test_the_panel_can_be_drawn_before_anything_has_happened_and_after_the_end() -> None:
    clock = Clock()
    view = LiveView(Console(file=io.StringIO()), live=True, now=clock)
    assert "starting" in panel_text(view)
    clock.seconds += 10
    view.update([start_event(), step_event(1), {"kind": "end", "time": 1010.0, "status": "finished"}])
    clock.seconds += 100
    text = panel_text(view)
    assert "0:10 elapsed" in text
    assert "finished" in text
    assert "left" not in text


def test_a_terminal_gets_the_panel_with_messages_above_it() -> None:
    output = io.StringIO()
    console = Console(file=output, width=100, force_terminal=True, legacy_windows=False)
    with LiveView(console) as view:
        view.update([start_event(), step_event(1)])
        view.update([{"kind": "message", "time": 1.0, "level": "info", "text": "checkpoint written"}])
    text = output.getvalue()
    assert "\x1b[" in text
    assert "checkpoint written" in text
    assert text.rindex("step 1/") > text.rindex("checkpoint written")


def test_drawing_and_printing_at_the_same_time_do_not_wait_for_each_other() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, legacy_windows=False)
    with LiveView(console) as view:
        assert view._live is not None

        def redraw() -> None:
            for _ in range(100):
                view._live.refresh()  # type: ignore[union-attr]

        def report() -> None:
            for step in range(1, 101):
                message = {"kind": "message", "time": 1.0, "level": "info", "text": "hello"}
                view.update([step_event(step % STEPS + 1), message])

        threads = [threading.Thread(target=work, daemon=True) for work in (redraw, report)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)


def test_events_through_the_log_reach_the_view() -> None:
    log, (view, output) = EventLog(capacity=2), lines_view()
    for step in range(1, 6):
        log.append("step", {"step": step, "metrics": step_metrics(step)})
    events, _ = log.since()
    view.update(events)
    assert "3 events were not shown" in output.getvalue()
    assert "step 5" in output.getvalue()


def test_time_left_of_a_resumed_run_counts_from_where_it_went_on() -> None:
    state = RunState()
    state.apply(start_event() | {"start_step": 30})
    assert state.seconds_left is None
    for i, step in enumerate(range(31, 36)):
        state.apply({"kind": "step", "time": 1000.0 + 2.0 * (i + 1), "step": step, "metrics": step_metrics(step)})
    assert state.seconds_per_step == pytest.approx(2.0)
    assert state.seconds_left == pytest.approx(10.0)


def test_validation_before_training_does_not_count_as_a_step_in_the_time_left() -> None:
    state = RunState()
    state.apply(start_event())
    state.apply({"kind": "step", "time": 1060.0, "step": 0, "metrics": {}})
    state.apply({"kind": "step", "time": 1062.0, "step": 1, "metrics": step_metrics(1)})
    assert state.seconds_per_step == pytest.approx(2.0)


def test_sparkline_rises_with_the_values_and_fits_its_width() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(range(1000), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0], 8) == "▄▄"
    assert sparkline([], 8) == ""
