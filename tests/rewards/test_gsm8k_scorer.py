"""GSM8K: the number after the last ####, compared exactly."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.errors import ConfigError, DataError
from quadriga.rewards.scorers import gsm8k

RIGHT = [  # (response, ground truth)
    ("#### 72", "72"),
    ("####72", "72"),
    ("####   72", "72"),
    ("####\n72", "72"),
    ("#### 72.", "72"),
    ("#### 72.00", "72"),
    ("#### 72.0.", "72"),
    ("#### $72", "72"),
    ("#### $ 72", "72"),
    ("#### \\$72", "72"),
    ("#### 72$", "72"),
    ("#### 72%", "72"),
    ("#### 72\\%", "72"),
    ("#### €72", "72"),
    ("#### 1,234", "1234"),
    ("#### 1,234,567.50", "1234567.5"),
    ("#### 1{,}234", "1234"),
    ("#### 1,\\!234", "1234"),
    ("#### 1\\,234", "1234"),
    ("#### **72**", "72"),
    ("#### __72__", "72"),
    ("#### `72`", "72"),
    ("#### \\boxed{72}", "72"),
    ("#### $\\boxed{72}$", "72"),
    ("#### **\\boxed{1,000}**", "1000"),
    ("#### \\(72\\)", "72"),
    ("#### (72)", "72"),
    ("#### -5", "-5"),
    ("#### −5", "-5"),
    ("#### -$5", "-5"),
    ("#### $-5", "-5"),
    ("#### +5", "5"),
    ("#### .5", "0.5"),
    ("#### 0.50", ".5"),
    ("#### 1/2", "0.5"),
    ("#### \\frac{1}{2}", "0.5"),
    ("#### 72 clips", "72"),
    ("#### 72 clips in 3 days", "72"),
    ("#### 72, which is 8 times 9", "72"),
    ("#### 20kg", "20"),
    ("#### 3 + 4 = 7", "7"),
    ("#### x = 7", "7"),
    ("#### Total = $1,234.", "1234"),
    ("#### 007", "7"),
    ("first #### 5\nno, wait.\n#### 6", "6"),
    ("#### 42" + " and so on" * 100, "42"),
    ("padding " * 1000 + "#### 42", "42"),
    ("#### 72", 72),
    ("#### 51", 51.0),
    ("#### 70000", "70,000"),
    ("#### 18", "She makes 9 * 2 = $<<9*2=18>>18.\n#### 18"),
    ("#### 0.1", 0.1),
    ("#### 123456789012345678901234567890", "123456789012345678901234567890"),
]

WRONG = [
    ("#### 71", "72"),
    ("#### 7.2", "72"),
    ("#### -72", "72"),
    ("#### 72.01", "72"),
    ("#### 0.3333333333333333", "1/3"),
    ("#### 123456789012345678901234567891", "123456789012345678901234567890"),
    ("#### 6\nno, wait.\n#### 5", "6"),
    ("#### 1/2", "1"),
    ("#### " + "9" * 1000, "9"),
]

UNPARSED = [
    "",
    "72",
    "The answer is 72.",
    "####",
    "#### ",
    "#### seventy-two",
    "#### the answer is 72",
    "#### 5 x 4",
    "#### 5-10",
    "#### 1, 2, 3",
    "#### 1,2",
    "#### 12,5",
    "#### 1.2.3",
    "#### 5:30",
    "#### 5k",
    "#### 72\n####",
    "\\boxed{72}",
]


@pytest.mark.parametrize(("response", "truth"), RIGHT)
def test_a_right_answer_scores_one_however_it_is_written(response: str, truth: object) -> None:
    result = gsm8k.score("gsm8k", response, truth)
    assert result["score"] == result["acc"] == 1.0, result
    assert result["parsed"]


@pytest.mark.parametrize(("response", "truth"), WRONG)
def test_a_wrong_number_scores_zero_but_is_parsed(response: str, truth: str) -> None:
    result = gsm8k.score("gsm8k", response, truth)
    assert (result["score"], result["parsed"]) == (0.0, True), result


@pytest.mark.parametrize("response", UNPARSED)
def test_what_is_no_number_after_hashes_is_unparsed(response: str) -> None:
    assert gsm8k.score("gsm8k", response, "72") == {"score": 0.0, "acc": 0.0, "pred": None, "parsed": False}


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("The answer is 72.", "72"),
        ("so she has 10-5=5 left", "5"),
        ("It costs $1,234.50!", "1234.50"),
        ("the change is -3", "-3"),
        ("first 7 then (8)", "8"),
        ("#### 5 and then 9", None),
        ("#### seventy, that is 70", "70"),
        ("\\boxed{1{,}234}", "1234"),
        ("no number at all", None),
    ],
)
def test_flexible_falls_back_to_the_last_number(response: str, found: str | None) -> None:
    assert gsm8k.extract_solution(response, "flexible") == found


def test_every_reference_answer_of_the_training_set_scores_one(shared_dir: Path) -> None:
    lines = (shared_dir / "data/gsm8k/train.jsonl").read_text().splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    assert len(answers) == 7473
    scores = [
        gsm8k.score("openai/gsm8k", a, a.rpartition("####")[2].strip().replace(",", ""))["score"] for a in answers
    ]
    assert scores == [1.0] * 7473


def test_functional_form_gives_full_format_and_no_score() -> None:
    assert gsm8k.compute_score("#### 5", "5") == 1.0
    assert gsm8k.compute_score("#### 6", "5", format_score=0.1) == 0.1
    assert gsm8k.compute_score("so 5", "5", format_score=0.1) == 0.0
    assert gsm8k.compute_score("so 5", "5", method="flexible", score=2.0) == 2.0
    assert gsm8k.extract_solution("#### 1,234.") == "1234"


def test_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="strict, flexible"):
        gsm8k.extract_solution("#### 5", "loose")


def test_a_ground_truth_that_is_no_number_is_a_data_error() -> None:
    with pytest.raises(DataError, match="not a number"):
        gsm8k.score("gsm8k", "#### 5", "five")


@given(st.integers(-(10**12), 10**12), st.integers(0, 10**6), st.booleans(), st.text(alphabet="ab. #\n", max_size=400))
def test_any_decimal_is_found_again_exactly(whole: int, decimals: int, commas: bool, before: str) -> None:
    number = f"{whole:,}.{decimals}" if commas else f"{whole}.{decimals}"
    plain = gsm8k.extract_solution(f"{before}\n#### {number}")
    assert plain is not None
    assert gsm8k.value_of(plain) == Fraction(number.replace(",", ""))


@given(st.text(max_size=300))
def test_no_text_breaks_the_scorer(text: str) -> None:
    for method in ("strict", "flexible"):
        gsm8k.score("gsm8k", text, "1", method=method)
        gsm8k.score("gsm8k", "#### " + text, "1", method=method)
