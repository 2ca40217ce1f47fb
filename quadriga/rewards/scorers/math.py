r"""MATH and other competition mathematics: the last balanced `\boxed{…}` or `\fbox{…}`, compared for equivalence.

Without one, what follows the last "Answer:" at the beginning of a line counts: DAPO's prompts ask for that.

Both answers are taken apart the same way: words and units, lists, tuples, sets, intervals and unions, matrices, equations
and inequalities; what is left is compared as formulas (`latex.py`). The verdict is yes, no, or *cannot compare*: an
answer that is not understood whole counts as unparsed, never as right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from quadriga.errors import DataError
from quadriga.rewards.scorers import gsm8k
from quadriga.rewards.scorers.extract import last_boxed
from quadriga.rewards.scorers.latex import Formula, Unsure, look_same, parse, proportional, same, tokens_of

_MAX_CHARACTERS = 2_000
_THOUSANDS = re.compile(r"[-−]?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_TEXT = re.compile(r"\\(?:text|textrm|textbf|textit|texttt|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_STATED = re.compile(r"(?im)^[ \t*_#>-]*(?:the[ \t]+)?(?:final[ \t]+)?answer[ \t]*(?:is[ \t]*)?[*_]*:[ \t]*([^\n]*)$")
_JOINED = re.compile(r"(?<![\\A-Za-z])(and|or)(?![A-Za-z])")
_COUNTED = re.compile(  # \text{ A} may be a symbol
    r"(-?[0-9][0-9,.]*)(?:\\[,; ]|[\s~])*\\(?:text|textrm|mbox|mathrm)\s*\{(?!\s*[A-Z]\s*\})([^{}]*)\}(?:\^(?:[23]|\{[23]\}))?"
)
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_MATH_MARKS = re.compile(r"(?<!\\)\\[\[\]()]|(?<!\\)\$")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}(?![A-Za-z])")
_SHORT_WORD = re.compile("[A-Za-z]{2,}")  # where there is nothing else
_IS_PROSE = re.compile(r"(?i)\b(?:yes|no)\b|[a-z]{4}")
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|°|\\degree(?![A-Za-z])")
_FUNCTION = re.compile(r"(?<![A-Za-z])(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?(?![a-z])")
_DEGREES_OF_A_NUMBER = re.compile(rf"([0-9]+(?:\.[0-9]+)?)\s*(?:{_DEGREES.pattern})")
_ORDINAL = re.compile(r"\^\s*\{?\s*(st|nd|rd|th)\s*\}?(?![A-Za-z])")
_UNIT_NAMES = (
    "mm cm km inch inches foot feet yard mile meter metre centimeter millimeter kilometer second sec minute min hour hr "
    "day week month year degree dollar cent percent unit square cubic sq cu kg mg ml gram kilogram pound liter litre mph "
    "ft rad radian people students ways"
)
_UNITS = set(_UNIT_NAMES.split())
_SHORT_UNIT = re.compile(r"(?<=[0-9\s}])\s*(?<![\\A-Za-z])(mm|cm|km|ft|kg|mg|ml|mph|min|sec|hr)(?![A-Za-z])")
_MATRIX = re.compile(r"\\begin\{([pb]?matrix|smallmatrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}", re.DOTALL)
_BRACKETS = re.compile(r"^\\left\s*(?:\((.*)\\right\s*\)|\[(.*)\\right\s*\])$", re.DOTALL)
_OPEN, _CLOSE = {"(", "[", "{", r"\{", r"\langle"}, {")", "]", "}", r"\}", r"\rangle"}
_RELATIONS = {
    "=": "=", "<": "<", ">": ">", r"\lt": "<", r"\gt": ">", r"\le": "<=", r"\leq": "<=", r"\leqslant": "<=",
    r"\ge": ">=", r"\geq": ">=", r"\geqslant": ">=", r"\ne": "!=", r"\neq": "!=", r"\in": "in", r"\equiv": "equiv",
    r"\approx": "approx", r"\to": "to", r"\rightarrow": "to", r"\sim": "sim", r"\subset": "subset", r"\mid": "|", ":": ":",
}  # fmt: skip
_NAME = re.compile(
    r"(\\angle( [A-Z]){1,3}|[A-Z]( [A-Z]){1,2}|(\\[A-Za-z]+|[A-Za-z])( ')?( _ (\w|\{ [\w ]+ \}))?"
    r"( \( [A-Za-z0-9]( , [A-Za-z0-9])* \))?)"
)
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}

Verdict = bool | None
"""Yes, no, or None: cannot compare."""


def extract_solution(solution_str: str) -> str | None:
    r"""Content of the last balanced `\boxed{…}` / `\fbox{…}`, else the last line "Answer: …", or None."""
    boxed = last_boxed(solution_str)
    if boxed is not None or _BOX.search(solution_str):
        return boxed
    stated = _STATED.findall(solution_str)
    return stated[-1].replace("**", "").strip() or None if stated else None


def is_equivalent(truth: str, answer: str) -> bool:
    """Whether two answers surely mean the same."""
    return compare(truth, answer) is True


def compare(truth: str, answer: str) -> Verdict:
    """Whether two answers mean the same; None where that cannot be told."""
    if max(len(truth), len(answer)) > _MAX_CHARACTERS:
        return None
    if (plain := _unwrapped(truth)) and plain == _unwrapped(answer):
        return True  # \text{June 20} and June 20
    wanted, given = _Answer(truth), _Answer(answer)
    if not wanted.text and not wanted.words:
        return None
    is_plain = not (wanted.words or wanted.units or "percent" in given.units)
    if is_plain and (counted := _counted(wanted.text, answer)) is not None:
        return counted
    if wanted.words != given.words:
        # "3% profit" is neither "3% loss" nor surely "3%".
        return False if wanted.words and given.words and wanted.text == given.text else None
    if wanted.units and given.units and wanted.units != given.units:
        return False
    for one, other in ((wanted, given), (given, wanted)):
        if "percent" in one.units and not other.units and not _is_above_one(other.text):
            return None  # 50 may have been meant as a percentage, 0.5 hardly
    if min(len(side.words + side.units) for side in (wanted, given)) > 1 and wanted.in_order != given.in_order:
        return None  # "3 hours 20 minutes", "Tom > Jerry": it matters which word stands where
    if len(wanted.joined_by | given.joined_by) > 1 and (
        re.search(r"[<>]|\\[lg]", wanted.text) or len(set(_LETTER.findall(wanted.text))) > 1
    ):
        return None  # of solutions of one equation it does not matter; of conditions it does
    if wanted.words and not (wanted.text or given.text):
        return True
    return _compare(wanted.text, given.text)


def _unwrapped(answer: str) -> str:
    return " ".join(_MATH_MARKS.sub(" ", _TEXT.sub(r" \1 ", answer)).split()).removesuffix(".")


def _counted(truth: str, answer: str) -> Verdict:
    r"""Whether `27 \text{ pages}` is as many as a reference that is a mere number, as word problems are judged. None: no such
    answer."""
    truth = truth.replace(",", "") if _THOUSANDS.fullmatch(truth) else truth
    match = _COUNTED.fullmatch(_MATH_MARKS.sub("", answer).strip().removesuffix("."))
    if match is None or not _NUMBER.fullmatch(truth):
        return None
    plain = gsm8k.extract_solution(f"#### {match.group(1)} {match.group(2)}")
    return None if plain is None else gsm8k.value_of(plain) == gsm8k.value_of(truth)


def _is_above_one(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9]+(\.[0-9]+)?", text)) and float(text) > 1


class _Answer:
    """An answer as `text` (LaTeX), the `words` in it, and its `units`; money signs, and "or" between answers, are gone."""

    def __init__(self, answer: str) -> None:
        words: list[str] = []
        self.joined_by: set[str] = set()

        def keep(match: re.Match[str]) -> str:
            inner = match.group(1) if match.re.groups else match.group()
            if inner.strip().lower() in ("or", "and", "", ","):
                self.joined_by |= {"or", "and"} & {inner.strip().lower()}
                return ", " if inner.strip() else " "
            if not re.search("[A-Za-z]{2}", inner):
                return f" {inner} "  # \text{(A)}, \mathrm{R}
            words.extend(re.findall(r"[a-z]+|[0-9]+", inner.lower()))
            return " "

        text = " ".join(answer.split())
        self.in_order = re.findall(r"[0-9]*\.?[0-9]+|[a-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", text).lower())
        text, dollars = re.subn(r"\\\$|^\$(?=[^$]*$)", " ", text)
        text = _MATH_MARKS.sub(" ", text.replace(r"\%", "%"))
        if _FUNCTION.search(text):
            text = _DEGREES_OF_A_NUMBER.sub(r"(\1\\pi/180)", text)
        text = _ORDINAL.sub(r" \\text{\1} ", text)
        text, degrees = _DEGREES.subn(" ", text)
        text, percents = re.subn("%", " ", text)
        text = _JOINED.sub(keep, _TEXT.sub(keep, text))
        if self.joined_by:
            text = re.sub(r",\s*(?=,)", "", text)
        if not re.search(r"\\begin", text):
            word = _SHORT_WORD if re.fullmatch("[A-Za-z .]+", text) and _IS_PROSE.search(text) else _WORD
            text = word.sub(lambda match: match.group() if match.group() in _KNOWN else keep(match), text)
            text = _SHORT_UNIT.sub(keep, text)
        self.text = " ".join(text.split()).strip().removesuffix(".").strip().strip(",").strip()
        singular = [word if word in _UNITS else word.removesuffix("s") for word in words]
        found = (
            ["degree"] * degrees
            + ["percent"] * percents
            + ["dollar"] * dollars
            + [word for word in singular if word in _UNITS]
        )
        self.units = sorted(found)
        self.words = sorted(word for word in singular if word not in _UNITS)
        if self.units and re.match(r"\s*\^\s*\{?\s*([23])\s*\}?$", self.text.rpartition(" ")[2] or ""):
            self.units.append(self.text[-1] if self.text[-1].isdigit() else self.text[-2])
            self.text = self.text.rpartition(" ")[0].strip()


_KNOWN = {
    "sqrt",
    "arcsin",
    "arccos",
    "arctan",
    "infty",
    "sinh",
    "cosh",
    "tanh",
    "pi",
    "sin",
    "cos",
    "tan",
    "ln",
    "log",
    "exp",
}


def _compare(truth: str, answer: str) -> Verdict:
    if _THOUSANDS.fullmatch(truth):
        truth = truth.replace(",", "")
    if _THOUSANDS.fullmatch(answer):
        answer = answer.replace(",", "")
    if r"\begin" in truth or r"\begin" in answer:
        return _compare_matrices(truth, answer)
    wanted, given = tokens_of(truth), tokens_of(answer)
    if look_same(wanted, given):
        return bool(wanted)
    if all(map(_is_bare_word, (wanted, given))):
        return None if len(wanted) > 1 else False
    try:
        return _compare_lists(wanted, given)
    except (Unsure, RecursionError):
        return None


def _is_bare_word(tokens: Sequence[str]) -> bool:
    """`east` and `seat` are words, not products of the same letters."""
    return bool(tokens) and all(token.isalpha() and len(token) == 1 for token in tokens)


def _compare_matrices(truth: str, answer: str) -> Verdict:
    wanted, given = (_MATRIX.fullmatch(_BRACKETS.sub(r"\1\2", text).strip()) for text in (truth, answer))
    if wanted is None or given is None:
        return True if look_same(tokens_of(truth), tokens_of(answer)) else None
    left, right = (_cells(match.group(2)) for match in (wanted, given))
    if [len(row) for row in left] != [len(row) for row in right]:
        return False
    pairs = [pair for rows in zip(left, right) for pair in zip(*rows)]
    return _all(_compare(*pair) for pair in pairs)


def _cells(body: str) -> list[list[str]]:
    rows = [
        row for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr(?![A-Za-z])", body.replace(r"\hline", "")) if row.strip()
    ]
    return [[cell.strip() for cell in row.split("&")] for row in rows]


def _all(verdicts: Iterable[Verdict]) -> Verdict:
    """No as soon as one is no; yes only if all are."""
    seen = list(verdicts)
    return False if False in seen else None if None in seen else True


def _compare_lists(wanted: list[str], given: list[str]) -> Verdict:
    """What is separated by commas outside of brackets may come in any order."""
    wanted, given = _what_it_is_in(wanted, given), _what_it_is_in(given, wanted)
    if any(len(_split(side, {","})) > 1 < len(_split(side, {";"})) for side in (wanted, given)):
        raise Unsure("a list of lists")
    left, right = _split(wanted, {",", ";"}), _split(given, {",", ";"})
    if len(left) == len(right) == 1:
        left, right = _split(wanted, {r"\cup"}), _split(given, {r"\cup"})
        if len(left) == len(right) == 1:
            return _compare_one(wanted, given)
    elif 1 in (len(left), len(right)):
        left, right = _elements(left), _elements(right)  # 1, 2 and \{1, 2\}
    return _compare_in_any_order(left, right)


def _what_it_is_in(tokens: list[str], other: list[str]) -> list[str]:
    r"""The set in `x \in (0, 1)`, where the other answer is the set itself."""
    belongs = len(tokens) > 3 and tokens[0].isalpha() and tokens[1] == r"\in" and tokens[2] in {*_OPEN, r"\mathbb"}
    return tokens[2:] if belongs and not _RELATIONS.keys() & {*tokens[2:], *other} else tokens


def _elements(items: list[list[str]]) -> list[list[str]]:
    group = _group(items[0]) if len(items) == 1 and items[0] else None
    return group[2] if group is not None and group[0] == r"\{" else items


def _compare_in_any_order(left: list[list[str]], right: list[list[str]]) -> Verdict:
    left, right = ([single for item in items for single in _both_signs(item)] for items in (left, right))
    if len(left) != len(right):
        return False
    names = [{"".join(_split(item, {"="})[0]) for item in items if "=" in item} for items in (left, right)]
    if len(names[0] | names[1]) > 1 and names[0] != names[1]:
        return None  # x = 1, y = 2 is neither 1, 2 nor 2, 1
    unsure, rest = False, list(right)
    for item in left:
        verdicts = [_compare_one(item, other) for other in rest]
        if True in verdicts:
            del rest[verdicts.index(True)]
        elif None in verdicts:
            unsure = True
        else:
            return False
    return None if unsure else True


def _both_signs(item: list[str]) -> list[list[str]]:
    if r"\pm" not in item:
        return [item]
    if item.count(r"\pm") > 1:
        raise Unsure("whether two signs go together")
    return [[sign if token == r"\pm" else token for token in item] for sign in "+-"]


def _compare_one(wanted: list[str], given: list[str]) -> Verdict:
    if not wanted or not given:
        return None
    if look_same(wanted, given):
        return True
    if r"\pm" in wanted or r"\pm" in given:
        return _compare_in_any_order([wanted], [given])
    chains = [_chain(side) for side in (wanted, given)]
    groups = [_group(side) for side in (wanted, given)]
    one_is_named = [bool(relations) for _, relations in chains] in ([True, False], [False, True])
    if any(group is not None for group in groups) and not one_is_named:
        return _compare_groups(*groups)
    if any(len(chain[1]) for chain in chains):
        return _compare_relations(*chains)
    return same(_formula(wanted), _formula(given))


def _formula(tokens: list[str]) -> Formula:
    letters = "".join(token if len(token) == 1 and token.isalpha() else " " for token in tokens).split()
    # "abc" is a product; three letters and more in another order may be a word.
    if any(len(run) > 2 and sorted(run) != list(run) for run in letters) or (_is_bare_word(tokens) and len(tokens) > 1):
        raise Unsure("a word")
    return parse(list(tokens))


def _group(tokens: list[str]) -> tuple[str, str, list[list[str]]] | None:
    """A tuple, interval or set: its brackets and its parts. `(x+1)` is none, `\\{1\\}` is a set of one."""
    if tokens[0] not in _OPEN or tokens[-1] not in _CLOSE or tokens[0] == "{":
        return None
    inner = tokens[1:-1]
    if not _is_balanced(inner):
        return None
    parts = _split(inner, {",", ";"})
    return (tokens[0], tokens[-1], parts) if len(parts) > 1 or tokens[0] == r"\{" else None


def _compare_groups(wanted: Any, given: Any) -> Verdict:
    if wanted is None or given is None:
        return None
    if wanted[:2] != given[:2]:
        return False
    if wanted[0] == r"\{":
        return _compare_in_any_order(wanted[2], given[2])
    if len(wanted[2]) != len(given[2]):
        return False
    return _all(_compare_one(*pair) for pair in zip(wanted[2], given[2]))


def _chain(tokens: list[str]) -> tuple[list[list[str]], list[str]]:
    """`a < x < b` as its sides and its relations."""
    sides = _split(tokens, set(_RELATIONS))
    depth, relations = 0, []
    for token in tokens:
        depth += (token in _OPEN) - (token in _CLOSE)
        if depth == 0 and token in _RELATIONS:
            relations.append(_RELATIONS[token])
    return sides, relations


def _compare_relations(wanted: tuple[list[list[str]], list[str]], given: tuple[list[list[str]], list[str]]) -> Verdict:
    (left, left_by), (right, right_by) = wanted, given
    if not left_by or not right_by:  # "x = 5" and "5"
        sides, relations, other = (left, left_by, right[0]) if left_by else (right, right_by, left[0])
        if relations != ["="] or not _is_a_name(sides[0]):
            return None
        if sides[0][0] == "(" and sides[0].count(",") != sides[1].count(","):
            return None
        return _compare_one(sides[1], other)
    if left_by == right_by:
        verdict = _all(_compare_one(*pair) for pair in zip(left, right))
        if verdict is not False:
            return verdict
    if [_FLIPPED.get(by) for by in reversed(right_by)] == left_by:
        verdict = _all(_compare_one(*pair) for pair in zip(left, reversed(right)))
        if verdict is not False:
            return verdict
    if left_by == right_by == ["="]:
        differences = [("-", _formula(sides[0]), _formula(sides[1])) for sides in (left, right)]
        return proportional(*differences)
    return False if left_by == right_by else None


def _is_a_name(tokens: list[str]) -> bool:
    r"""`x`, `x_1`, `f(x)`, `P(A)`, `AB`, `\angle ABC`, `(x, y)`: what an answer is assigned to."""
    name = " ".join(tokens)
    if tokens and tokens[0] == "(":  # (y, x) is another order than that of the answer
        letters = tokens[1:-1:2]
        return bool(re.fullmatch(r"\( [a-z]( , [a-z])+ \)", name)) and letters == sorted(set(letters))
    return len(tokens) < 10 and bool(_NAME.fullmatch(name))


def _split(tokens: list[str], separators: set[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in _OPEN) - (token in _CLOSE)
        if depth == 0 and token in separators:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _is_balanced(tokens: list[str]) -> bool:
    depth = 0
    for token in tokens:
        depth += (token in _OPEN) - (token in _CLOSE)
        if depth < 0:
            return False
    return depth == 0


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1.0 when the boxed answer is equivalent to the reference, else 0.0."""
    return float(score("math", solution_str, ground_truth)["score"])


def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    format_score: float = 0.0,
) -> dict[str, Any]:
    r"""1.0 right, `format_score` wrong, 0.0 (and `parsed` False) without a `\boxed{}` or where it cannot be compared.

    `ground_truth` is the answer itself, or a whole solution with the answer in `\boxed{}`.
    """
    truth = str(ground_truth)
    if "\\boxed" in truth or "\\fbox" in truth:
        truth = last_boxed(truth) or ""
    if not truth.strip():
        raise DataError(
            f"ground truth {ground_truth!r} holds no answer", "give reward_model.ground_truth as LaTeX text"
        )
    answer = extract_solution(solution_str)
    verdict = compare(truth, answer) if answer else None
    if verdict is None:
        return {"score": 0.0, "acc": 0.0, "pred": answer or None, "parsed": False}
    return {"score": 1.0 if verdict else format_score, "acc": float(verdict), "pred": answer, "parsed": True}
