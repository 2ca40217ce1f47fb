"""Asynchronous reward functions: many samples in flight in one process, each with its own deadline and its own failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from reward_samples import samples

from quadriga.rewards import RewardFunction, RewardPool, RewardSample

JUDGES = str(Path(__file__).with_name("judge_rewards.py"))
Marked = Callable[[], list[int]]


def test_many_samples_wait_for_their_judge_at_the_same_time(patience: float, marked: Marked) -> None:
    """512 samples of 0.4 s each: one after the other they would take 205 s."""
    with RewardPool(f"{JUDGES}:judge", num_workers=2) as pool:
        pool.score_all(samples(2))
        began = time.monotonic()
        results = pool.score_all(samples(512))
        assert time.monotonic() - began < 0.4 + patience
    assert [r.score for r in results] == list(range(1, 513))
    assert max(r.extra["in_flight"] for r in results) > 100
    assert len({r.extra["pid"] for r in results}) == 2
    assert all(0.39 < r.seconds < 0.4 + patience for r in results)


def test_no_more_are_in_flight_than_allowed() -> None:
    with RewardPool(f"{JUDGES}:judge", num_workers=1, max_concurrent=8) as pool:
        results = pool.score_all(samples(32, *["wait 0.02"] * 8))
    assert max(r.extra["in_flight"] for r in results) == 8


@pytest.mark.parametrize("name", ["returns_an_awaitable", "partly", "sometimes"])
def test_whatever_returns_an_awaitable_is_asynchronous(name: str, patience: float) -> None:
    with RewardPool(f"{JUDGES}:{name}", num_workers=2) as pool:
        began = time.monotonic()
        assert [r.score for r in pool.score_all(samples(64))] == list(range(1, 65))
        assert time.monotonic() - began < 2 * 0.4 + patience


@pytest.mark.parametrize(
    ("word", "outcome", "message"),
    [
        ("throw", "error", "the judge is not at home"),
        ("leave", "error", "SystemExit: 3"),
        ("cancel", "error", "CancelledError"),
        ("hang", "timeout", "longer than 1.5 s"),
        ("stubborn", "timeout", "longer than 1.5 s"),
    ],
)
def test_a_failure_costs_its_own_sample_only(
    word: str, outcome: str, message: str, patience: float, marked: Marked
) -> None:
    batch = samples(100, word, word)
    with RewardPool(f"{JUDGES}:judge", num_workers=1, timeout_s=1.5, on_error=-9.0) as pool:
        began = time.monotonic()
        results = pool.score_all(batch)
        assert time.monotonic() - began < 1.5 + patience
        for sample, result in zip(batch, results):
            if sample.solution_str == word:
                assert (result.outcome, result.score) == (outcome, -9.0)
                assert message in (result.error or "")
            else:
                assert (result.outcome, result.score) == ("correct", sample.ground_truth)
        assert pool.counters["workers_lost"] == 0
        assert pool.score_all(samples(3))[2].score == 3


def test_each_sample_has_its_own_deadline() -> None:
    """Samples that are submitted one after the other overlap; the deadline counts from each one's own start."""
    with RewardPool(f"{JUDGES}:judge", num_workers=1, timeout_s=1.2) as pool:
        handles = []
        for _ in range(5):
            handles += pool.submit([RewardSample("any", "wait 0.8", 1)])
            time.sleep(0.2)
        assert [handle.result(10).outcome for handle in handles] == ["correct"] * 5


def test_a_callback_is_told_while_others_are_in_flight() -> None:
    finished: list[float] = []
    with RewardPool(f"{JUDGES}:judge", num_workers=1, timeout_s=20) as pool:
        slow, quick = pool.submit([RewardSample("any", "wait 1.5", 1), RewardSample("any", "wait 0.1", 2)])
        for handle in (slow, quick):
            handle.add_done_callback(lambda done: finished.append(done.result().score))
        assert quick.result(10).score == 2
        assert not slow.done()
        assert slow.result(10).score == 1
    assert finished == [2, 1]


def test_a_batch_function_may_be_asynchronous(patience: float) -> None:
    function = RewardFunction(f"{JUDGES}:judge_a_batch", batched=True)
    with RewardPool(function, num_workers=1, timeout_s=20) as pool:
        began = time.monotonic()
        parts = [pool.submit(samples(10)) for _ in range(8)]
        assert [[handle.result(20).score for handle in part] for part in parts] == [list(range(1, 11))] * 8
        assert time.monotonic() - began < 2 * 0.4 + patience
