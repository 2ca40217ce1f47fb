"""Tasks of reasoning-gym, judged by their own verifiers (`pip install quadriga[reasoning_gym]`).

The data source is `reasoning_gym/<task>`. `ground_truth` is JSON text, as `quadriga prep reasoning_gym` writes it: `entry` (question,
answer and metadata, as the task made them) and `config` (what of the task's configuration was set). The answer is the last
`<answer>…</answer>`, else the last `\\boxed{…}`, else the text after the last `####`.

A verifier may compute with what the policy wrote (some parse it with sympy): it runs in a process with a deadline and a memory limit,
but is not shut in.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from quadriga.errors import ConfigError, DataError
from quadriga.rewards.scorers.extract import last_boxed, last_tag

_MAX_ANSWER = 20_000


def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    partial: bool = True,
) -> dict[str, Any]:
    """What the task's verifier says, from 0.0 to 1.0; with `partial=False` 1.0 or 0.0."""
    task = str(data_source).partition("/")[2]
    entry, config = _read(ground_truth)
    dataset = _dataset(task, json.dumps(config, sort_keys=True))
    answer = extract_answer(solution_str)
    if answer is None or len(answer) > _MAX_ANSWER:
        return {"score": 0.0, "acc": 0.0, "pred": None, "parsed": False}
    failed = 0.0
    try:
        value = float(dataset.score_answer(answer, entry))
    except Exception:  # a verifier that cannot read the answer raises whatever its parser raises
        value, failed = 0.0, 1.0
    right = float(value >= 1.0)
    found = {"score": value if partial else right, "acc": right, "pred": answer, "parsed": True}
    return {**found, "verifier_error": failed}


def extract_answer(text: str) -> str | None:
    answer = last_tag(text)
    if answer is None:
        answer = last_boxed(text)
    if answer is None and "####" in text:
        answer = text.rpartition("####")[2]
    return None if answer is None else answer.strip()


def warm_up() -> None:
    """Import the package once, before processes are forked."""
    import reasoning_gym  # noqa: F401


@lru_cache(maxsize=256)
def _dataset(task: str, config: str) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            "scoring tasks of reasoning-gym needs the package `reasoning-gym`", "pip install 'quadriga[reasoning_gym]'"
        ) from error
    try:
        return reasoning_gym.create_dataset(task, size=1, **json.loads(config))
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"reasoning-gym cannot make the task {task!r}: {error}",
            "prepare the data with this version of reasoning-gym",
        ) from error


def _read(ground_truth: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        said = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        entry = dict(said["entry"])
        # JSON has no tuples, and some verifiers compare with them.
        return {**entry, "metadata": _tuples(entry["metadata"], task=entry["metadata"]["source_dataset"])}, said[
            "config"
        ]
    except (KeyError, TypeError, ValueError) as problem:
        raise DataError(
            f"the ground truth {str(ground_truth)[:120]!r} is no entry of reasoning-gym",
            "write the rows with `quadriga prep reasoning_gym`",
        ) from problem


def _tuples(metadata: dict[str, Any], task: str) -> dict[str, Any]:
    if task not in ("arc_agi", "rearc"):
        return metadata
    return {key: _deep_tuple(value) if key in ("input", "output") else value for key, value in metadata.items()}


def _deep_tuple(value: Any) -> Any:
    return tuple(map(_deep_tuple, value)) if isinstance(value, list) else value
