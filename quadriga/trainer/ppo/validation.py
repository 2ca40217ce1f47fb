"""Validation figures per data source: mean@n, best@n and maj@n, answers without a result, lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from quadriga.rewards.result import UNPARSED


def validation_metrics(
    sources: Sequence[str], uids: Sequence[str], results: dict[str, list[Any]], n: int
) -> dict[str, float]:
    """One figure per data source and statistic.

    Args:
        sources, uids: data source and prompt of each row; a prompt has `n` rows.
        results: column -> value of each row, as a reward manager gives them: score, and where known acc, pred and outcome; and
            response_tokens, if lengths are to be told.

    mean@n is the mean over a prompt's rows, best@n their maximum, maj@n the value of the answer given most often (the
    earlier one on a tie); each is then averaged over prompts.
    """
    figures: dict[str, float] = {}
    for source in dict.fromkeys(sources):
        groups: dict[str, list[int]] = {}
        for row, uid in enumerate(uids):
            if sources[row] == source:
                groups.setdefault(uid, []).append(row)
        for name, values in prompt_values(list(groups.values()), results, n).items():
            figures[f"val/{source}/{name}"] = sum(values) / len(values)
        rows = [row for members in groups.values() for row in members]
        if outcomes := results.get("outcome"):
            figures[f"val/{source}/unparsed"] = sum(outcomes[row] == UNPARSED for row in rows) / len(rows)
        if lengths := results.get("response_tokens"):
            figures[f"val/{source}/response_length/mean"] = sum(lengths[row] for row in rows) / len(rows)
    return figures


def prompt_values(prompts: Sequence[list[int]], results: dict[str, list[Any]], n: int) -> dict[str, list[float]]:
    """`acc/mean@n`, `score/best@n`, … → one value a prompt. `prompts` holds the rows of each; see `validation_metrics`."""
    found: dict[str, list[float]] = {}
    for variable in ("acc", "score"):
        values = results.get(variable)
        if values is None or any(values[row] is None for rows in prompts for row in rows):
            continue
        found[f"{variable}/mean@{n}"] = [sum(values[r] for r in rows) / len(rows) for rows in prompts]
        if n > 1:
            found[f"{variable}/best@{n}"] = [max(values[r] for r in rows) for rows in prompts]
            answers = results.get("pred")
            if answers is not None and any(answer is not None for answer in answers):
                found[f"{variable}/maj@{n}"] = [values[_majority(rows, answers)] for rows in prompts]
    return found


def _majority(rows: list[int], answers: Sequence[Any]) -> int:
    """The first of the rows that gave the commonest answer. Rows without an answer count only if none has one."""
    given = [r for r in rows if answers[r] is not None] or rows
    commonest = Counter(answers[r] for r in given).most_common(1)[0][0]
    return next(r for r in given if answers[r] == commonest)
