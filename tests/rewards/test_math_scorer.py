"""MATH: the last balanced box, compared for equivalence."""

from __future__ import annotations

import threading

import pytest

from quadriga.errors import DataError
from quadriga.rewards.scorers import math as math_scorer
from quadriga.rewards.scorers.extract import last_boxed

EQUIVALENT = [  # (reference, answer)
    ("42", "42"),
    ("42", "42."),
    ("42", " 42 "),
    ("42", "42.0"),
    ("1234", "1,234"),
    ("10,000", "10000"),
    ("\\frac{1}{2}", "\\dfrac{1}{2}"),
    ("\\frac{1}{2}", "\\tfrac12"),
    ("\\frac{1}{2}", "0.5"),
    ("\\frac{1}{2}", "1/2"),
    ("\\frac{2}{4}", "\\frac{1}{2}"),
    ("0.25", "\\frac{1}{4}"),
    ("-\\frac{1}{8}", "-0.125"),
    ("\\sqrt{8}", "2\\sqrt{2}"),
    ("\\sqrt{2}", "\\sqrt2"),
    ("\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt{2}}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("x^2 - 1", "(x-1)(x+1)"),
    ("2x + 3", "3 + 2x"),
    ("\\frac{x}{2}", "0.5x"),
    ("\\pi", "\\pi"),
    ("2\\pi", "\\pi \\cdot 2"),
    ("e^{2}", "e^2"),
    ("(1, 2)", "(1,2)"),
    ("(3, \\frac{\\pi}{2})", "\\left( 3, \\frac{\\pi}{2} \\right)"),
    ("\\{1, 2, 3\\}", "\\{3, 2, 1\\}"),
    ("[0, 1]", "\\left[0, 1\\right]"),
    ("(-\\infty, 2)", "(-\\infty,2)"),
    ("2^{10}", "1024"),
    ("\\log 100", "\\log(100)"),
    ("6 - 5i", "6-5i"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ("\\begin{pmatrix} 1 \\\\ 0.5 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ \\frac{1}{2} \\end{pmatrix}"),
    ("x = 5", "5"),
    ("5!", "120"),
    ("\\text{(A)}", "\\text{(A)}"),
    ("\\frac{3}{2}", "1.5"),
    ("3\\sqrt{5}", "\\sqrt{45}"),
    ("\\frac{a+b}{2}", "\\frac{b+a}{2}"),
    ("11\\sqrt2", "11\\sqrt{2}"),
]

DIFFERENT = [
    ("42", "43"),
    ("42", "-42"),
    ("\\frac{1}{2}", "\\frac{1}{3}"),
    ("\\frac{1}{2}", "2"),
    ("0.333", "\\frac{1}{3}"),
    ("\\sqrt{2}", "\\sqrt{3}"),
    ("x^2", "x^3"),
    ("x + 1", "x - 1"),
    ("(1, 2)", "(2, 1)"),
    ("\\{1, 2\\}", "\\{1, 3\\}"),
    ("[0, 1]", "(0, 1)"),
    ("(-\\infty, 2)", "(-\\infty, 2]"),
    ("2\\pi", "\\pi"),
    ("6 - 5i", "6 + 5i"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 2 \\\\ 1 \\end{pmatrix}"),
    ("x = 5", "6"),
    ("x", "y"),
    ("2^{10}", "2^{11}"),
    ("\\text{(A)}", "\\text{(B)}"),
    ("1234", "1,235"),
]


def test_the_two_lists_have_sixty_pairs() -> None:
    assert (len(EQUIVALENT) + len(DIFFERENT), len(DIFFERENT)) == (60, 20)


@pytest.mark.parametrize(("truth", "answer"), EQUIVALENT)
def test_equivalent_answers_score_one(truth: str, answer: str) -> None:
    result = math_scorer.score("lighteval/MATH", f"Therefore the answer is $\\boxed{{{answer}}}$.", truth)
    assert result["score"] == 1.0, result


@pytest.mark.parametrize(("truth", "answer"), DIFFERENT)
def test_different_answers_score_zero(truth: str, answer: str) -> None:
    result = math_scorer.score("lighteval/MATH", f"Therefore the answer is $\\boxed{{{answer}}}$.", truth)
    assert (result["score"], result["parsed"]) == (0.0, True), result


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\boxed{1} and then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\fbox{7}", "7"),
        ("\\boxed{\\boxed{7}}", "7"),
        ("\\boxed {7}", "7"),
        ("$\\boxed 7$", "7"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{1} and then \\boxed{2", "1"),
        ("\\boxed{2", None),
        ("no box", None),
    ],
)
def test_the_last_balanced_box_is_the_answer(text: str, found: str | None) -> None:
    assert last_boxed(text) == found


def test_without_a_box_the_answer_is_unparsed() -> None:
    assert not math_scorer.score("math", "the answer is 42", "42")["parsed"]


@pytest.mark.parametrize(
    ("response", "score", "parsed"),
    [
        ("So it is 34.\n\nAnswer: 34", 1.0, True),
        ("Answer: $34$", 1.0, True),
        ("answer:34.\n", 1.0, True),
        ("**Answer:** 34", 1.0, True),
        ("**Final Answer**: **34**", 1.0, True),
        ("The answer is: $\\frac{68}{2}$", 1.0, True),
        ("Answer: 12\nNo.\nAnswer: 34", 1.0, True),
        ("Answer: 12, so\n\\boxed{34}", 1.0, True),
        ("Answer: 34\nAnswer: 12", 0.0, True),
        ("Answer: 35", 0.0, True),
        ("Answer: 3 4", 0.0, False),
        ("Answer: 34 or 35", 0.0, True),
        ("Answer: not 34", 0.0, False),
        ("Answer:\n34", 0.0, False),
        ("Answer:", 0.0, False),
        ("My Answer: 34", 0.0, False),
        ("Answer: 34\n\\boxed{12", 0.0, False),
        ("The answer of step 1: 34", 0.0, False),
    ],
)
def test_dapos_prompts_ask_for_a_line_that_begins_with_answer(response: str, score: float, parsed: bool) -> None:
    result = math_scorer.score("math_dapo", response, "34")
    assert (result["score"], result["parsed"]) == (score, parsed), result


def test_the_reference_may_be_a_whole_solution() -> None:
    assert math_scorer.score("math", "\\boxed{0.5}", "We get $\\boxed{\\frac{1}{2}}$.")["score"] == 1.0


def test_a_reference_without_an_answer_is_a_data_error() -> None:
    with pytest.raises(DataError, match="holds no answer"):
        math_scorer.score("math", "\\boxed{1}", "")


def test_it_works_outside_the_main_thread() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(math_scorer.compute_score("\\boxed{0.75}", "\\frac{3}{4}")))
    thread.start()
    thread.join()
    assert scores == [1.0]


@pytest.mark.parametrize(
    ("truth", "answer"),
    [("\\ln 5", "\\log 5"), ("2", "1/2x"), ("3 \\text{ apples}", "3"), ("\\{1\\}", "1"), ("5", "\\int_0^5 dx")],
)
def test_what_cannot_be_compared_is_unparsed_not_wrong(truth: str, answer: str) -> None:
    result = math_scorer.score("math", f"$\\boxed{{{answer}}}$", truth, format_score=0.1)
    assert (result["score"], result["parsed"], result["pred"]) == (0.0, False, answer)
