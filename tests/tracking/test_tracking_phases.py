from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from quadriga.tracking import EventLog, Phases, Timeline


def test_a_phase_has_its_time_and_an_outer_one_includes_it() -> None:
    phases = Phases()
    with phases("step"):
        with phases("gen"):
            time.sleep(0.05)
        with phases("update_actor"):
            time.sleep(0.02)
    timings = phases.take_timings()
    assert set(timings) == {"timing_s/step", "timing_s/gen", "timing_s/update_actor"}
    assert 0.05 <= timings["timing_s/gen"] < 0.2
    assert 0.02 <= timings["timing_s/update_actor"] < 0.15
    inside = timings["timing_s/gen"] + timings["timing_s/update_actor"]
    assert inside <= timings["timing_s/step"] < inside + 0.1


def test_timings_belong_to_one_step_and_repeated_phases_add_up() -> None:
    phases = Phases()
    for _ in range(3):
        with phases("gen"):
            time.sleep(0.01)
    assert phases.take_timings()["timing_s/gen"] >= 0.03
    assert phases.take_timings() == {}


def test_a_phase_inside_itself_counts_once() -> None:
    phases = Phases()
    began = time.perf_counter()
    with phases("gen"), phases("gen"):
        time.sleep(0.02)
    assert phases.take_timings()["timing_s/gen"] <= time.perf_counter() - began


def test_what_happens_inside_a_whole_phase_is_not_counted_apart(tmp_path: Path) -> None:
    phases = Phases(Timeline(tmp_path / "timeline.json"))
    with phases("gen"):
        pass
    with phases("testing", whole=True), phases("gen"):
        time.sleep(0.05)
    timings = phases.take_timings()
    assert timings["timing_s/testing"] >= 0.05 > timings["timing_s/gen"]
    names = [event["name"] for event in json.loads((tmp_path / "timeline.json").read_text()) if event["ph"] == "X"]
    assert sorted(names) == ["gen", "gen", "testing"]


def test_a_phase_that_fails_is_timed_and_the_error_goes_on(tmp_path: Path) -> None:
    phases = Phases(Timeline(tmp_path / "timeline.json"))
    with pytest.raises(KeyError, match="lost"), phases("reward"):
        raise KeyError("lost")
    assert "timing_s/reward" in phases.take_timings()
    assert phases.open_phases() == []
    (event,) = [e for e in json.loads((tmp_path / "timeline.json").read_text()) if e["ph"] == "X"]
    assert event["args"]["failed"] is True


def test_running_phases_say_where_a_run_hangs() -> None:
    phases = Phases()
    with phases("step"), phases("gen"):
        outer, inner = phases.open_phases()
    assert (outer.name, inner.name) == ("step", "gen")
    assert outer.began <= inner.began


def test_a_viewer_is_told_which_phases_run() -> None:
    events = EventLog()
    phases = Phases(events=events)
    phases.start_step(7)
    with phases("step"), phases("gen"):
        pass
    news, _ = events.since()
    assert [event["open"] for event in news] == [["step"], ["step", "gen"], ["step"], []]
    assert {event["step"] for event in news} == {7}


def test_timeline_is_a_trace_with_lanes_that_shows_nesting_and_parallel_work(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    phases = Phases(timeline)
    phases.start_step(4)
    barrier = threading.Barrier(2)

    def update_critic() -> None:
        with phases("update_critic", lane="critic"):
            barrier.wait()
            time.sleep(0.02)

    began = time.time()
    with phases("step"):
        thread = threading.Thread(target=update_critic)
        thread.start()
        with phases("update_actor"):
            barrier.wait()
            time.sleep(0.02)
        thread.join()
    phases.record("forward", began, 0.01, lane="actor 0", tokens=12)
    phases.take_timings()

    events = json.loads((tmp_path / "timeline.json").read_text())
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert set(lanes) == {"driver", "critic", "actor 0"}
    by_name = {e["name"]: e for e in events if e["ph"] == "X"}
    step, actor, critic = (by_name[name] for name in ("step", "update_actor", "update_critic"))
    assert step["tid"] == actor["tid"] == lanes["driver"]
    assert critic["tid"] == lanes["critic"]
    assert step["ts"] <= actor["ts"]
    assert actor["ts"] + actor["dur"] <= step["ts"] + step["dur"] + 1
    assert max(actor["ts"], critic["ts"]) < min(actor["ts"] + actor["dur"], critic["ts"] + critic["dur"])
    assert abs(step["ts"] / 1e6 - began) < 0.5
    assert step["args"] == {"step": 4}
    assert by_name["forward"]["args"] == {"step": 4, "tokens": 12}


def test_timeline_of_a_resumed_run_continues_the_file(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    for step, lanes in enumerate((("driver", "critic"), ("critic", "driver"))):
        timeline = Timeline(path)
        for lane in lanes:
            timeline.add("gen", 1000.0 + step, 0.5, lane, step=step)
            timeline.flush()
        timeline.flush()
    events = json.loads(path.read_text())
    assert [e["args"]["step"] for e in events if e["ph"] == "X"] == [0, 0, 1, 1]
    names = {(e["args"]["name"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert len(names) == 2, "a lane keeps its number over a resume"


def test_a_full_timeline_stays_valid_and_small(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "timeline.json", max_bytes=5000)
    for step in range(200):
        timeline.add("gen", float(step), 0.5, step=step)
        timeline.flush()
    assert 2000 < timeline.path.stat().st_size <= 5000
    json.loads(timeline.path.read_text())


def test_an_unreadable_timeline_is_started_anew(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text('[{"cut off": ' + "x" * 1000)
    timeline = Timeline(path)
    timeline.add("gen", 1.0, 0.5)
    timeline.flush()
    assert any(event["name"] == "gen" for event in json.loads(path.read_text()))
