r"""MATH and other competition mathematics: the last balanced `\boxed{…}` or `\fbox{…}`, compared for equivalence.

Plain text is compared first; only answers that differ as text go through the `math-verify` library (sympy). Its own
time limit is switched off: it works by `signal.alarm`, which fails outside the main thread. A comparison that never
ends is stopped by the reward pool's deadline.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from quadriga.errors import DataError
from quadriga.rewards.scorers.extract import last_boxed

_SPACING = re.compile(r"\\[!,;: ]|\\(?:left|right)(?![a-zA-Z])|\\q?quad|\s+|~")
_SAME_FRACTION = re.compile(r"\\[dt]frac")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_TRUTH_IN_A_THOUSANDS_COMMA = re.compile(r"^-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?$")


def extract_solution(solution_str: str) -> str | None:
    r"""Content of the last balanced `\boxed{…}` / `\fbox{…}`, or None."""
    return last_boxed(solution_str)


def plain(answer: str) -> str:
    """The text of an answer without what only changes its looks."""
    text = _SPACING.sub("", answer.strip().strip("$"))
    text = _SAME_FRACTION.sub(r"\\frac", text)
    if _TRUTH_IN_A_THOUSANDS_COMMA.match(text):
        text = _THOUSANDS.sub("", text)
    return text.removesuffix(".")


def is_equivalent(truth: str, answer: str) -> bool:
    """Whether two answers mean the same: as text, else by math-verify. Not symmetric: the reference comes first."""
    left, right = plain(truth), plain(answer)
    if left == right:
        return bool(left)
    parse, verify = _math_verify()
    gold, prediction = (parse(f"${text.strip().strip('$')}$", parsing_timeout=None) for text in (truth, answer))
    return bool(gold and prediction and verify(gold, prediction, timeout_seconds=None))


@lru_cache(maxsize=1)
def _math_verify() -> tuple[Any, Any]:
    # It warns once that its time limit is off, which is what we want.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    from math_verify import parse, verify

    return parse, verify


def warm_up() -> None:
    """Load sympy and the LaTeX grammar once, so that forked workers share them."""
    is_equivalent(r"\frac{1}{2}", "0.25")


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
    r"""1.0 right, `format_score` wrong, 0.0 (and `parsed` False) without a `\boxed{}`.

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
    if not answer:
        return {"score": 0.0, "acc": 0.0, "pred": None, "parsed": False}
    right = is_equivalent(truth, answer)
    return {"score": 1.0 if right else format_score, "acc": float(right), "pred": answer, "parsed": True}
