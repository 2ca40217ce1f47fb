"""Hundreds of answers that graders fall for: what is right is mostly found right, what is not is never judged right."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import adversarial_code
import adversarial_gsm8k
import adversarial_math
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.errors import DataError
from quadriga.rewards.scorers import code, gsm8k
from quadriga.rewards.scorers import math as math_scorer


def test_mathematics() -> None:
    pairs = adversarial_math.pairs()
    assert len(set(pairs)) >= 400
    judged = [(t, a, math_scorer.score("math", f"Thus $\\boxed{{{a}}}$.", t)["score"] == 1.0) for t, a, _ in pairs]
    assert [pair for pair in judged if pair not in pairs] == []


def test_mathematics_is_judged_alike_both_ways_round() -> None:
    for truth, answer, right in adversarial_math.pairs():
        if not right:
            assert math_scorer.compare(answer, truth) is not True, (answer, truth)


def test_hundreds_of_pairs_of_formulas_that_are_not_the_same() -> None:
    pairs = adversarial_math.unequal_pairs()
    assert len(pairs) >= 800
    both_ways = [(one, other) for one, other in pairs] + [(other, one) for one, other in pairs]
    assert [pair for pair in both_ways if math_scorer.compare(*pair) is True] == []


def test_ordinary_right_answers_are_found_right() -> None:
    pairs = adversarial_math.ordinary_pairs()
    assert len(pairs) >= 150
    assert [pair for pair in pairs if math_scorer.compare(*pair) is not True] == []


def test_references_of_a_dataset_are_right_however_they_are_written(shared_dir: Path) -> None:
    """DeepMath's 4,994, as they stand and with what differs between writers."""
    lines = (shared_dir / "data/deepmath/deepmath_5k.jsonl").read_text().splitlines()
    ways: list[Any] = [
        lambda text: text,
        lambda text: f"${text}$",
        lambda text: f"\n{text}\n",
        lambda text: text.replace("\\frac", "\\dfrac").replace("\\ddfrac", "\\dfrac"),
        lambda text: text.replace("\\left", "").replace("\\right", ""),
        lambda text: re.sub(r"\^(\w)(?!\w)", r"^{\1}", text),
        lambda text: f"x = {text}" if re.fullmatch("-?[0-9]+", text) else text,
        lambda text: f"{text} \\text{{ ways}}" if re.fullmatch("[0-9]+", text) else text,
    ]
    wrong = [
        (truth, way(truth))
        for truth in (json.loads(line)["answer"] for line in lines)
        for way in ways
        if math_scorer.score("deepmath", f"Thus $\\boxed{{{way(truth)}}}$", truth)["score"] != 1.0
    ]
    assert (len(lines), wrong) == (4994, [])


PIECES = [*"0123456789xyfe+-*/^_{}()[],.=<|!% $\\'", "\\frac", "\\sqrt", "\\text", "\\begin", "\\pi"]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=40).map("".join),
    st.text(alphabet="0123456789x+-/^{}(),", max_size=20),
)
def test_no_text_breaks_the_comparison(answer: str, truth: str) -> None:
    assert math_scorer.compare(truth, answer) in (True, False, None)


@pytest.mark.parametrize(
    "answer", ["9^{9^{9^{9}}}", "(10^{10})!", "e^{e^{e^{e^{10}}}}", "\\binom{10^{9}}{10^{8}}", "(" * 900, "2^{" * 300]
)
def test_enormous_numbers_do_not_take_forever(answer: str) -> None:
    assert math_scorer.compare("5", answer) is not True


def test_word_problems() -> None:
    cases = adversarial_gsm8k.CASES
    assert sum(len(right) + len(wrong) for _, right, wrong in cases) >= 200
    for method in ("strict", "flexible"):
        for truth, right, wrong in cases:
            for response in right:
                assert gsm8k.score("gsm8k", response, truth, method=method)["score"] == 1.0, (method, truth, response)
            for response in wrong:
                assert gsm8k.score("gsm8k", response, truth, method=method)["score"] == 0.0, (method, truth, response)


def test_what_stands_beside_a_number_may_make_it_another_one() -> None:
    not_five, not_six = (
        text.strip().replace("\n", "   ").split("   ")
        for text in (adversarial_gsm8k.NOT_FIVE, adversarial_gsm8k.NOT_SIX)
    )
    assert len(set(not_five)) + len(set(not_six)) >= 350
    fooled = [text for text in not_five for method in METHODS if judged_right(f"#### {text}", "5", method)]
    assert fooled + [text for text in not_six if judged_right(text, "6", "flexible")] == []
    for truth, response in adversarial_gsm8k.BESIDE_WORDS:
        assert all(judged_right(response, truth, method) for method in METHODS), response


METHODS = ("strict", "flexible")


def judged_right(response: str, truth: str, method: str) -> bool:
    return gsm8k.score("gsm8k", response, truth, method=method)["score"] == 1.0


def test_word_problems_without_a_number_after_the_marker() -> None:
    for truth, response in adversarial_gsm8k.FLEXIBLE_RIGHT:
        assert gsm8k.score("gsm8k", response, truth, method="flexible")["score"] == 1.0, (truth, response)
    for truth, response in adversarial_gsm8k.FLEXIBLE_WRONG:
        assert gsm8k.score("gsm8k", response, truth, method="flexible")["score"] == 0.0, (truth, response)


def test_rounded_answers_to_hard_numbers() -> None:
    for truth, response in adversarial_gsm8k.GSM_HARD_RIGHT:
        assert gsm8k.score("reasoning-machines/gsm-hard", response, truth)["score"] == 1.0, (truth, response)
    for truth, response in adversarial_gsm8k.GSM_HARD_WRONG:
        assert gsm8k.score("gsm-hard", response, truth)["score"] == 0.0, (truth, response)
    assert gsm8k.score("gsm8k", "#### 58.33", 58.333333333333336)["score"] == 0.0
    assert gsm8k.score("gsm8k", "#### 58.33", 58.333333333333336, rounded=True)["score"] == 1.0


def test_many_hard_numbers_however_they_are_written() -> None:
    chance = random.Random(7)
    for _ in range(60):
        truth = chance.choice([1, -1]) * chance.uniform(0.2, 9.9) * 10 ** chance.randint(0, 9) * (1 + 1e-15)
        right = [f"{truth:.2f}", f"{truth:,.3f}", f"{truth:.13e}", f"{truth:.12f}", repr(truth)]
        wrong = [f"{truth + 0.02:.2f}", f"{-truth:.2f}", f"{truth * 10:.2f}", f"{truth / 10:.2f}", f"{truth:.0f}.5"]
        for number in right:
            assert gsm8k.score("gsm-hard", f"#### {number}", truth)["score"] == 1.0, (truth, number)
        for number in wrong:
            if abs(float(number) - truth) > 0.006:
                assert gsm8k.score("gsm-hard", f"#### {number}", truth)["score"] == 0.0, (truth, number)


def test_labelled_answers_to_grade_school_problems_are_judged_as_labelled(shared_dir: Path) -> None:
    """Four labelled answers to each of the 1,319 test problems: 5,276."""
    answers = [json.loads(line)["answer"] for line in (shared_dir / "data/gsm8k/test.jsonl").read_text().splitlines()]
    agreed = 0
    for answer in answers:
        truth = answer.rpartition("####")[2].strip()
        labelled = [
            (answer, 1.0),
            (answer.replace("#### ", "#### **$") + "**", 1.0),
            (answer + "1", 0.0),
            (answer + f" or {truth}1", 0.0),
        ]
        for response, label in labelled:
            agreed += gsm8k.score("openai/gsm8k", response, truth.replace(",", ""))["score"] == label
    assert (len(answers), agreed) == (1319, 5276)


def test_values_and_printed_texts() -> None:
    pairs = 0
    for compare, cases in ((code.same_value, adversarial_code.VALUES), (code.same_text, adversarial_code.TEXTS)):
        wanted: Any
        for wanted, right, wrong in cases:  # type: ignore[attr-defined]
            pairs += len(right) + len(wrong)
            assert [value for value in right if not compare(wanted, value)] == [], wanted
            assert [value for value in wrong if compare(wanted, value)] == [], wanted
    pairs += sum(len(right) + len(wrong) for _, right, wrong in adversarial_code.ROWS)
    assert pairs >= 200


@pytest.mark.parametrize(("row", "right", "wrong"), adversarial_code.ROWS)
def test_programs(row: Any, right: list[str], wrong: list[str]) -> None:
    for truth in (row, json.dumps(row)):
        for program in right[:1] if truth is not row else right:
            assert code.score("taco", f"```python\n{program}\n```", truth, timeout_s=3.0)["score"] == 1.0, program
    for program in wrong:
        assert code.score("apps", f"```python\n{program}\n```", row, timeout_s=1.5)["score"] == 0.0, program


def test_call_based_rows_as_parquet_gives_them_back() -> None:
    row = {
        "fn_name": "f",
        "inputs": np.array([np.array([1, 2]), np.array([3, 4])], dtype=object),
        "outputs": np.array([[3], [7]]),
    }
    assert code.score("taco", "```python\ndef f(a, b): return a + b\n```", row)["score"] == 1.0


@pytest.mark.parametrize(
    "row",
    [
        {"fn_name": "f", "inputs": [[1]], "outputs": []},
        {"fn_name": "f"},
        {"fn_name": "f", "inputs": ["x y"], "outputs": ["1"]},
    ],
)
def test_a_call_based_row_that_cannot_be_used_is_a_data_error(row: Any) -> None:
    with pytest.raises(DataError, match="function 'f'"):
        code.score("taco", "```python\ndef f(a): return a\n```", row)


def test_a_share_of_the_calls_can_be_right() -> None:
    result = code.score("apps", "```python\ndef add(a, b): return 0\n```", adversarial_code.ADD, partial=True)
    assert result["score"] == pytest.approx(2 / 3)
