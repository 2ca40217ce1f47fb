"""Plain arithmetic: the answer is one number, stated after `####` or, failing that, as the last number of the text."""

from __future__ import annotations

from typing import Any

from quadriga.rewards.scorers import gsm8k


def score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """1.0 when the number is exactly the reference, else 0.0."""
    return gsm8k.score(data_source, solution_str, ground_truth, extra_info, method="flexible")
