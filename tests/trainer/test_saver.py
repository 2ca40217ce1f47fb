"""A checkpoint is written while training goes on, and counts only when all of it, and its step's metrics, are on disk."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from quadriga.checkpoint.disk import BackgroundWrite
from quadriga.checkpoint.store import CheckpointStore
from quadriga.controller.calls import WorkersDied
from quadriga.errors import CheckpointError
from quadriga.tracking.phases import Phases
from quadriga.trainer.ppo import saver as saver_module
from quadriga.trainer.ppo.saver import Saver


class Crew:
    """Two writers, each with a real thread; the second one does what the test asks for."""

    def __init__(self):
        self.second = lambda file: file.write_text("two")
        self.need = 0
        self.gone = False
        self.died = None
        self.writers = []

    def checkpoint_bytes(self):
        return self.need

    def copy_state(self):
        return self.need

    def begin_writing(self, draft):
        folder = draft.folder("actor")
        jobs = [lambda: (folder / "one").write_text("one"), lambda: self.second(folder / "two")]
        self.writers = [BackgroundWrite(job) for job in jobs]

    def written(self):
        return [None if self.gone else writer.state() for writer in self.writers]

    def death(self, during):
        return self.died


@pytest.fixture
def crew():
    return Crew()


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def saver(store, crew):
    return Saver(store, crew, timeout_s=5)


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.checkpoints()]


def left_over(store: CheckpointStore) -> list[Path]:
    return list(store.folder.glob(".*"))


def test_a_checkpoint_is_committed_when_its_step_is_recorded_and_not_before(saver, store):
    saver.start(1, {"step": 1})
    time.sleep(0.3)
    assert steps(store) == []
    saver.step_recorded()
    saver.finish()
    assert steps(store) == [1]
    assert store.has_written
    assert store.checkpoints()[0].read_state() == {"step": 1}


def test_a_slow_disk_does_not_hold_up_the_step(saver, store, crew):
    crew.second = lambda file: (time.sleep(0.6), file.write_text("two"))
    begin = time.monotonic()
    saver.start(1, {"step": 1})
    saver.step_recorded()
    assert time.monotonic() - begin < 0.3
    saver.start(2, {"step": 2})
    assert steps(store) == [1], "one checkpoint at a time"
    saver.step_recorded()
    saver.finish()
    assert steps(store) == [2, 1]


def test_a_part_that_cannot_be_written_stops_the_run_at_the_next_step(saver, store, crew):
    saver.start(1, {"step": 1})
    saver.step_recorded()
    saver.finish()

    def fail(file):
        raise OSError(28, "No space left on device")

    crew.second = fail
    saver.start(2, {"step": 2})

    def next_steps():
        for _ in range(100):
            saver.step_recorded()
            time.sleep(0.05)

    with pytest.raises(CheckpointError, match=r"checkpoint of step 2 was not written: OSError.*No space left"):
        next_steps()
    assert steps(store) == [1]
    assert not left_over(store)


def test_a_last_checkpoint_that_fails_is_not_forgotten(saver, crew):
    def fail(file):
        raise CheckpointError("the disk is full", "free some space")

    crew.second = fail
    saver.start(1, {"step": 1})

    def end():
        saver.step_recorded()  # which says so already if the writers are that fast
        saver.finish()

    with pytest.raises(CheckpointError, match="the disk is full"):
        end()


def test_too_little_room_is_noticed_before_anything_is_written(saver, store, crew):
    crew.need = 1 << 50
    with pytest.raises(CheckpointError, match="a checkpoint needs"):
        saver.start(1, {"step": 1})
    assert not crew.writers
    assert not left_over(store)


def test_a_run_that_fails_keeps_a_recorded_checkpoint_and_drops_another(saver, store, crew):
    crew.second = lambda file: (time.sleep(0.3), file.write_text("two"))
    saver.start(1, {"step": 1})
    saver.step_recorded()
    saver.close()
    assert steps(store) == [1]
    saver = Saver(store, crew, timeout_s=5)
    saver.start(2, {"step": 2})
    saver.close()
    assert steps(store) == [1], "step 2 is not in the metrics"
    assert not left_over(store)


def test_writers_that_are_gone_are_not_waited_for(saver, store, crew):
    crew.gone = True
    saver.start(1, {"step": 1})
    saver.step_recorded()
    begin = time.monotonic()
    saver.close()
    assert time.monotonic() - begin < 4
    assert steps(store) == []
    assert not left_over(store)


def test_a_writer_that_dies_is_a_death_not_a_wait(saver, store, crew):
    """Its answer is None, and the driver waits for nothing else: at the last checkpoint, or before the next."""
    for meets in (saver.finish, lambda: saver.start(2, {"step": 2})):
        crew.gone, crew.died = True, WorkersDied("actor rank 1 of 2 died during the writing of a checkpoint")
        saver.start(1, {"step": 1})

        def go_on(meets=meets):
            saver.step_recorded()  # which says so already if the thread is that fast
            meets()

        begin = time.monotonic()
        with pytest.raises(WorkersDied, match="rank 1 of 2 died"):
            go_on()
        assert time.monotonic() - begin < 2
        assert steps(store) == []
        assert not left_over(store)
    crew.gone, crew.died = False, None
    saver.start(1, {"step": 1})
    saver.step_recorded()
    saver.finish()
    assert steps(store) == [1], "its draft is written again"


def test_a_slow_answer_is_no_death_but_endless_silence_is(saver, store, crew, monkeypatch):
    monkeypatch.setattr(saver_module, "LONGEST_POLL_S", 0.1)
    crew.gone = True
    saver.start(1, {"step": 1})
    saver.step_recorded()
    time.sleep(0.5)
    crew.gone = False
    saver.finish()
    assert steps(store) == [1]
    monkeypatch.setattr(saver_module, "SILENT_S", 0.3)
    crew.gone = True
    saver.start(2, {"step": 2})
    saver.step_recorded()
    with pytest.raises(WorkersDied, match=r"has not answered for 0.3 s in the writing of the checkpoint of step 2"):
        saver.finish()


def test_the_driver_waits_inside_a_phase(store, crew):
    phases = Phases()
    saver = Saver(store, crew, 5, lambda name: phases(name, timed=False))
    crew.second = lambda file: (time.sleep(0.3), file.write_text("two"))
    saver.start(1, {"step": 1})
    saver.step_recorded()
    saver.finish()
    assert len(phases.history("wait_for_checkpoint")) == 1
    assert phases.take_timings() == {}


def test_a_disk_without_room_for_one_checkpoint_is_told_of_before_the_first(saver, store, crew):
    saver.rehearse({"step": 0})
    crew.need = 1 << 50
    with pytest.raises(CheckpointError, match=r"checkpoints has .* left, a checkpoint needs 1024.0 TiB"):
        saver.rehearse({"step": 0})
    assert left_over(store) == []


def test_a_writer_that_never_ends_is_given_up(store, crew, monkeypatch):
    monkeypatch.setattr(saver_module, "LONGEST_POLL_S", 0.1)
    crew.second = lambda file: time.sleep(3)
    saver = Saver(store, crew, timeout_s=0.3)
    saver.start(1, {"step": 1})
    saver.step_recorded()
    with pytest.raises(CheckpointError, match=r"not written within 0.3 s \(controller.call_timeout_s\)"):
        saver.finish()
