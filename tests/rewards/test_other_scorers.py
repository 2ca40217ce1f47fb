"""Countdown, arithmetic, exact and regex match, and the table of data sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quadriga.errors import ConfigError, DataError, RewardError
from quadriga.rewards import known_sources, register_scorer, scorers
from quadriga.rewards.scorers import arithmetic, countdown, match

TASK = {"target": 30, "numbers": [59, 57, 32]}


@pytest.mark.parametrize(
    "response",
    [
        "<answer>32 + (57 - 59)</answer>",
        "<answer> 32+57-59 </answer>",
        "<answer>32 + 57 - 59 = 30</answer>",
        "<answer>30 = 32 + 57 - 59</answer>",
        "<answer>32 + 57 − 59.</answer>",
        "<answer>1+1</answer> no: <answer>[32 + 57] - 59</answer>",
        "so \\boxed{32 + 57 - 59}",
        "#### 32 + 57 - 59",
    ],
)
def test_countdown_accepts_an_expression_that_uses_every_number_once(response: str) -> None:
    result = countdown.score("countdown", response, TASK)
    assert (result["score"], result["parsed"]) == (1.0, True), result


@pytest.mark.parametrize(
    "response",
    [
        "<answer>30</answer>",
        "<answer>32 - 2</answer>",
        "<answer>59 + 57 + 32</answer>",
        "<answer>32 + 57 - 59 + 0</answer>",
        "<answer>32 + 57 - 59 + 59 - 59</answer>",
    ],
)
def test_countdown_refuses_other_numbers_or_another_value(response: str) -> None:
    result = countdown.score("countdown", response, TASK, format_score=0.1)
    assert (result["score"], result["acc"], result["parsed"]) == (0.1, 0.0, True), result


@pytest.mark.parametrize(
    "response",
    [
        "",
        "32 + 57 - 59",
        "<answer></answer>",
        "<answer>I do not know</answer>",
        "<answer>32 ** 57</answer>",
        "<answer>32 // 57</answer>",
        "<answer>__import__('os').system('true')</answer>",
        "<answer>1/0</answer>",
        "<answer>(((32</answer>",
        "<answer>" + "(" * 400 + "1" + ")" * 400 + "</answer>",
        "<answer>3 4</answer>",
        "<answer>32 + 57 - 59 = 31</answer>",
        "<answer>31 = 32 + 57 - 59</answer>",
        "<answer>32 + 57 = 89 - 59 = 30</answer>",
    ],
)
def test_countdown_without_an_expression_is_unparsed(response: str) -> None:
    assert not countdown.score("countdown", response, TASK)["parsed"]


def test_countdown_divides_exactly() -> None:
    truth = {"target": 1, "numbers": np.array([3, 3, 1])}
    assert countdown.score("countdown", "<answer>1 / 3 * 3</answer>", truth)["score"] == 1.0
    fraction = "\\boxed{\\frac{6}{3} \\times 2}"
    assert countdown.score("countdown", fraction, '{"target": 4, "nums": [6, 3, 2]}')["score"] == 1.0


def test_countdown_reference_solutions_score_one(shared_dir: Path) -> None:
    for line in (shared_dir / "data/countdown/test.jsonl").read_text().splitlines():
        row = json.loads(line)
        truth = {"target": row["target"], "numbers": row["nums"]}
        assert countdown.score("countdown", f"<answer>{row['solution']}</answer>", truth)["score"] == 1.0, row


def test_countdown_is_never_fooled_by_what_is_nearly_a_solution(shared_dir: Path) -> None:
    """Twelve wrong answers made of each of fifty solutions: other numbers, another value, a number too many or too few, no sum."""
    lines = (shared_dir / "data/countdown/test.jsonl").read_text().splitlines()[:50]
    fooled = []
    for row in map(json.loads, lines):
        solution, first, target = row["solution"], row["nums"][0], row["target"]
        answers = [
            str(target),
            f"{solution} + 0",
            f"{solution} + 1",
            f"({solution}) * 1",
            f"({solution}) + {first} - {first}",
            f"{solution} = {target + 1}",
            f"{target} - 1 = {solution}",
            f"{solution}, {solution}",
            f"{solution}!",
            f"{target} # {solution}",
            f"-({solution})",
            f"{solution} // 1",
        ]
        truth = {"target": target, "numbers": row["nums"]}
        fooled += [a for a in answers if countdown.score("countdown", f"<answer>{a}</answer>", truth)["score"] != 0]
    assert (len(lines), fooled) == (50, [])


@pytest.mark.parametrize("truth", ["30", {"target": 30}, [1, 2], {"target": "x", "numbers": [1]}])
def test_countdown_without_a_task_is_a_data_error(truth: Any) -> None:
    with pytest.raises(DataError, match="target and numbers"):
        countdown.score("countdown", "<answer>1</answer>", truth)


@pytest.mark.parametrize(
    ("response", "score"), [("19", 1.0), (" 19\n", 1.0), ("#### 19", 1.0), ("12+7=19", 1.0), ("91", 0.0)]
)
def test_arithmetic_takes_the_stated_number(response: str, score: float) -> None:
    assert arithmetic.score("arithmetic", response, "19")["score"] == score


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("Paris", "Paris", 1.0),
        ("  Paris \n", "Paris", 1.0),
        ("I think <answer>Paris</answer>", "Paris", 1.0),
        ("so \\boxed{B}", ["A", "B"], 1.0),
        ("paris", "Paris", 0.0),
        ("Paris, France", "Paris", 0.0),
        ("7", 7, 1.0),
    ],
)
def test_exact_match(response: str, truth: Any, score: float) -> None:
    assert match.score_exact("exact", response, truth)["score"] == score


def test_exact_match_can_ignore_case_and_knows_empty_answers() -> None:
    assert match.score_exact("exact", "PARIS", "Paris", ignore_case=True)["score"] == 1.0
    assert not match.score_exact("exact", " ", "Paris")["parsed"]


def test_regex_match() -> None:
    assert match.score_regex("regex", "call 555-1234 now", r"\d{3}-\d{4}")["pred"] == "555-1234"
    assert match.score_regex("regex", "call 555-1234 now", r"\d{3}-\d{4}", full=True)["score"] == 0.0
    with pytest.raises(DataError, match="regular expression"):
        match.score_regex("regex", "x", "(")


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("gsm8k", "gsm8k"),
        ("svamp", "gsm8k"),
        ("lighteval/MATH", "math"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("countdown", "countdown"),
        ("arithmetic", "arithmetic"),
        ("mbpp", "code"),
        ("openai/openai_humaneval", "code"),
    ],
)
def test_every_spelling_of_a_data_source_finds_its_scorer(source: str, module: str) -> None:
    assert scorers.target_of(source).partition(":")[0].rpartition(".")[2] == module


def test_an_unknown_source_lists_the_known_ones_and_the_way_out() -> None:
    with pytest.raises(RewardError) as caught:
        scorers.score("who/knows", "", "")
    assert "'who/knows'" in str(caught.value)
    assert "custom_reward_function.path" in str(caught.value)
    assert all(source in str(caught.value) for source in ("openai/gsm8k", "lighteval/math", "countdown"))


def test_every_known_source_can_be_loaded() -> None:
    for module in scorers.modules_for(known_sources()):
        __import__(module)


def test_options_are_checked_by_name() -> None:
    scorers.check_options({"gsm8k": {"method": "flexible"}, "code": {"partial": True}})
    with pytest.raises(ConfigError, match=r"no option 'mehtod'.*\n.*method"):
        scorers.check_options({"gsm8k": {"mehtod": "flexible"}})
    with pytest.raises(ConfigError, match="unknown scorer 'gsm9k'"):
        scorers.check_options({"gsm9k": {}})
    with pytest.raises(ConfigError, match=r"package\.module:function"):
        register_scorer("mine", "not_a_target")
