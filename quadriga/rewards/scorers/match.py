"""Answers compared as text: exactly, or by a regular expression."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from quadriga.errors import DataError
from quadriga.rewards.scorers.extract import last_boxed, last_tag


def score_exact(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    ignore_case: bool = False,
) -> dict[str, Any]:
    """1.0 when the answer equals the reference, or one of a list of references, up to surrounding and repeated space.

    The answer is the last `<answer>…</answer>`, else the last `\\boxed{…}`, else the whole response.
    """
    answer = last_tag(solution_str)
    if answer is None:
        answer = last_boxed(solution_str)
    if answer is None:
        answer = solution_str
    answer = _plain(answer, ignore_case)
    is_list = isinstance(ground_truth, Iterable) and not isinstance(ground_truth, str)
    references = list(ground_truth) if is_list else [ground_truth]
    right = any(answer == _plain(str(reference), ignore_case) for reference in references)
    return {"score": float(right), "acc": float(right), "pred": answer or None, "parsed": bool(answer)}


def _plain(text: str, ignore_case: bool) -> str:
    text = " ".join(text.split())
    return text.casefold() if ignore_case else text


def score_regex(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    full: bool = False,
) -> dict[str, Any]:
    """1.0 when the pattern in `ground_truth` is found in the response (`full`: matches the whole stripped response)."""
    try:
        pattern = re.compile(str(ground_truth), re.DOTALL)
    except re.error as problem:
        raise DataError(
            f"ground truth {ground_truth!r} is not a regular expression: {problem}", "mend the row"
        ) from problem
    text = solution_str.strip()
    found = pattern.fullmatch(text) if full else pattern.search(text)
    return {
        "score": float(found is not None),
        "acc": float(found is not None),
        "pred": found.group() if found else None,
        "parsed": bool(text),
    }
