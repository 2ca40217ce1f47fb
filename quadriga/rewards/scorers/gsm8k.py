"""GSM8K and other word problems with one number as the answer.

The answer is the number after the last `####`. Tolerated around it: no space, `$`, `%`, thousands commas, a trailing
full stop, trailing zeros, `**`, `\\boxed{}`, units and a few words. Fractions, mixed numbers (`2 1/2`) and scientific notation
(`1.5e3`, `1.5 × 10^3`) are numbers too. Two answers are equal when they are the same number, exactly; no part of the text is cut off.
What else stands on the line must leave the number as it is: an expression, a list, a range, a second number ("5 hours 30
minutes", "5 (or 6)") or a word that counts ("5 thousand", "5 squared") is not an answer: unparsed.

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
_OPENING = r"(?:[\s*_`\"'({\[:$€£¥]|\\[(\[$]|\\(?:boxed|fbox|text|textbf|mathbf)[ \t]*\{)*"

_ANSWER = re.compile(rf"{_OPENING}(?P<sign>[-−–+]?)[ \t]*{_UNSIGNED}")
_LAST = re.compile(rf"(?P<sign>(?<![\w)\]}}])[-−])?{_UNSIGNED}")

# What may follow a number: closed brackets and emphasis, marks, words. No operator, no formula, no second number.
_MARKUP = re.compile(
    r"<[/|A-Za-z][^<>0-9]*>|\\(?:[()\[\]$%,;! ]|(?:text|textbf|mathrm|mbox)[ \t]*\{|quad|circ)|\^\{?(?=\\circ)"
)
_CLOSING = r"[\s*_`\"'’”)\]}$%°¢€£¥]*"
_HARMLESS = re.compile(r"[^+=<>^~|@#\\‰×÷±∓√∞≠≤≥≈π∙⋅·•∗]*")
_EXPLANATION = re.compile(r"(?i)\b(?:which|because|since|in|per|for|after|within|during)\b")
_SENTENCE_END = re.compile(r"[.!?;](?:\s|$)")
_WORD = re.compile(r"[^\W\d_]+(?:['’]t\b)?")
_LETTERS_OF_UNITS = frozenset("hmsgalLRI")
_CHANGES = (  # words beside a number that make it another one, or none
    "half halves third thirds fourth fourths quarter quarters fifth fifths sixth sixths seventh sevenths eighth eighths ninth "
    "ninths tenth tenths hundredth hundredths thousandth thousandths one two three four five six seven eight nine ten eleven "
    "twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety "
    "hundred hundreds thousand thousands mil mn bn million millions billion billions trillion trillions lakh lakhs crore "
    "crores dozen dozens score gross tens st nd rd th squared cubed factorial plus minus negative divided multiplied mod modulo "
    "choose root sqrt pi point base log ln power or nor not no never wrong incorrect maybe perhaps actually remainder rem over "
    "least most twice double triple"
)
_POINTS_ELSEWHERE = (
    "than step equation problem question square cube reciprocal inverse up b c d e f g h j k m n p q r t u v w x y z"
)
_AFTER, _BEFORE = set(_CHANGES.split()), set(f"{_CHANGES} {_POINTS_ELSEWHERE}".split())
_NEW_CLAUSE = re.compile(
    r"(?i)[=:\n!?]|[.](?=\s)|\b(?:is|are|was|were|be|equals|(?:equal|comes?|amounts?|adds? up) to|makes?|gets?|earns?|has|have|so"
    r"|thus|therefore|hence|then|that)\b"
)
_KINDS = re.compile(  # "5 one-dollar bills", "20 left over": no numbers
    r"(?i)\b(?:one|two|three|four|five|six|seven|eight|nine|ten|half|quarter|third|fourth|fifth|double|triple)-"
    rf"(?!(?:{'|'.join(_CHANGES.split())})\b)(?=[a-z]{{3}})|(?<=\bleft)[- ]over\b"
)
_LABEL = re.compile(r"(?:^|(?<=\n))[ \t]*#{1,3}[ \t]+$|<[A-Za-z][^<>0-9]*>[ \t]*$")  # a heading, a tag
_OPENED = re.compile(r"(?:[\"'({\[$€£¥*_`]|\\[(\[$]|\\(?:boxed|fbox|text|textbf|mathbf)[ \t]*\{)+$")
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
    found = _number_alone(text)
    if found is not None:
        return found
    left, equals, right = text.lstrip().partition("\n")[0].rpartition("=")
    # "#### 3 + 4 = 7" states its value after the last "="
    if not equals or not _may_be_a_left_side(left):
        return None
    found, stated = _number_alone(right), _number_alone(left)
    return found if stated is None or found is None or value_of(stated) == value_of(found) else None


def _may_be_a_left_side(text: str) -> bool:
    return not re.search(r"(?i)[!<>~≠≤≥≈:]\s*$|[,;]\s|\b(?:or|and|not)\b", text)


def _number_alone(text: str) -> str | None:
    match = _ANSWER.match(text)
    return _plain(match) if match and _leaves_it(text[match.end() :]) else None


def _leaves_it(after: str) -> bool:
    """Whether the rest of the line leaves the number before it as it is."""
    line = _KINDS.sub("", _MARKUP.sub(" ", after.partition("\n")[0]))
    if re.match(r"[.,]\w|!!", line):
        return False
    said = _EXPLANATION.split(line, maxsplit=1)[0]
    if any(map(str.isnumeric, said)):
        return False
    said, sentence = (re.sub(f"^{_CLOSING}", "", _SENTENCE_END.split(part, maxsplit=1)[0]) for part in (said, line))
    if not _HARMLESS.fullmatch(said) or re.search(r"[-−–—*/+]\s*$|^\s*/\s*\w\b", said):
        return False
    return all(
        word.lower() not in _AFTER
        and "n't" not in word.replace("’", "'")
        and (len(word) > 1 or not word.isascii() or word in _LETTERS_OF_UNITS)
        for word in _WORD.findall(sentence)
    )


def _only_number(text: str) -> str | None:
    return _last_number(text) if sum(1 for _ in _LAST.finditer(text)) == 1 else None


def _last_number(text: str) -> str | None:
    last = None
    for match in _LAST.finditer(text):
        last = match
    if last is None or not _leaves_it(text[last.end() :]):
        return None
    start = last.start("sign" if last["sign"] else "digits")
    return _plain(last) if _begins_there(text[max(0, start - 120) : start]) else None


def _begins_there(before: str) -> bool:
    """Whether a number after this text is a statement of its own, no part of an expression, a list or a range."""
    opened = _LABEL.sub("\n", _OPENED.sub("", before))
    if re.search(r"(?:[-−–—+*/×÷^√_<>≤≥≠≈~)\]}#\\%‑‐]|!=|:)[ \t]*$|\w$|[0-9][.,]\s?$|\\[A-Za-z]+\s*$", opened):
        return bool(re.search(r"(?<![0-9]):[ \t]*$|[A-Za-z ]:\**[ \t]*$", opened))
    clause = _NEW_CLAUSE.split(opened)[-1]
    words = [word.lower().replace("’", "'") for word in _WORD.findall(clause)]
    return (
        not any(map(str.isnumeric, clause))
        and not any(word in _BEFORE or "n't" in word for word in words)
        and not re.search(r"(?i)\b(?:is|are|was|be)\s+not\b|n['’]t\b", opened[-24:])
    )


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
