"""Whatever a reward function does, the batch completes in time, everyone else's score is right, no process stays."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from reward_samples import HOSTILE, samples

from quadriga.errors import RewardError
from quadriga.rewards import RewardFunction, RewardPool

TIMEOUT_S = 1.5
Marked = Callable[[], list[int]]

HAZARDS = {  # action -> (outcome, part of the error message)
    "sleep": ("timeout", "longer than 1.5 s"),
    "spin": ("timeout", "longer than 1.5 s"),
    "fork_and_return": ("correct", None),
    "leave_a_child": ("correct", None),
    "leave_a_daemon": ("correct", None),
    "daemon_then_hang": ("timeout", "longer than 1.5 s"),
    "daemon_then_die": ("error", "status 7"),
    "many_forks": ("timeout", "longer than 1.5 s"),
    "eat_10_gb": ("error", "MemoryError"),
    "segfault": ("error", "SIGSEGV"),
    "exit_hard": ("error", "status 3"),
    "exit_softly": ("error", "I am leaving"),
    "print_megabytes": ("correct", None),
    "close_everything": ("error", "status 1"),
    "nan": ("error", "returned nan"),
    "text": ("error", "returned '1.0', which is no number"),
    "nothing": ("error", "returned None"),
    "list_of_two": ("error", "returned a list"),
    "dict_without_score": ("error", "without 'score'"),
    "throw": ("error", "a bug in the reward function"),
}


@pytest.mark.parametrize("action", HAZARDS)
def test_one_bad_sample_harms_no_other(action: str, hostile: str, marked: Marked, patience: float) -> None:
    outcome, message = HAZARDS[action]
    batch = samples(40, action)
    with RewardPool(hostile, num_workers=2, timeout_s=TIMEOUT_S, on_error=-9.0) as pool:
        began = time.monotonic()
        results = pool.score_all(batch)
        assert time.monotonic() - began < TIMEOUT_S + patience
        for sample, result in zip(batch, results):
            if sample.solution_str == action:
                assert result.outcome == outcome, result
                assert result.score == (-9.0 if message else 1.0)
                assert (message or "") in (result.error or "")
            else:
                assert (result.score, result.outcome) == (sample.ground_truth, "correct")
        # What is left is the pool itself: keeper, zygote and two workers. Orphans are gone within a moment.
        _eventually(lambda: len(marked()) <= 4)
        assert [r.score for r in pool.score_all(samples(5))] == [1, 2, 3, 4, 5]
    assert marked() == []


def test_all_of_them_in_one_batch(hostile: str, marked: Marked, patience: float) -> None:
    batch = samples(200, *HAZARDS)
    with RewardPool(hostile, num_workers=2, timeout_s=TIMEOUT_S) as pool:
        began = time.monotonic()
        results = pool.score_all(batch)
        assert time.monotonic() - began < TIMEOUT_S + patience
        for sample, result in zip(batch, results):
            if sample.solution_str in HAZARDS:
                assert result.outcome == HAZARDS[sample.solution_str][0]
            else:
                assert result.score == sample.ground_truth
        _eventually(lambda: len(marked()) <= 4)


def test_memory_is_counted_over_the_whole_process_tree(hostile: str, marked: Marked) -> None:
    with RewardPool(hostile, timeout_s=20, memory_limit_mb=400) as pool:
        began = time.monotonic()
        results = pool.score_all(samples(10, "children_eat"))
        assert time.monotonic() - began < 10
        failed = [result for result in results if result.failed]
        assert len(failed) == 1
        assert "memory_limit_mb" in (failed[0].error or "")


def test_what_user_code_prints_is_kept_and_cut(hostile: str, tmp_path: Path) -> None:
    log = tmp_path / "reward.log"
    with RewardPool(hostile, log_file=str(log)) as pool:
        pool.score_all(samples(4, "print_megabytes"))
        _eventually(lambda: log.stat().st_size < 5 << 20)
        pool.score_all(samples(4, "print_megabytes"))
        _eventually(lambda: any(part in log.read_bytes() for part in (b"xxx", b"yyy", b"dropped")))


def test_many_hangs_run_out_side_by_side(hostile: str, marked: Marked, patience: float) -> None:
    """One worker, twelve hanging samples: one after the other would take 18 s."""
    batch = samples(300, *["sleep", "spin"] * 6)
    with RewardPool(hostile, num_workers=1, timeout_s=TIMEOUT_S) as pool:
        began = time.monotonic()
        results = pool.score_all(batch)
        assert time.monotonic() - began < TIMEOUT_S + 3 * patience
        assert sum(result.outcome == "timeout" for result in results) == 12
        honest = [(s.ground_truth, r.score) for s, r in zip(batch, results) if s.solution_str.startswith("honest")]
        assert all(truth == score for truth, score in honest)


def test_a_slow_sample_is_waited_for_and_its_worker_comes_back(hostile: str) -> None:
    batch = samples(100, "nap 1.0", "nap 1.2")
    with RewardPool(hostile, num_workers=2, timeout_s=10) as pool:
        results = pool.score_all(batch)
        assert not any(result.failed for result in results)
        assert max(result.seconds for result in results) > 1.1
        assert pool.score_all(samples(3))[2].score == 3


def test_the_clock_does_not_run_while_a_sample_waits_behind_others(hostile: str) -> None:
    batch = samples(0, *["nap 0.1"] * 20)
    with RewardPool(hostile, num_workers=1, timeout_s=0.8, chunk_size=20) as pool:
        assert [result.outcome for result in pool.score_all(batch)] == ["correct"] * 20


@pytest.mark.parametrize(("word", "failed"), [("short", 6), ("sleep", 6), ("nan", 1)])
def test_a_batch_function_that_misbehaves_fails_its_batch_only(word: str, failed: int, marked: Marked) -> None:
    function = RewardFunction(f"{HOSTILE}:for_a_batch", batched=True)
    with RewardPool(function, timeout_s=1.0, max_error_rate=1.0) as pool:
        handles = pool.submit(samples(5, word))
        good = pool.submit(samples(5))
        results = [handle.result(10) for handle in handles]
        assert sum(result.failed for result in results) == failed
        assert [handle.result(10).score for handle in good] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise RuntimeError('broken at import')", "broken at import"),
        ("import no_such_module_anywhere", "no_such_module_anywhere"),
        ("import sys; sys.exit(4)", "SystemExit"),
        ("import os; os._exit(4)", "died"),
        ("import ctypes; ctypes.string_at(0)", "died"),
        ("import time; time.sleep(1000)", "took longer than 1 s"),
        ("x = 1", "has no 'compute_score'"),
        ("def compute_score(a): return 1.0", "it must take"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_before_scoring(
    source: str, message: str, tmp_path: Path, marked: Marked
) -> None:
    module = tmp_path / "mine.py"
    module.write_text(source)
    with pytest.raises(RewardError, match=message):
        RewardPool(f"{module}:compute_score", start_timeout_s=1.0 if "sleep" in source else 30.0)
    assert marked() == []


def _eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)
