"""Processes of the pool that die: an innocent sample is scored again, a guilty one costs itself only, and the pool goes on."""

from __future__ import annotations

import json
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reward_samples import HOSTILE, samples

from quadriga.errors import RewardError
from quadriga.rewards import RewardPool, RewardSample
from quadriga.rewards.processes import parents

JUDGES = str(Path(__file__).with_name("judge_rewards.py"))
Marked = Callable[[], list[int]]


def _naps(count: int, marker: Path) -> list[RewardSample]:
    return [RewardSample("any", "tell_and_nap", 1, {"marker": str(marker)}) for _ in range(count)]


def _told(marker: Path, lines: int = 1) -> list[tuple[int, int]]:
    """(pid, parent's pid) of the calls that have begun so far, once there are so many."""
    deadline = time.monotonic() + 30.0
    while True:
        found = marker.read_text().splitlines() if marker.exists() else []
        if len(found) >= lines:
            return [(int(line.split()[0]), int(line.split()[1])) for line in found]
        assert time.monotonic() < deadline, "the call did not begin"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_sample_whose_process_is_killed_from_outside_is_scored_again(
    number: int, hostile: str, tmp_path: Path, marked: Marked
) -> None:
    with RewardPool(hostile, num_workers=2, timeout_s=20) as pool:
        (handle,) = pool.submit(_naps(1, tmp_path / "told"))
        others = pool.submit(samples(50))
        os.kill(_told(tmp_path / "told")[0][0], number)
        assert handle.result(30).outcome == "correct"
        assert [other.result(30).score for other in others] == list(range(1, 51))
        assert pool.counters["workers_lost"] == 1
        assert pool.counters.get("error", 0) == 0


def test_a_sample_that_is_killed_twice_fails(hostile: str, tmp_path: Path, marked: Marked) -> None:
    with RewardPool(hostile, num_workers=2, timeout_s=20, max_error_rate=1.0) as pool:
        (handle,) = pool.submit(_naps(1, tmp_path / "told"))
        for times in (1, 2):
            os.kill(_told(tmp_path / "told", times)[-1][0], signal.SIGKILL)
        result = handle.result(30)
        assert result.outcome == "error"
        assert "SIGKILL" in (result.error or "")
        assert pool.score_all(samples(3))[2].score == 3


def _zygote(worker: int, parent: int) -> int:
    return parent


def _keeper(worker: int, parent: int) -> int:
    return parents()[parent]


@pytest.mark.parametrize("victim", [_zygote, _keeper])
def test_a_dead_zygote_or_keeper_is_replaced_and_nobody_is_the_worse_for_it(
    victim: Callable[[int, int], int], hostile: str, tmp_path: Path, marked: Marked
) -> None:
    with RewardPool(hostile, num_workers=2, timeout_s=20) as pool:
        naps = pool.submit(_naps(2, tmp_path / "told"))
        others = pool.submit(samples(100))
        os.kill(victim(*_told(tmp_path / "told")[0]), signal.SIGKILL)
        assert [handle.result(30).outcome for handle in naps] == ["correct"] * 2
        assert [other.result(30).score for other in others] == list(range(1, 101))
        assert pool.counters["nurseries_lost"] == 1
        # Once more, while the pool has nothing to do.
        os.kill(victim(*_told(tmp_path / "told")[-1]), signal.SIGKILL)
        assert [r.score for r in pool.score_all(samples(5))] == [1, 2, 3, 4, 5]
        deadline = time.monotonic() + 30.0
        while pool.counters["nurseries_lost"] < 2:
            assert time.monotonic() < deadline, "nobody noticed"
            time.sleep(0.01)
        assert [r.score for r in pool.score_all(samples(5))] == [1, 2, 3, 4, 5]
    assert marked() == []


@pytest.mark.parametrize("action", ["kill_itself", "kill_its_parent", "kill_its_grandparent"])
def test_a_sample_that_kills_costs_itself_only(action: str, hostile: str, marked: Marked) -> None:
    batch = samples(60, action)
    with RewardPool(hostile, num_workers=3, timeout_s=20, on_error=-9.0) as pool:
        results = pool.score_all(batch)
        for sample, result in zip(batch, results):
            if sample.solution_str == action:
                assert (result.outcome, result.score) == ("error", -9.0)
            else:
                assert (result.outcome, result.score) == ("correct", sample.ground_truth)
        assert pool.score_all(samples(5))[4].score == 5
    assert marked() == []


@pytest.fixture(scope="module")
def garbled_pool() -> Iterator[RewardPool]:
    with RewardPool(f"{HOSTILE}:behave", num_workers=1, timeout_s=1.0) as pool:
        yield pool


def _forged(number: int, **said: object) -> bytes:
    payload = json.dumps({"results": [{"score": 1.0, "outcome": "correct"}], "seconds": 0.0, **said}).encode()
    return struct.pack("<II", len(payload), number) + payload


@pytest.mark.parametrize(
    "written",
    [
        b"not a frame at all " * 10,
        b"\x00" * 8,
        b"\x00" * 4096,
        b"abc",
        b"\x05\x00\x00\x00\x01\x00\x00\x00{{{{{",
        struct.pack("<II", 100_000, 1) + b"[" * 100_000,
        _forged(1_000_000),
        _forged(1, results=5),
        _forged(1, seconds="soon"),
        _forged(0, together="x")[:-3],
        struct.pack("<II", 1 << 31, 1),
    ],
    ids=["text", "zeros", "page of zeros", "three bytes", "no JSON", "deep JSON", "a call that is not its own",
         "wrong type", "wrong clock", "cut off", "huge"],
)  # fmt: skip
def test_a_sample_that_garbles_the_wire_costs_itself_only(written: bytes, garbled_pool: RewardPool) -> None:
    batch = samples(60)
    batch.insert(20, RewardSample("any", "garble", 1, {"bytes": written}))
    results = garbled_pool.score_all(batch)
    assert all(r.score == s.ground_truth for s, r in zip(batch, results) if s.solution_str != "garble")
    assert results[20].outcome in ("error", "timeout", "correct")
    assert sum(result.failed for result in results) <= 1
    assert garbled_pool.score_all(samples(5))[4].score == 5


def test_a_batch_of_nothing_but_killers_ends(hostile: str, marked: Marked) -> None:
    with RewardPool(hostile, num_workers=2, timeout_s=20, max_error_rate=1.0) as pool:
        results = pool.score_all(samples(0, *["kill_its_parent"] * 3))
        assert [result.outcome for result in results] == ["error"] * 3


@pytest.mark.parametrize(("word", "outcome"), [("die", "error"), ("segfault", "error"), ("block", "timeout")])
def test_of_many_samples_in_flight_only_the_guilty_one_pays(word: str, outcome: str, marked: Marked) -> None:
    """The process ends, or its event loop is blocked, under a hundred innocent samples."""
    batch = samples(100, word)
    with RewardPool(f"{JUDGES}:judge", num_workers=2, timeout_s=1.0, on_error=-9.0) as pool:
        results = pool.score_all(batch)
        for sample, result in zip(batch, results):
            if sample.solution_str == word:
                assert (result.outcome, result.score) == (outcome, -9.0)
            else:
                assert (result.outcome, result.score) == ("correct", sample.ground_truth)


def test_samples_in_flight_survive_the_death_of_their_process_and_of_the_zygote(marked: Marked) -> None:
    batch = [RewardSample("any", "wait 1.0", k + 1) for k in range(200)]
    with RewardPool(f"{JUDGES}:judge", num_workers=2, timeout_s=20) as pool:
        worker = int(pool.score_all(samples(1))[0].extra["pid"])
        zygote = parents()[worker]
        for victim in (worker, zygote):
            handles = pool.submit(batch)
            time.sleep(0.5)
            os.kill(victim, signal.SIGKILL)
            assert [handle.result(60).score for handle in handles] == list(range(1, 201))
        assert pool.counters["nurseries_lost"] == 1


def test_a_function_that_can_no_longer_be_imported_ends_the_pool_with_the_reason(
    tmp_path: Path, marked: Marked
) -> None:
    module = tmp_path / "mine.py"
    module.write_text("import os\ndef compute_score(**given): return {'score': 1.0, 'parent': os.getppid()}\n")
    with RewardPool(f"{module}:compute_score") as pool:
        zygote = int(pool.score_all(samples(1))[0].extra["parent"])
        module.write_text("raise RuntimeError('broken meanwhile')\n")
        os.kill(zygote, signal.SIGKILL)
        with pytest.raises(RewardError, match="broken meanwhile"):
            _score_on_and_on(pool)


def _score_on_and_on(pool: RewardPool) -> None:
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        pool.score_all(samples(1))
