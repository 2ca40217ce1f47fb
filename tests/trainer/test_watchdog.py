"""A phase that takes too long is told of, with everything that helps to see why, and ended."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest

from quadriga.config.load import load_config
from quadriga.config.schema import WatchdogConfig
from quadriga.controller import LocalWorkerGroup
from quadriga.controller.calls import WorkersDied
from quadriga.controller.local_group import LocalResourcePoolManager
from quadriga.tracking.phases import Phases
from quadriga.trainer.ppo.crew import Crew as RealCrew
from quadriga.trainer.ppo.watchdog import Watchdog


class Crew:
    """Two workers, one of them stuck until it is abandoned."""

    def __init__(self):
        self.abandoned = threading.Event()
        self.reason = ""

    def busy(self):
        return ["actor rank 1 of 2: actor.generate_sequences for 3.0 s"]

    def stacks(self):
        return ["actor rank 0 of 2\nin wait", "actor rank 1 of 2\nin generate_sequences"]

    def abandon(self, why, phase):
        self.reason = why
        self.abandoned.set()


class Case:
    def __init__(self, folder, **deadlines):
        self.phases, self.crew = Phases(), Crew()
        self.warnings, self.exits = [], []
        self.folder = folder
        self.watchdog = Watchdog(
            WatchdogConfig(**deadlines),
            self.phases,
            self.crew,
            lambda phase: [f"0:{i}/0" for i in range(20)],
            folder,
            self.warnings.append,
            self.exits.append,
            last_grace_s=0.1,
            answer_s=0.5,
        )

    def steps(self, seconds, count=3):
        for _ in range(count):
            with self.phases("step"), self.phases("gen"):
                time.sleep(seconds)


@pytest.fixture
def make(tmp_path):
    return lambda **deadlines: Case(tmp_path / "stalls", **deadlines)


def test_deadlines_follow_from_the_usual_time(make):
    case = make(soft_s=0.01, soft_factor=5, hard_s=0.02, hard_factor=20)
    assert case.watchdog.deadlines("step/gen") == (0.05, None), "before it is known: only the soft one, and wide"
    case.steps(0.02)
    soft, hard = case.watchdog.deadlines("step/gen")
    assert 0.1 <= soft <= 0.2
    assert 0.4 <= hard <= 0.8
    assert case.watchdog.deadlines("testing/gen") == (0.05, None), "another phase of the same name"


def test_the_floor_holds_for_fast_phases(make):
    case = make(soft_s=60, hard_s=600)
    case.steps(0.001)
    assert case.watchdog.deadlines("step/gen") == (60, 600)


def test_a_slow_phase_is_told_of_once_with_stacks_and_missing_samples(make):
    case = make(soft_s=0.05, soft_factor=1, hard_s=None)
    with case.watchdog, case.phases("step"), case.phases("gen"):
        time.sleep(0.5)
    (warning,) = case.warnings
    assert "step/gen has been running" in warning
    assert "actor rank 1 of 2: actor.generate_sequences for 3.0 s" in warning
    assert "0:0/0, 0:1/0" in warning
    assert "12 more" in warning
    (file,) = case.folder.iterdir()
    assert str(file) in warning
    stacks = file.read_text()
    assert "in generate_sequences" in stacks
    assert "thread MainThread" in stacks
    assert not case.crew.abandoned.is_set()


def test_past_the_hard_deadline_the_workers_are_stopped_with_the_report(make):
    case = make(soft_s=None, hard_s=0.1, hard_factor=1)
    case.steps(0.001)
    with case.watchdog, case.phases("step"), case.phases("gen"):
        assert case.crew.abandoned.wait(5)
    assert "step/gen has been running" in case.crew.reason
    assert "trainer.watchdog.hard_s" in case.crew.reason
    assert not case.exits, "the phase ended with its workers"


def test_a_driver_that_hangs_itself_is_ended(make):
    case = make(soft_s=None, hard_s=0.1, hard_factor=1)
    case.steps(0.001)
    with case.watchdog, case.phases("step"), case.phases("gen"):
        time.sleep(3)
    assert case.exits == [70]


def test_every_stall_is_told_of_also_when_the_second_phase_lies_where_the_first_lay_in_memory(make):
    """Python gives the address of an object that is gone to the next one of its kind, here at the second stall already."""
    case = make(soft_s=0.05, soft_factor=1, hard_s=0.2, hard_factor=1)
    case.steps(0.001)
    with case.watchdog:
        for stall in range(1, 6):
            case.crew.abandoned.clear()
            phase = case.phases("gen")
            with suppress(WorkersDied), case.phases("step"), phase:
                assert case.crew.abandoned.wait(5), f"stall {stall} was not ended"
                raise WorkersDied(case.crew.reason)  # as the call that waits for the workers does
            del phase
            assert len(case.warnings) == 2 * stall, "one warning at the soft deadline, one at the hard one"


def test_the_watchdog_outlives_a_crew_that_cannot_answer_and_a_disk_that_takes_nothing(make):
    case = make(soft_s=0.05, soft_factor=1, hard_s=0.3, hard_factor=1)
    case.steps(0.001)
    case.folder.write_text("a file where the folder for stacks should be")
    case.crew.busy = case.crew.stacks = case.crew.abandon = lambda *given: {}["no such role"]
    with case.watchdog, case.phases("step"), case.phases("gen"):
        time.sleep(3)
    soft, hard, *last = case.warnings
    assert "step/gen has been running" in soft
    assert "busy workers: not known (KeyError" in soft
    assert f"the stacks cannot be written to {case.folder}" in soft
    assert "trainer.watchdog.hard_s" in hard
    assert "the workers could not be stopped: KeyError" in last[0]
    assert case.exits == [70]


def test_a_driver_that_hangs_with_a_lock_which_the_answers_need_is_ended(make):
    case, lock = make(soft_s=None, hard_s=0.1, hard_factor=1), threading.Lock()
    case.steps(0.001)

    def answer(*given):
        with lock:
            return []

    case.crew.busy = case.crew.stacks = case.crew.abandon = answer
    with case.watchdog, case.phases("step"), case.phases("gen"), lock:
        time.sleep(5)
    assert "busy workers: not known (TimeoutError: no answer for 0.5 s)" in case.warnings[0]
    assert "the workers could not be stopped: TimeoutError" in case.warnings[1]
    assert case.exits == [70]


def test_workers_that_are_not_there_yet_are_not_busy():
    """The pools of a run may have to be waited for longer than the soft deadline of that phase."""
    config = load_config({})
    crew = RealCrew(config, {}, LocalResourcePoolManager({}, {}), LocalWorkerGroup)
    assert crew.busy() == []
    assert crew.stacks() == []
    crew.abandon("a test", "start_workers")


def test_phases_in_time_are_left_alone(make):
    case = make(soft_s=0.2, hard_s=0.4)
    with case.watchdog:
        case.steps(0.01, count=30)
    assert not case.warnings
    assert not case.crew.abandoned.is_set()
