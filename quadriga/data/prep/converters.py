"""How an example of each public dataset becomes a row. A converter is `(example, split, index) -> row`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quadriga.data.files import Row
from quadriga.data.prep.sources import make_row, user_turn
from quadriga.errors import DataError
from quadriga.rewards.scorers.extract import last_boxed

AFTER_HASHES = 'Let\'s think step by step and output the final answer after "####".'
IN_BOX = "Let's think step by step and output the final answer within \\boxed{}."


@dataclass(frozen=True)
class Converter:
    """A public dataset: where it lives on the hub and how its examples are turned into rows."""

    hub_name: str | None
    hub_config: str | None
    convert: Callable[[Row, str, int], Row]
    about: str


def gsm8k(example: Row, split: str, index: int) -> Row:
    question, answer = _text(example, "question"), _text(example, "answer")
    if "####" not in answer:
        raise _bad("answer", "has no '####' before the result")
    return make_row(
        data_source="openai/gsm8k",
        prompt=user_turn(f"{question} {AFTER_HASHES}"),
        ability="math",
        ground_truth=answer.rsplit("####", 1)[1].strip().replace(",", ""),
        split=split,
        index=index,
        question=question,
        answer=answer,
    )


def math(example: Row, split: str, index: int) -> Row:
    """Examples of MATH (problem, solution with a boxed result), or any with question and answer."""
    if "problem" in example and "solution" in example:
        question, answer = _text(example, "problem"), _text(example, "solution")
        ground_truth = last_boxed(answer)
        if ground_truth is None:
            raise _bad("solution", "has no \\boxed{…} result")
    else:
        question, answer = _text(example, "question"), _text(example, "answer")
        ground_truth = answer
    return make_row(
        data_source="DigitalLearningGmbH/MATH-lighteval",
        prompt=user_turn(f"{question} {IN_BOX}"),
        ability="math",
        ground_truth=ground_truth,
        split=split,
        index=index,
        question=question,
        answer=answer,
    )


def svamp(example: Row, split: str, index: int) -> Row:
    body, question = _text(example, "Body").strip(), _text(example, "Question").strip()
    # Some bodies end in the middle of the sentence that the question completes ("If there is a discount of 25 dollars")
    text = f"{body} {question}" if body.endswith((".", "?", "!")) else f"{body}, {question[0].lower()}{question[1:]}"
    result = _plain_number(example.get("Answer"))
    return make_row(
        data_source="svamp",
        prompt=user_turn(f"{text} {AFTER_HASHES}"),
        ability="math",
        ground_truth=result,
        split=split,
        index=index,
        question=text,
        answer=f"#### {result}",
    )


def countdown(example: Row, split: str, index: int) -> Row:
    numbers, target = example.get("nums", example.get("numbers")), example.get("target")
    if not isinstance(numbers, list) or not all(type(n) is int for n in numbers) or type(target) is not int:
        raise _bad("nums / target", f"must be a list of integers and an integer, found {numbers!r} and {target!r}")
    question = (
        f"Using the numbers {numbers}, write an expression that equals {target}. You can use + - * / and parentheses, "
        "and each number exactly once. Show your work, and give the final expression in <answer> </answer> tags, "
        "for example <answer>(1 + 2) / 3</answer>."
    )
    return make_row(
        data_source="countdown",
        prompt=user_turn(question),
        ability="math",
        ground_truth={"target": target, "numbers": numbers},
        split=split,
        index=index,
        question=question,
        answer=f"<answer>{example['solution']}</answer>" if example.get("solution") else "",
    )


CONVERTERS = {
    "gsm8k": Converter("openai/gsm8k", "main", gsm8k, "grade-school word problems, answers after ####"),
    "math": Converter("DigitalLearningGmbH/MATH-lighteval", None, math, "competition problems, answers in \\boxed{}"),
    "svamp": Converter("ChilleD/SVAMP", None, svamp, "one-step word problems, answers after ####"),
    "countdown": Converter(None, None, countdown, "reach a target number with given numbers"),
}


def _text(example: Row, column: str) -> str:
    value = example.get(column)
    if not isinstance(value, str) or not value.strip():
        raise _bad(column, f"must be a text, found {value!r} (the columns are {', '.join(map(repr, example))})")
    return value


def _plain_number(value: Any) -> str:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise _bad("Answer", f"must be a number, found {value!r}") from error
    return str(int(number)) if number.is_integer() else str(number)


def _bad(column: str, what: str) -> DataError:
    return DataError(f"column {column!r} {what}", "use the dataset's original files")
