"""GSM8K and other word problems with one number as the answer.

The answer is the number after the last `####`. Tolerated around it: no space, `$`, `%`, thousands commas, a trailing
full stop, trailing zeros, `**`, `\\boxed{}` and units. Fractions, mixed numbers (`2 1/2`) and scientific notation (`1.5e3`,
`1.5 × 10^3`) are numbers too. Two answers are equal when they are the same number, exactly; no part of the text is cut off.
An expression, a list, a range or "5 thousand" is not a number: unparsed.

GSM-Hard has references such as 3244047.0999999996: there (and with `rounded`) an answer may be rounded, see `agrees`.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from typing import Any

from quadriga.errors import ConfigError, DataError

_MAX_DIGITS = 64  # longer "numbers" are degenerate text; exact arithmetic on them would only cost time
_METHODS = ("strict", "flexible")
_ROUNDED_SOURCES = ("gsm-hard", "reasoning-machines/gsm-hard")

_DIGITS = r"(?>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_MONEY = r"(?:\\?[$€£¥])"
_TIMES_TEN = (
    r"[ \t]*(?:[x×*·]|\\times|\\cdot)[ \t]*10[ \t]*(?:\^|\*\*)[ \t]*[{(]?[ \t]*(?P<power>[-+−]?[0-9]{1,3})[ \t]*[})]?"
)
_SCIENTIFIC = rf"(?:[eE](?P<exponent>[-+]?[0-9]{{1,3}})|{_TIMES_TEN})"
_BELOW = r"[ \t]*/[ \t]*(?P<denominator>(?>[0-9]+))"
_MIXED = r"[ \t]+(?:and[ \t]+)?(?P<above>[0-9]+)/(?P<below>[0-9]+)"
_UNSIGNED = rf"{_MONEY}?[ \t]*(?P<digits>(?>{_DIGITS}))(?>{_SCIENTIFIC}|{_BELOW}|{_MIXED})?"
# What may not follow: more digits, a list, a range, a time, an operator with a second operand, an exponent, "5k",
# "5 thousand", "5 or 6", "5 and a half".
_NOT_THE_END = (
    r"(?![0-9]|[.,'’_][0-9]|[,;|][ \t]*[-−]?[0-9]|[ \t]+[0-9]"
    r"|[ \t]*(?:[-−–—+*/×÷·^=:]|\*\*|!=|x(?![a-z]))[ \t]*[({$]?[ \t]*[-−]?[0-9]"
    r"|[ \t]*(?:[+×÷^±∓‰]|\\times|\\cdot|\\div|\\pm)|[²³⁰¹⁴-⁹⁻!]*[²³⁰¹⁴-⁹]|[ \t]*[eE][-+]?[0-9]|[kKM]\b"
    r"|[ \t]*(?:[rR]|rem|remainder)\b\.?[ \t]*(?:of[ \t]+)?[0-9]"
    r"|[ \t]*(?:hundred|thousand|million|billion|trillion|dozen|half|halves|thirds?|quarters?)\b"
    r"|[ \t]+(?:or|to|and|by|through|minus|plus|times)[ \t]+[-−]?(?:\\?\$)?[-−]?[0-9]|[ \t]+and[ \t]+(?:a|an|one|three)\b)"
)
_OPENING = r"(?:[\s*_`\"'({\[:$€£¥]|\\[(\[$]|\\(?:boxed|fbox|text|textbf|mathbf)[ \t]*\{)*"

_ANSWER = re.compile(rf"{_OPENING}(?P<sign>[-−–+]?)[ \t]*{_UNSIGNED}{_NOT_THE_END}")
_LAST = re.compile(rf"(?P<sign>(?<![\w)\]}}])[-−])?{_UNSIGNED}")
# What may not stand before a number that is looked for anywhere: part of a longer number or of an expression.
_NOT_BEFORE = re.compile(
    r"(?:[0-9)\]}][ \t]*[-−–+*/×÷^:]|[0-9][ \t]|[0-9][.,]|[√^*/×÷:_<>≤≥]|\\?sqrt[ \t]*[{(]?|\\(?:times|cdot|div)|[-−][ \t]*[({$]+"
    r"|\b(?:minus|negative|not|plus|times|root of|x))[ \t]*$|\w$"
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac[ ]*(?:\{([0-9]+)\}|([0-9]))[ ]*(?:\{([0-9]+)\}|([0-9]))")
_ONE_SIGN = re.compile("[¼½¾⅐-⅞↉]")  # a fraction in one character: 1½ is a mixed number
_SLASH = re.compile("[⁄∕]")
_LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[!,])(?=[0-9]{3})")


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The answer as a plain number (`"-1234.5"`, `"1/2"`), or None.

    Args:
        method: `"strict"` demands `####`; `"flexible"` falls back to the last number in the text, or after `####` to the
            only one.
    """
    if method not in _METHODS:
        raise ConfigError(f"unknown extraction method {method!r} for gsm8k", f"use one of {', '.join(_METHODS)}")
    text = _ONE_SIGN.sub(lambda m: f" {unicodedata.normalize('NFKC', m[0])}", solution_str)
    text = _LATEX_COMMA.sub(",", _SLASH.sub("/", text))
    text = _LATEX_FRACTION.sub(lambda m: " {}/{}".format(*(group for group in m.groups() if group)), text)
    before, marker, tail = text.rpartition("####")
    if marker:
        found = _number_at_start(tail)
        if found is not None:
            return found
    if method == "strict":
        return None
    return _only_number(tail) if marker and re.search("[0-9]", tail) else _last_number(before if marker else text)


def _number_at_start(text: str) -> str | None:
    match = _ANSWER.match(text)
    if match is None:
        line = text.lstrip().partition("\n")[0]
        _, equals, right = line.rpartition("=")  # "#### 3 + 4 = 7" states its value after the last "="
        match = _ANSWER.match(right) if equals else None
    return _plain(match) if match else None


def _only_number(text: str) -> str | None:
    return _last_number(text) if sum(1 for _ in _LAST.finditer(text)) == 1 else None


def _last_number(text: str) -> str | None:
    last = None
    for match in _LAST.finditer(text):
        last = match
    if last is None:
        return None
    start = last.start("sign" if last["sign"] else "digits")
    if _NOT_BEFORE.search(text[max(0, start - 80) : start]):
        return None
    return _plain(last) if re.match(_NOT_THE_END, text[last.end() : last.end() + 80]) else None


def _plain(match: re.Match[str]) -> str | None:
    sign = "-" if match["sign"] in ("-", "−", "–") else ""
    digits = match["digits"].replace(",", "")
    if match["denominator"]:
        return f"{sign}{digits}/{match['denominator']}"
    if match["above"]:
        above, below = int(match["above"][:20]), int(match["below"][:20])
        return f"{sign}{int(digits) * below + above}/{below}" if digits.isdigit() and 0 < above < below else None
    power = match["exponent"] or match["power"]
    if power is None:
        return sign + digits
    power = int(power.replace("−", "-"))
    return f"{sign}{Decimal(digits).scaleb(power):f}" if abs(power) < _MAX_DIGITS else None


def value_of(plain: str) -> Fraction | None:
    """Exact value of a plain number; None when it is too long to be an answer, or divides by zero."""
    if len(plain) > _MAX_DIGITS:
        return None
    numerator, _, denominator = plain.partition("/")
    below = int(denominator) if denominator else 1
    return Fraction(Decimal(numerator)) / below if below else None


def agrees(plain: str, truth: Fraction, rounded: bool = False) -> bool:
    """Whether an answer is the reference: exactly or, if `rounded`, as somebody would sensibly round it.

    That is: to 12 significant digits and more, or to cents and finer where the reference is no whole number, as long as two
    digits are left that are not leading zeros.
    """
    value = value_of(plain)
    if value is None or value == truth or not rounded:
        return value is not None and value == truth
    if abs(value - truth) <= abs(truth) / 10**12:
        return True
    decimals = len(plain.partition(".")[2])
    digits = len(plain.replace(".", "").lstrip("-0"))
    is_whole = abs(truth - round(truth)) <= abs(truth) / 10**12
    return (
        "/" not in plain
        and not is_whole
        and decimals >= 2 <= digits
        and abs(value - truth) <= Fraction(1, 2 * 10**decimals)
    )


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
    return score if agrees(plain, truth_value(ground_truth)) else format_score


def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    method: str = "strict",
    format_score: float = 0.0,
    rounded: bool | None = None,
) -> dict[str, Any]:
    """The gsm8k scorer: 1.0 right, `format_score` wrong, 0.0 (and `parsed` False) when there is no answer.

    Args:
        rounded: accept sensibly rounded answers, see `agrees`; by default for GSM-Hard only.
    """
    plain = extract_solution(solution_str, method)
    truth = truth_value(ground_truth)
    if plain is None:
        return {"score": 0.0, "acc": 0.0, "pred": None, "parsed": False}
    right = agrees(plain, truth, str(data_source).lower() in _ROUNDED_SOURCES if rounded is None else rounded)
    return {"score": 1.0 if right else format_score, "acc": float(right), "pred": plain, "parsed": True}
