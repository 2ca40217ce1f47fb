"""What goes into scoring and what comes out of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

CORRECT, WRONG, UNPARSED, ERROR, TIMEOUT = "correct", "wrong", "unparsed", "error", "timeout"
OUTCOMES = (CORRECT, WRONG, UNPARSED, ERROR, TIMEOUT)

_METRIC_NAMES = {CORRECT: "correct", WRONG: "wrong", UNPARSED: "unparsed", ERROR: "errors", TIMEOUT: "timeouts"}
_MAX_TEXT = 4096


@dataclass(slots=True)
class RewardSample:
    """One response to be scored."""

    data_source: str
    solution_str: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RewardResult:
    """The score of one response and how it came about.

    Args:
        score: the reward; the pool's `on_error` value when scoring failed.
        outcome: `correct`, `wrong`, `unparsed` (no answer found in the text), `error` (the function raised, crashed or
            returned something that is no score) or `timeout`.
        acc: 1.0 or 0.0 when the function says so, else None.
        pred: the answer found in the text, when the function tells it.
        extra: everything else the function returned.
        error: for `error` and `timeout`, what happened, with the traceback where there is one.
        seconds: how long the function ran.
        attempts: how often it was tried.
    """

    score: float
    outcome: str
    acc: float | None = None
    pred: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0
    attempts: int = 1

    @property
    def failed(self) -> bool:
        return self.outcome in (ERROR, TIMEOUT)


def clean(value: Any) -> dict[str, Any]:
    """Turn what a reward function returned into plain `{score, outcome, acc, pred, extra}`, or raise.

    A float is the score. A dict holds `score`, and optionally `acc`, `pred` and `parsed`; the rest is kept as extra.
    Without `acc`, a score above 0 counts as correct.
    """
    if not isinstance(value, Mapping):
        number = _score(value)
        return {"score": number, "outcome": CORRECT if number > 0 else WRONG, "acc": None, "pred": None, "extra": {}}
    if "score" not in value:
        raise ValueError(f"the reward function returned a dict without 'score'; its keys: {[str(k) for k in value]}")
    number = _score(value["score"])
    acc = None if value.get("acc") is None else _score(value["acc"])
    pred = None if value.get("pred") is None else _text(str(value["pred"]))
    extra = {_text(str(k)): _plain(v) for k, v in value.items() if k not in ("score", "acc", "pred", "parsed")}
    right = acc > 0.5 if acc is not None else number > 0
    outcome = UNPARSED if value.get("parsed") in (False, 0) else CORRECT if right else WRONG
    return {"score": number, "outcome": outcome, "acc": acc, "pred": pred, "extra": extra}


def from_reply(entry: dict[str, Any], seconds: float) -> RewardResult | str:
    """A result, or the text of an error, from what a scoring process has sent; any exception if that makes no sense."""
    if "error" in entry:
        return str(entry["error"])
    result = RewardResult(**entry, seconds=_score(seconds))
    texts = (result.pred, result.error)
    if result.outcome not in OUTCOMES or not isinstance(result.extra, dict) or any(_is_no_text(text) for text in texts):
        raise ValueError(f"no result: {entry}")
    result.score, result.acc = _score(result.score), None if result.acc is None else _score(result.acc)
    return result


def _is_no_text(value: Any) -> bool:
    return value is not None and not isinstance(value, str)


def _score(value: Any) -> float:
    if isinstance(value, (str, bytes)) or value is None:
        raise TypeError(f"the reward function returned {value!r}, which is no number")
    try:
        number = float(value)
    except (TypeError, ValueError) as problem:
        raise TypeError(f"the reward function returned a {type(value).__name__}, which is no number") from problem
    if not math.isfinite(number):
        raise ValueError(f"the reward function returned {number}")
    return number


def _text(text: str) -> str:
    """As it can be written to a file: halves of characters ("lone surrogates") are replaced."""
    return text[:_MAX_TEXT].encode("utf-8", "replace").decode()


def _plain(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"a whole number of {value.bit_length()} bits"  # no float holds it, so no mean can
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return _text(value)
    if hasattr(value, "item"):  # a numpy or torch scalar, if it has one element
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            number = value.item()
            if isinstance(number, (bool, int, float)):
                return number
    return _text(repr(value))


def metrics(results: Iterable[RewardResult]) -> dict[str, float]:
    """Shares of the outcomes (they add up to 1), the mean score, the time taken, and the mean of every numeric extra.

    `reward/extra/<key>` is the mean over those samples that have the key.
    """
    results = list(results)
    if not results:
        return {}
    found = {
        f"reward/{_METRIC_NAMES[outcome]}": sum(r.outcome == outcome for r in results) / len(results)
        for outcome in OUTCOMES
    }
    found["reward/score"] = sum(r.score for r in results) / len(results)
    found["reward/seconds_mean"] = sum(r.seconds for r in results) / len(results)
    found["reward/seconds_max"] = max(r.seconds for r in results)
    numbers: dict[str, list[float]] = {}
    for result in results:
        for key, value in result.extra.items():
            if isinstance(value, (bool, int, float)):
                numbers.setdefault(key, []).append(float(value))
    return found | {f"reward/extra/{key}": sum(values) / len(values) for key, values in numbers.items()}
