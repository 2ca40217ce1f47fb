"""When a worker fails, the caller learns who, where and why, soon, and nobody is left waiting."""

from __future__ import annotations

import os
import threading
import time

import pytest
from example_workers import CannotStart, Plain, SlowStart

from quadriga.controller import RayClassWithInitArgs, RayWorkerGroup
from quadriga.controller.calls import WorkersLost
from quadriga.errors import ConfigError, WorkerError


@pytest.fixture
def group(pool_of):
    return RayWorkerGroup(pool_of([2]), RayClassWithInitArgs(Plain))


def gone(pid: int, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_an_exception_arrives_with_its_traceback_first_and_its_place_after(group):
    pids = group.pid()
    with pytest.raises(WorkerError) as error:
        group.raise_on(1)
    text = str(error.value)
    assert text.startswith("Traceback (most recent call last):")
    assert 'raise KeyError("no such thing")' in text
    assert text.index("KeyError: 'no such thing'") < text.index("Plain rank 1 of 2")
    assert f"pid {pids[1]}" in text
    assert "node " in text
    assert group.whoami() == [(0, 2, 0), (1, 2, 0)], "an ordinary exception does not end the group"


def test_an_error_of_ours_keeps_its_class_and_fix(pool_of):
    from example_workers import Worker

    from quadriga.controller import Dispatch, register

    class Picky(Worker):
        @register(Dispatch.ONE_TO_ALL)
        def check(self):
            raise ConfigError("the model has no such layer", "choose another")

    with pytest.raises(ConfigError, match="the model has no such layer") as error:
        RayWorkerGroup(pool_of([1]), RayClassWithInitArgs(Picky)).check()
    assert error.value.fix == "choose another"
    assert "Picky rank 0 of 1" in str(error.value)


def test_a_killed_worker_is_named_and_the_others_are_cleaned_up(group):
    pids = group.pid()
    start = time.monotonic()
    with pytest.raises(WorkersLost, match=f"Plain rank 1 of 2 .*pid {pids[1]}.* died during kill_self"):
        group.kill_self(1)
    assert time.monotonic() - start < 10
    assert gone(pids[0])
    with pytest.raises(WorkerError, match=r"are gone: Plain rank 1 of 2 .* died"):
        group.whoami()
    assert not group.is_alive()


def test_ranks_stuck_after_another_one_raised_end_the_group(group):
    pids = group.pid()
    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank zero gave up"):
        group.raise_while_others_hang()
    assert time.monotonic() - start < 20
    assert gone(pids[1])


def test_a_call_that_never_returns_ends_at_its_deadline_and_shows_where_it_hangs(pool_of):
    group = RayWorkerGroup(pool_of([2]), RayClassWithInitArgs(Plain), call_timeout_s=1.5)
    pids = group.pid()
    start = time.monotonic()
    with pytest.raises(WorkersLost) as error:
        group.sleep_for_ever()
    assert time.monotonic() - start < 12
    text = str(error.value)
    assert "no answer to sleep_for_ever within 1.5 s from 2 of 2 workers" in text
    assert f"Plain rank 0 of 2 (node {group.seats[0].node_ip}, pid {pids[0]})" in text
    assert "time.sleep(3600)" in text
    assert "controller.call_timeout_s" in text
    assert all(map(gone, pids))


def test_a_pending_call_has_the_same_deadline_and_errors(pool_of):
    group = RayWorkerGroup(pool_of([2]), RayClassWithInitArgs(Plain), call_timeout_s=30)
    assert group.later("x").get() == ["x", "x"]
    with pytest.raises(WorkersLost, match="no answer to later"):
        group.later("x", delay_s=60).get(timeout_s=0.5)


def test_a_constructor_that_raises(pool_of):
    group = RayWorkerGroup(pool_of([2]), RayClassWithInitArgs(CannotStart))
    with pytest.raises(WorkerError) as error:
        group.hello()
    text = str(error.value)
    assert text.startswith("Traceback")
    assert text.index("OSError: the weights are not where they should be") < text.index("CannotStart rank 1 of 2")
    assert all(gone(seat.pid) for seat in group.seats)


def test_a_constructor_that_never_ends(pool_of):
    group = RayWorkerGroup(pool_of([1]), RayClassWithInitArgs(SlowStart), start_timeout_s=8)
    with pytest.raises(WorkersLost, match="no answer to its construction within 8 s") as error:
        group.wait_ready()
    assert "controller.start_timeout_s" in error.value.fix


def test_a_class_that_workers_cannot_import(pool_of, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("from quadriga.controller import Worker\nclass Lonely(Worker): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from only_here import Lonely

    with pytest.raises(WorkerError, match="No module named 'only_here'") as error:
        RayWorkerGroup(pool_of([1]), RayClassWithInitArgs(Lonely)).wait_ready()
    assert "PYTHONPATH" in error.value.fix


def test_stacks_of_busy_workers_can_be_read(group):
    group.wait_ready()
    pending = group.later("x", delay_s=3)
    time.sleep(0.5)
    stacks = group.stacks()
    assert all("in later" in s and "time.sleep(delay_s)" in s for s in stacks)
    assert stacks[1].startswith("Plain rank 1 of 2")
    assert pending.get() == ["x", "x"]


def test_a_worker_killed_from_outside_during_a_call(group):
    pids = group.pid()
    threading.Timer(0.5, os.kill, (pids[0], 9)).start()
    with pytest.raises(WorkersLost, match="Plain rank 0 of 2"):
        group.sleep_for_ever()
