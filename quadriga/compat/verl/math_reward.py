"""`verl.utils.reward_score.math_reward`: answers in a box, compared as mathematics."""

from __future__ import annotations

from quadriga.rewards.scorers.extract import last_boxed
from quadriga.rewards.scorers.math import compute_score as _compute_score
from quadriga.rewards.scorers.math import is_equivalent


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1.0 if the last boxed answer says the same as the truth, 0.0 otherwise."""
    return float(_compute_score(solution_str, ground_truth))


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    if str1 is None or str2 is None:
        return str1 is str2
    return is_equivalent(str2, str1)


def last_boxed_only_string(string: str) -> str | None:
    """The last box with its `\\boxed{…}`; None without one."""
    inner = last_boxed(string)
    return None if inner is None else f"\\boxed{{{inner}}}"


def remove_boxed(s: str) -> str:
    """What the box holds.

    Raises:
        AssertionError: `s` is no box.
    """
    inner = last_boxed(s)
    if inner is None:
        raise AssertionError(f"{s!r} is no boxed answer")
    return inner
