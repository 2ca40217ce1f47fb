"""Naming a reward function, and what may come out of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_samples import HOSTILE

from quadriga.errors import ConfigError, RewardError
from quadriga.rewards import RewardPool, RewardSample, metrics, reward_function
from quadriga.rewards.functions import from_callable
from quadriga.rewards.result import RewardResult, clean


def top_level(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], bonus: float = 0.0
) -> float:
    return float(ground_truth) + bonus


def test_a_file_and_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", str(tmp_path))
    (tmp_path / "mine.py").write_text("")
    expected = f"{tmp_path}/mine.py:fn"
    assert reward_function(f"{tmp_path}/mine.py", "fn").target == expected
    assert reward_function(f"{tmp_path}/mine.py:fn").target == expected
    assert reward_function("$WHERE/mine.py", "fn").target == expected
    assert reward_function("pkg.mod:fn").target == "pkg.mod:fn"
    assert reward_function("pkg.mod", "fn").target == "pkg.mod:fn"


def test_a_missing_file_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"custom_reward_function\.path.*/no/such/file\.py"):
        reward_function("/no/such/file.py", "fn")


def test_keyword_arguments_reach_the_function() -> None:
    with RewardPool(from_callable(top_level, {"bonus": 0.5})) as pool:
        assert pool.score_all([RewardSample("any", "", 1)])[0].score == 1.5


def test_a_function_that_imports_verl_is_told_how_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUADRIGA_COMPAT_VERL", raising=False)
    body = "from verl.utils.reward_score import gsm8k\ndef fn(*, solution_str, **rest): return len(solution_str)"
    file = tmp_path / "mine.py"
    file.write_text(body)
    with pytest.raises(RewardError, match="written for verl"):
        RewardPool(reward_function(str(file), "fn"))
    file.write_text(f"import quadriga.compat.verl\n{body}")
    with RewardPool(reward_function(str(file), "fn")) as pool:
        assert pool.score_all([RewardSample("any", "right", 1)])[0].score == 5.0


def test_lambdas_closures_and_methods_score() -> None:
    worth = {"right": 2.0}

    def closure(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
        return worth.get(solution_str, 0.0)

    class Scorer:
        factor = 3.0

        def score(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
            return self.factor

    expected: list[tuple[Any, float]] = [(closure, 2.0), (lambda *given: 1.0, 1.0), (Scorer().score, 3.0)]
    for function, score in expected:
        with RewardPool(function, num_workers=1) as pool:
            assert pool.score_all([RewardSample("any", "right", 1)])[0].score == score


def test_a_function_that_holds_on_to_what_cannot_travel_is_refused() -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent to the scoring processes"):
        RewardPool(lambda *given: float(lock.locked()))


def test_a_function_of_the_script_itself_works(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from quadriga.rewards import RewardPool, RewardSample\n"
        "def mine(data_source, solution_str, ground_truth, extra_info): return 7.0\n"
        "if __name__ == '__main__':\n"
        "    with RewardPool(mine) as pool: print(pool.score_all([RewardSample('a', 'b')])[0].score)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("7.0\n", "")


def test_a_file_can_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("VALUE = 4.0\n")
    (tmp_path / "mine.py").write_text("import neighbour_of_mine\ndef fn(**given): return neighbour_of_mine.VALUE\n")
    with RewardPool(f"{tmp_path}/mine.py:fn") as pool:
        assert pool.score_all([RewardSample("a", "b")])[0].score == 4.0


def test_rows_with_arrays_arrive_whole() -> None:
    with RewardPool(f"{HOSTILE}:behave") as pool:
        assert pool.score_all([RewardSample("any", "honest", np.float64(2.5), {"a": np.arange(3)})])[0].score == 2.5


@pytest.mark.parametrize(
    ("value", "score"),
    [(1, 1.0), (True, 1.0), (0.25, 0.25), (np.float32(0.5), 0.5), (torch.tensor(2.0), 2.0), ({"score": 3}, 3.0)],
)
def test_any_number_is_a_score(value: Any, score: float) -> None:
    assert clean(value)["score"] == score


@pytest.mark.parametrize(
    "value", ["1", b"1", None, [1.0], float("nan"), float("inf"), {}, {"score": "1"}, {"score": None}]
)
def test_anything_else_is_not(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="returned"):
        clean(value)


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        (1.0, "correct"),
        (0.0, "wrong"),
        (-1.0, "wrong"),
        ({"score": 0.1, "acc": 0}, "wrong"),
        ({"score": 0.0, "acc": 1}, "correct"),
        ({"score": 0.0, "parsed": False}, "unparsed"),
    ],
)
def test_right_wrong_and_unparsed_are_told_apart(value: Any, outcome: str) -> None:
    assert clean(value)["outcome"] == outcome


def test_extras_become_plain_data_and_metrics() -> None:
    value = {
        "score": 1.0,
        "pred": 5,
        "tokens": np.int64(3),
        "flag": True,
        "note": "x",
        "odd": object,
        "mean": torch.tensor(0.5),
    }
    found = clean(value)
    assert found["pred"] == "5"
    assert found["extra"] == {"tokens": 3, "flag": True, "note": "x", "odd": repr(object), "mean": 0.5}
    results = [RewardResult(1.0, "correct", extra=found["extra"]), RewardResult(0.0, "wrong", extra={"tokens": 5})]
    told = metrics(results)
    assert told["reward/extra/tokens"] == 4.0
    assert told["reward/extra/flag"] == 1.0
    assert "reward/extra/note" not in told
    assert told["reward/correct"] + told["reward/wrong"] == 1.0
    assert metrics([]) == {}


FOR_ROWS_WITH_COLUMNS = """
def by_name(solution_str, answer, level=1): return {"score": float(answer), "level": level}
def with_all(data_source, solution_str, ground_truth, extra_info, answer): return float(answer) + len(extra_info)
def anything(**given): return {"score": float(given["answer"]), "names": len(given)}
def rest(solution_str, **others): return float(others["answer"] + others["bonus"])
def keyword_only(*, solution_str, answer): return float(answer)
def many(solution_strs, answer): return [float(number) for number in answer]
async def waiting(solution_str, answer): return float(answer)
def trl(completions, answer): return [1.0]
def one(text): return 1.0
def five(a, b, c, d, e): return 1.0
def missing(solution_str, anwser): return 1.0
"""


@pytest.fixture(scope="module")
def rows_module(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("rows") / "mine.py"
    file.write_text(FOR_ROWS_WITH_COLUMNS)
    return str(file)


@pytest.mark.parametrize(
    ("name", "kwargs", "score"),
    [
        ("by_name", {}, 3.0),
        ("with_all", {}, 5.0),
        ("anything", {}, 3.0),
        ("rest", {"bonus": 2}, 5.0),
        ("keyword_only", {}, 3.0),
        ("waiting", {}, 3.0),
    ],
)
def test_parameters_are_filled_from_the_columns_of_the_row(
    name: str, kwargs: dict[str, Any], score: float, rows_module: str
) -> None:
    with RewardPool(reward_function(rows_module, name, kwargs)) as pool:
        result = pool.score_all([RewardSample("any", "text", None, {"answer": 3, "level": 7})])[0]
        assert (result.score, result.error) == (score, None)
        if name == "by_name":
            assert result.extra["level"] == 7


def test_a_batch_function_is_given_columns_as_lists(rows_module: str) -> None:
    with RewardPool(reward_function(rows_module, "many", batched=True)) as pool:
        rows = [RewardSample("any", "text", None, {"answer": k}) for k in (1, 2, 3)]
        assert [result.score for result in pool.score_all(rows)] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("name", ["trl", "one", "five"])
def test_a_signature_that_does_not_fit_is_explained_with_the_expected_one(name: str, rows_module: str) -> None:
    expected = r"(?s)takes \(.*which does not fit.*data_source, solution_str, ground_truth, extra_info.*column"
    with pytest.raises(RewardError, match=expected):
        RewardPool(reward_function(rows_module, name))


def test_a_parameter_that_no_column_fills_is_told_before_the_run_and_by_the_first_sample(rows_module: str) -> None:
    with RewardPool(reward_function(rows_module, "missing")) as pool:
        row = {"data_source": "custom", "raw_prompt": "2+1=", "answer": 3, "extra_info": {"level": 1}}
        with pytest.raises(ConfigError, match=r"(?s)'anwser'.*answer, level, prompt"):
            pool.check_row(row)
        pool.check_row({**row, "anwser": 3})
        with pytest.raises(RewardError, match="'anwser'"):
            pool.score_all([RewardSample("any", "text", None, {"answer": 3})])


def test_extras_that_nothing_could_hold_or_write_become_text() -> None:
    cleaned = clean({"score": 1.0, "pred": "a\ud800b", "huge": 10**400, "half": "\udfff", "key\ud800": 1})
    assert cleaned["extra"]["huge"] == "a whole number of 1329 bits"
    assert (cleaned["pred"], cleaned["extra"]["half"]) == ("a?b", "?")
    assert metrics([RewardResult(1.0, "correct", extra=cleaned["extra"])])["reward/score"] == 1.0
    for name in cleaned["extra"]:
        name.encode()
