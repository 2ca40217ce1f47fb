"""The reward pool on its good days: streaming, retries, ceilings, counters, life and death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reward_samples import HOSTILE, samples

from quadriga.errors import ConfigError, RewardError
from quadriga.rewards import RewardFunction, RewardPool, RewardSample, metrics, register_scorer, reward_function

Marked = Callable[[], list[int]]


def test_results_come_in_the_order_of_the_samples(hostile: str) -> None:
    with RewardPool(hostile, num_workers=3) as pool:
        assert [r.score for r in pool.score_all(samples(500))] == list(range(1, 501))
        assert pool.score_all([]) == []


def test_results_are_streamed_as_they_finish(hostile: str) -> None:
    with RewardPool(hostile, num_workers=2, timeout_s=20) as pool:
        handles = pool.submit(samples(20, "nap 1.5"))
        finished = [handles.index(handle) for handle in pool.as_completed(handles, timeout=20)]
        assert finished[-1] == 10
        assert sorted(finished) == list(range(21))


def test_submit_does_not_wait(hostile: str) -> None:
    with RewardPool(hostile, timeout_s=20) as pool:
        began = time.monotonic()
        pool.submit(samples(50, "nap 3"))
        assert time.monotonic() - began < 1.0


def test_a_callback_is_told_of_each_result(hostile: str) -> None:
    told: dict[int, float] = {}
    with RewardPool(hostile) as pool:
        pool.score_all(samples(10), on_result=lambda index, result: told.__setitem__(index, result.score))
    assert told == {k: k + 1 for k in range(10)}


def test_handles_can_be_awaited(hostile: str) -> None:
    async def score() -> float:
        return (await asyncio.wrap_future(pool.submit([RewardSample("any", "honest", 5)])[0])).score

    with RewardPool(hostile) as pool:
        assert asyncio.run(score()) == 5.0


def test_waiting_for_handles_can_time_out(hostile: str) -> None:
    with RewardPool(hostile, timeout_s=20) as pool, pytest.raises(TimeoutError):
        list(pool.as_completed(pool.submit(samples(1, "nap 5")), timeout=0.2))


def test_the_default_function_scores_by_data_source() -> None:
    batch = [
        RewardSample("openai/gsm8k", "#### 5", "5"),
        RewardSample("lighteval/MATH", "\\boxed{0.5}", "\\frac{1}{2}"),
        RewardSample("DigitalLearningGmbH/MATH-lighteval", "\\boxed{3}", "\\frac{1}{2}"),
        RewardSample("countdown", "<answer>1+2</answer>", {"target": 3, "numbers": [1, 2]}),
        RewardSample("arithmetic", "12", "12"),
        RewardSample("svamp", "I do not know", "12"),
    ]
    with RewardPool() as pool:
        results = pool.score_all(batch)
    assert [r.outcome for r in results] == ["correct", "correct", "wrong", "correct", "correct", "unparsed"]
    assert [r.pred for r in results] == ["5", "0.5", "3", "1+2", "12", None]


def test_scorer_options_reach_the_scorer() -> None:
    with RewardPool(reward_function(None, reward_kwargs={"gsm8k": {"method": "flexible"}})) as pool:
        assert pool.score_all([RewardSample("gsm8k", "so it is 5.", "5")])[0].score == 1.0


def test_an_unknown_data_source_lists_the_known_ones() -> None:
    with RewardPool() as pool, pytest.raises(RewardError, match=r"'mystery'.*openai/gsm8k"):
        pool.submit([RewardSample("mystery", "", "")])


def test_a_registered_scorer_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(HOSTILE).parent))
    register_scorer("my/source", "hostile_rewards:behave")
    with RewardPool() as pool:
        assert pool.score_all([RewardSample("my/source", "honest", 3)])[0].score == 3.0


def test_user_code_and_torch_stay_out_of_each_other(marked: Marked) -> None:
    with RewardPool(f"{HOSTILE}:where_it_runs") as pool:
        result = pool.score_all(samples(1))[0]
    assert result.extra["pid"] != os.getpid()
    assert result.extra["has_torch"] is False
    assert not any(name.startswith("hostile_rewards_") for name in sys.modules)


def test_an_async_function_and_its_extras() -> None:
    with RewardPool(f"{HOSTILE}:asynchronous") as pool:
        results = pool.score_all(samples(9))
    assert [r.score for r in results] == list(range(1, 10))
    assert metrics(results)["reward/extra/length"] == len("honest 0")


def test_a_function_with_other_names_is_called_by_position() -> None:
    with RewardPool(f"{HOSTILE}:four_other_names") as pool:
        assert pool.score_all(samples(2))[1].score == 2.0


def test_a_module_that_starts_threads_works_too(tmp_path: Path, marked: Marked) -> None:
    module = tmp_path / "threaded.py"
    module.write_text(
        "import threading, time, os\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if solution_str == 'exit': os._exit(1)\n"
        "    return float(ground_truth)\n"
    )
    with RewardPool(str(module) + ":compute_score", num_workers=2) as pool:
        results = pool.score_all(samples(20, "exit"))
    assert [r.outcome for r in results].count("error") == 1
    assert sum(r.score for r in results) == 210


def test_the_whole_batch_is_one_call_of_a_batch_function() -> None:
    with RewardPool(RewardFunction(f"{HOSTILE}:for_a_batch", batched=True)) as pool:
        assert [r.score for r in pool.score_all(samples(7))] == [1, 2, 3, 4, 5, 6, 7]


def test_retries_only_where_asked(hostile: str, tmp_path: Path) -> None:
    def batch(name: str) -> list[RewardSample]:
        return [RewardSample("any", "fail_the_first_time", 1, {"marker": str(tmp_path / name)})]

    with RewardPool(hostile, max_error_rate=1.0) as pool:
        assert pool.score_all(batch("a"))[0].outcome == "error"
    with RewardPool(hostile, max_retries=1) as pool:
        result = pool.score_all(batch("b"))[0]
        assert (result.outcome, result.attempts) == ("correct", 2)
        assert pool.counters["retries"] == 1


@pytest.mark.parametrize("action", ["throw", "exit_hard", "sleep"])
def test_on_error_stop_ends_the_run_with_the_cause(action: str, hostile: str, marked: Marked) -> None:
    cause = {"throw": "a bug in the reward", "exit_hard": "status 3", "sleep": "longer than 1 s"}[action]
    pool = RewardPool(hostile, on_error="stop", timeout_s=1.0)
    with pytest.raises(RewardError, match=cause):
        pool.score_all(samples(50, action))
    with pytest.raises(RewardError, match=cause):
        pool.submit(samples(1))
    pool.close()
    assert marked() == []


def test_too_many_errors_end_the_run_with_the_first_traceback(hostile: str, marked: Marked) -> None:
    with RewardPool(hostile, max_error_rate=0.2) as pool:
        assert sum(r.failed for r in pool.score_all(samples(8, "throw", "nan"))) == 2
        with pytest.raises(
            RewardError, match=r"(?s)3 of 11 samples.*max_error_rate=0.2.*Traceback.*a bug in the reward"
        ):
            pool.score_all(samples(8, "throw", "throw", "throw"))


def test_too_many_streamed_errors_end_the_run_too(hostile: str) -> None:
    with RewardPool(hostile, max_error_rate=0.5) as pool:
        handles = pool.submit(samples(0, *["throw"] * 200))
        with pytest.raises(RewardError, match="a bug in the reward"):
            [handle.result(20) for handle in handles]


def test_outcomes_are_told_apart_in_metrics_and_counters() -> None:
    batch = [RewardSample("gsm8k", text, "5") for text in ("#### 5", "#### 6", "none", "#### 5")]
    batch.append(RewardSample("gsm8k", "#### 5", "not a number"))
    batch.append(RewardSample("regex", "a" * 40 + "!", "(a+)+$"))
    with RewardPool(timeout_s=1.0) as pool:
        results = pool.score_all(batch)
        found = metrics(results)
        assert pool.counters | {"workers_started": 0, "workers_lost": 0} == {
            "correct": 2, "wrong": 1, "unparsed": 1, "error": 1, "timeout": 1,
            "retries": 0, "workers_started": 0, "workers_lost": 0, "nurseries_lost": 0,
        }  # fmt: skip
    names = ("correct", "wrong", "unparsed", "errors", "timeouts")
    assert [round(found[f"reward/{name}"] * 6) for name in names] == [2, 1, 1, 1, 1]
    assert found["reward/score"] == pytest.approx(2 / 6)


def test_closing_fails_what_is_unfinished(hostile: str, marked: Marked) -> None:
    pool = RewardPool(hostile, timeout_s=100)
    handle = pool.submit(samples(0, "sleep"))[0]
    pool.close()
    pool.close()
    with pytest.raises(RewardError, match="closed"):
        handle.result(1)
    with pytest.raises(RewardError, match="closed"):
        pool.submit(samples(1))
    assert marked() == []


def test_a_fork_of_the_driver_cannot_harm_the_pool(hostile: str) -> None:
    with RewardPool(hostile) as pool:
        pool.score_all(samples(2))
        child = os.fork()
        if child == 0:
            pool.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert pool.score_all(samples(3))[2].score == 3.0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_driver_is_killed_everything_vanishes(number: int, marked: Marked) -> None:
    script = (
        "import sys, time\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "from quadriga.rewards import RewardPool, RewardSample\n"
        f"pool = RewardPool({HOSTILE + ':behave'!r}, timeout_s=1000, num_workers=4)\n"
        "pool.submit([RewardSample('any', w, 1) for w in ('sleep', 'spin', 'daemon_then_hang', 'many_forks')])\n"
        "time.sleep(1.0)\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert driver.stdout is not None
    assert driver.stdout.readline() == b"ready\n"
    assert len(marked()) > 30
    driver.send_signal(number)
    driver.wait()
    driver.stdout.close()
    deadline = time.monotonic() + 5.0
    while marked() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert marked() == []


def test_a_script_that_forgets_to_close_ends_cleanly(marked: Marked) -> None:
    script = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from quadriga.rewards import RewardPool, RewardSample\n"
        "pool = RewardPool()\n"
        "print(pool.score_all([RewardSample('gsm8k', '#### 5', '5')])[0].score)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1.0\n", "")
    assert marked() == []


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"timeout_s": 0},
        {"timeout_s": float("inf")},
        {"max_retries": -1},
        {"on_error": "ignore"},
        {"on_error": float("nan")},
        {"max_error_rate": 1.5},
        {"memory_limit_mb": 1},
        {"chunk_size": 0},
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options: dict[str, object], marked: Marked) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        RewardPool(**options)  # type: ignore[arg-type]


def test_rows_that_cannot_be_sent_are_refused_at_once(hostile: str) -> None:
    with RewardPool(hostile) as pool, pytest.raises(RewardError, match="plain data"):
        pool.submit([RewardSample("any", "honest", lambda: 1)])


def test_it_works_in_a_ray_actor_and_dies_with_it(hostile: str, marked: Marked) -> None:
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level=40, runtime_env={"env_vars": _marks()})
    try:

        class Scorer:
            def __init__(self) -> None:
                self.pool = RewardPool(hostile, timeout_s=1000)

            def score(self, count: int) -> list[float]:
                return [result.score for result in self.pool.score_all(samples(count))]

            def hang(self) -> None:
                self.pool.submit(samples(0, "sleep", "daemon_then_hang"))

        path = os.pathsep.join(filter(None, sys.path))
        scorer: Any = ray.remote(Scorer).options(runtime_env={"env_vars": {"PYTHONPATH": path}}).remote()
        assert ray.get(scorer.score.remote(10), timeout=60) == list(range(1, 11))
        ray.get(scorer.hang.remote(), timeout=60)
        ray.kill(scorer)
        deadline = time.monotonic() + 10.0
        while _pool_processes(marked) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert _pool_processes(marked) == []
    finally:
        ray.shutdown()


def _marks() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("QUADRIGA_TEST_MARK")}


def _pool_processes(marked: Marked) -> list[int]:
    found = []
    for pid in marked():
        try:
            if b"quadriga.rewards" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found
