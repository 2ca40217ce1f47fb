"""Every task of reasoning-gym becomes rows that its own verifier judges in the scoring pool."""

from __future__ import annotations

import json
from typing import Any

import pyarrow.parquet as pq
import pytest

reasoning_gym = pytest.importorskip("reasoning_gym", reason="needs the extra quadriga[reasoning_gym]")

from quadriga.commands.prep import main  # noqa: E402
from quadriga.data.prep.reasoning_gym import generate_reasoning_gym, task_names  # noqa: E402
from quadriga.errors import ConfigError, DataError  # noqa: E402
from quadriga.rewards import RewardPool, RewardSample  # noqa: E402
from quadriga.rewards.scorers import score  # noqa: E402

# Several answers are right, or none is told: the entry's own answer does not stand for them.
OPEN = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
TAKES_ANYTHING_FOR_A_NO = {"game_of_life_halting"}
SLOW = {"knight_swap", "intermediate_integration", "quantum_lock", "sudoku", "arc_agi"}


def judged(row: dict[str, Any], text: str) -> dict[str, Any]:
    return score(row["data_source"], text, row["reward_model"]["ground_truth"], row["extra_info"])


def answer_of(row: dict[str, Any]) -> Any:
    return json.loads(row["reward_model"]["ground_truth"])["entry"]["answer"]


@pytest.mark.parametrize("task", [task for task in task_names() if task not in SLOW])
def test_every_task_knows_its_own_answer_and_refuses_nonsense(task):
    (row,), _ = generate_reasoning_gym([task], train_size=1, test_size=1, seed=3)
    assert row["prompt"][0]["content"].endswith("</answer>.")
    nonsense = judged(row, "<answer>zzz</answer>")
    assert nonsense["acc"] == 0.0 or task in TAKES_ANYTHING_FOR_A_NO
    if task not in OPEN:
        right = judged(row, f"So it is <answer>{answer_of(row)}</answer>.")
        assert right["score"] == right["acc"] == 1.0


def test_there_are_more_than_a_hundred():
    assert len(task_names()) >= 105
    assert "composite" not in task_names()


def test_the_command_writes_rows_that_the_pool_scores(tmp_path, capsys):
    tasks = ["chain_sum", "gcd", "prime_factorization"]
    command = ["reasoning_gym", "--task", ",".join(tasks), "--train-size", "12", "--test-size", "6", "--seed", "5"]
    assert main([*command, "--set", "chain_sum.max_terms=3", "--output", str(tmp_path)]) == 0
    assert "train.parquet: 12 rows" in capsys.readouterr().out
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert [row["data_source"] for row in rows[:4]] == [f"reasoning_gym/{task}" for task in [*tasks, tasks[0]]]
    assert all(json.loads(row["reward_model"]["ground_truth"])["config"] == {"max_terms": 3} for row in rows[::3])
    test = {row["extra_info"]["question"] for row in pq.read_table(tmp_path / "test.parquet").to_pylist()}
    assert not test & {row["extra_info"]["question"] for row in rows}
    samples = []
    for row in rows:
        for text in (f"<answer>{answer_of(row)}</answer>", "<answer>x</answer>", "I do not know."):
            samples.append(
                RewardSample(row["data_source"], text, row["reward_model"]["ground_truth"], row["extra_info"])
            )
    with RewardPool(num_workers=2, timeout_s=30) as pool:
        results = pool.score_all(samples)
    assert [result.outcome for result in results[::3]] == ["correct"] * 12
    assert {result.acc for result in results[1::3]} == {0.0}
    assert {result.outcome for result in results[2::3]} == {"unparsed"}
    # The verifier of this task raises where it finds no number: a wrong answer, and counted.
    assert [result.extra["verifier_error"] for result in results[7::9]] == [1.0] * 4


def test_the_same_seed_writes_the_same_rows_and_another_one_does_not():
    one, again, other = (generate_reasoning_gym(["chain_sum"], train_size=5, test_size=5, seed=s) for s in (1, 1, 2))
    assert one == again
    assert one != other


def test_the_answer_may_be_boxed_or_behind_hashes():
    (row,), _ = generate_reasoning_gym(["gcd"], train_size=1, test_size=1)
    for text in (
        f"\\boxed{{{answer_of(row)}}}",
        f"#### {answer_of(row)}",
        f"<answer>1</answer><answer> {answer_of(row)} </answer>",
    ):
        assert judged(row, text)["acc"] == 1.0
    assert judged(row, answer_of(row))["parsed"] is False


def test_partial_credit_can_be_switched_off():
    (row,), _ = generate_reasoning_gym(["chain_sum"], train_size=1, test_size=1)
    truth = row["reward_model"]["ground_truth"]
    text = f"<answer>{answer_of(row)} or so</answer>"
    some = score(row["data_source"], text, truth)
    none = score(row["data_source"], text, truth, options={"reasoning_gym": {"partial": False}})
    assert 0.0 < some["score"] < 1.0
    assert none["score"] == 0.0


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--task", "chain_sums"], "no task 'chain_sums'"),
        (["--task", "composite"], "no task 'composite'"),
        (["--task", "gcd,gcd"], "one twice"),
        (["--task", "gcd", "--set", "gcd.nothing=1"], "unexpected keyword argument 'nothing'"),
        (["--task", "gcd", "--set", "gcd.min_numbers=0"], "cannot make the task 'gcd'"),
        (["--task", "gcd", "--set", "lcm.min_numbers=2"], "'lcm' is configured, but it is not in --task"),
        (["--task", "gcd", "--set", "min_numbers=2"], "not TASK.FIELD=VALUE"),
        (["--task", "gcd,lcm", "--test-size", "1"], "do not give every task a row"),
        (
            ["--task", "coin_flip", "--set", "coin_flip.max_trials=4", "--set", "coin_flip.min_trials=4"],
            "too few different problems",
        ),
    ],
)
def test_what_cannot_be_made_is_refused(tmp_path, words, what):
    with pytest.raises(DataError, match=what):
        main(["reasoning_gym", *words, "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_rows_that_the_command_has_not_written_are_refused():
    with pytest.raises(DataError, match="is no entry of reasoning-gym"):
        score("reasoning_gym/gcd", "<answer>1</answer>", "42")
    truth = json.dumps({"entry": {"metadata": {"source_dataset": "gcd"}}, "config": {}})
    with pytest.raises(ConfigError, match="cannot make the task 'absent'"):
        score("reasoning_gym/absent", "<answer>1</answer>", truth)
