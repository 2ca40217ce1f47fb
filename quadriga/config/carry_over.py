"""What becomes of a key that verl has and Quadriga does not, so that a verl user's command line carries over.

A value that says what Quadriga does anyway is accepted and dropped. Any other value is refused with the reason and
with what to do instead: nothing is ignored silently. The table is `foreign_keys`.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from quadriga.config.foreign_keys import TABLE, ForeignKey, Renamed
from quadriga.config.schema import Config
from quadriga.config.typed import Problems, default_of, is_free_form, is_known

ENGINE = "actor_rollout_ref.rollout.name"
NATIVE = "remove it, or set native: Quadriga generates with the training module itself"
VALUES: dict[tuple[str, str], str] = {
    (ENGINE, "vllm"): NATIVE,
    (ENGINE, "sglang"): NATIVE,
    (ENGINE, "trtllm"): NATIVE,
    (ENGINE, "hf"): NATIVE,
    ("algorithm.adv_estimator", "grpo_vectorized"): "set grpo, which is vectorised",
    ("algorithm.adv_estimator", "rloo_vectorized"): "set rloo, which is vectorised",
    ("trainer.logger", "file"): "remove it from the list: metrics.jsonl is always written",
    ("algorithm.kl_penalty", "full"): "set kl: only estimators from the sampled tokens are there",
    ("reward_model.reward_manager", "prime"): "set naive: scoring always runs in parallel processes",
}
"""Fixes for values of keys that Quadriga has, where verl knows a value that is not there."""


def carry_over(path: str, value: Any, problems: Problems) -> bool:
    """Whether `path` is a key of verl's that Quadriga lacks; if its value cannot be honoured, that is a problem too."""
    row = _row(path)
    if row is None:
        return False
    if value is None or value in ({}, []):
        return True  # null and empty mean "not set"
    if isinstance(row, Renamed):
        here = row.target(path)
        if not (is_known(Config, here) or is_free_form(Config, here)):
            return carry_over(here, value, problems)
        if here == f"{path}_per_gpu":
            fix = f"write {here}=<the same divided by the number of GPUs>"
            problems.add(f"{path}={value}: the rows of a single pass are counted per GPU here", fix)
        elif value != default_of(Config, here):
            problems.add(f"{path}={value}: this key has another name here", f"write {here}={value}")
        return True
    if not row.accepts(value):
        subject = _section(path, row.pattern) or f"{path}={value}"
        problems.add(f"{subject}: {row.why}", row.instead)
    return True


def fix_for_value(path: str, value: Any) -> str | None:
    """What to write instead of a value that another system knows for a key of ours; None where nothing is known."""
    items: Iterable[Any] = value if isinstance(value, list) else [value]
    return next((VALUES[path, item] for item in items if isinstance(item, str) and (path, item) in VALUES), None)


@cache
def _row(path: str) -> ForeignKey | Renamed | None:
    return next((row for row in TABLE if fnmatchcase(path, row.pattern)), None)


def _section(path: str, pattern: str) -> str | None:
    """`a.b.megatron.*` for any key in there, so that a whole section is refused in one line."""
    if not pattern.endswith(".*"):
        return None
    last = pattern.removesuffix(".*").rsplit(".", 1)[-1].lstrip("*")
    parts = path.split(".")
    return ".".join(parts[: parts.index(last) + 1]) + ".*" if last in parts else None
