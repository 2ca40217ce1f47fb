"""GSM8K and other word problems with one number as the answer.

The answer is the number after the last `####`. Tolerated around it: no space, `$`, `%`, thousands commas, a trailing
full stop, trailing zeros, `**`, `\\boxed{}` and units. Two answers are equal when they are the same number, exactly;
nothing is rounded and no part of the text is cut off. An expression, a list or a range is not a number: unparsed.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

from quadriga.errors import ConfigError, DataError

_MAX_DIGITS = 64  # longer "numbers" are degenerate text; exact arithmetic on them would only cost time
_METHODS = ("strict", "flexible")

_DIGITS = r"(?>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_MONEY = r"(?:\\?[$€£¥])"
_NUMBER = (
    rf"(?P<sign>[-−–+]?)[ \t]*{_MONEY}?[ \t]*(?P<digits>(?>{_DIGITS}))(?:[ \t]*/[ \t]*(?P<denominator>(?>[0-9]+)))?"
)
# What may not follow: more digits, a list, a range, a time, an operator with a second operand, an exponent, "5k".
_NOT_THE_END = (
    r"(?![0-9]|[.,][0-9]|,[ \t]*[0-9]|[ \t]+[0-9]|[ \t]*(?:[-−+*/×÷^=:]|x(?![a-z]))[ \t]*[0-9]|[eE][-+]?[0-9]|[kK]\b)"
)
_OPENING = r"(?:[\s*_`\"'({\[:$€£¥]|\\[(\[$]|\\(?:boxed|fbox|text|textbf|mathbf)[ \t]*\{)*"

_ANSWER = re.compile(rf"{_OPENING}{_NUMBER}{_NOT_THE_END}")
_ANYWHERE = re.compile(
    rf"(?P<sign>(?<![\w)\]])[-−])?{_MONEY}?(?P<digits>(?>{_DIGITS}))(?:/(?P<denominator>(?>[0-9]+)))?"
)
_FRACTION = re.compile(r"\\[dt]?frac[ ]*\{?([0-9]+)\}?[ ]*\{?([0-9]+)\}?")
_LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[!,])(?=[0-9]{3})")


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The answer as a plain number (`"-1234.5"`, `"1/2"`), or None.

    Args:
        method: `"strict"` demands `####`; `"flexible"` falls back to the last number in the text.
    """
    if method not in _METHODS:
        raise ConfigError(f"unknown extraction method {method!r} for gsm8k", f"use one of {', '.join(_METHODS)}")
    text = _FRACTION.sub(r"\1/\2", _LATEX_COMMA.sub(",", solution_str))
    _, marker, tail = text.rpartition("####")
    if marker:
        found = _number_at_start(tail)
        if found is not None:
            return found
    return _last_number(text) if method == "flexible" else None


def _number_at_start(text: str) -> str | None:
    match = _ANSWER.match(text)
    if match is None:
        line = text.lstrip().partition("\n")[0]
        _, equals, right = line.rpartition("=")  # "#### 3 + 4 = 7" states its value after the last "="
        match = _ANSWER.match(right) if equals else None
    return _plain(match) if match else None


def _last_number(text: str) -> str | None:
    last = None
    for match in _ANYWHERE.finditer(text):
        last = match
    return _plain(last) if last else None


def _plain(match: re.Match[str]) -> str:
    sign = "-" if match["sign"] in ("-", "−", "–") else ""
    digits = match["digits"].replace(",", "")
    return f"{sign}{digits}/{match['denominator']}" if match["denominator"] else sign + digits


def value_of(plain: str) -> Fraction | None:
    """Exact value of a plain number; None when it is too long to be an answer, or divides by zero."""
    if len(plain) > _MAX_DIGITS:
        return None
    numerator, _, denominator = plain.partition("/")
    below = int(denominator) if denominator else 1
    return Fraction(Decimal(numerator)) / below if below else None


def truth_value(ground_truth: Any) -> Fraction:
    """Exact value of a reference answer: a number, its text, or a whole GSM8K solution ending in `#### n`."""
    if isinstance(ground_truth, (int, float)) and not isinstance(ground_truth, bool):
        return Fraction(Decimal(str(ground_truth)))
    text = str(ground_truth)
    plain = extract_solution(text) if "####" in text else extract_solution(f"#### {text}")
    value = value_of(plain) if plain is not None else None
    if value is None:
        raise DataError(
            f"ground truth {text[:80]!r} is not a number", "give reward_model.ground_truth as a number or its text"
        )
    return value


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` when the answer is right, `format_score` when it is wrong, 0 when there is none."""
    plain = extract_solution(solution_str, method)
    if plain is None:
        return 0.0
    return score if value_of(plain) == truth_value(ground_truth) else format_score


def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    method: str = "strict",
    format_score: float = 0.0,
) -> dict[str, Any]:
    """The gsm8k scorer: 1.0 right, `format_score` wrong, 0.0 (and `parsed` False) when there is no answer."""
    plain = extract_solution(solution_str, method)
    truth = truth_value(ground_truth)
    if plain is None:
        return {"score": 0.0, "acc": 0.0, "pred": None, "parsed": False}
    right = value_of(plain) == truth
    return {"score": 1.0 if right else format_score, "acc": float(right), "pred": plain, "parsed": True}
