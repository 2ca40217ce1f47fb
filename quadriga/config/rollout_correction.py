"""Whether the names and bounds of `algorithm.rollout_correction` can be read."""

from __future__ import annotations

from itertools import pairwise, product

from quadriga.config.schema import RolloutCorrectionConfig
from quadriga.config.typed import Problems

SECTION = "algorithm.rollout_correction"
REJECTIONS = tuple(map("_".join, product(("token", "seq_sum", "seq_mean", "seq_max"), ("k1", "k2", "k3"))))


def report_rollout_correction(correction: RolloutCorrectionConfig, problems: Problems) -> None:
    if _bounds(correction.rollout_is_threshold) is None:
        problems.add(
            f"{SECTION}.rollout_is_threshold={correction.rollout_is_threshold!r} is neither a number above 0 nor lo_hi",
            f"set {SECTION}.rollout_is_threshold=2.0, or 0.5_2.0 for two bounds",
        )
    if correction.rollout_rs is None:
        return
    names = [name.strip() for name in correction.rollout_rs.split(",")]
    for name in names:
        if name not in REJECTIONS:
            problems.add(f"{SECTION}.rollout_rs: unknown name {name!r}", f"use {', '.join(REJECTIONS)}")
    threshold = correction.rollout_rs_threshold
    parts = [] if threshold is None else str(threshold).split(",")
    if len(parts) not in (1, len(names)):
        problems.add(
            f"{SECTION}.rollout_rs_threshold={threshold} has {len(parts)} bounds for {len(names)} names in rollout_rs",
            "give one for all or one for each, with commas: 0.5_2.0 for k1, 0.01 for k2 and k3",
        )
    for part, name in zip(parts * len(names) if len(parts) == 1 else parts, names):
        bounds = _bounds(part)
        if bounds is None or (len(bounds) == 2 and not name.endswith("k1")):
            problems.add(
                f"{SECTION}.rollout_rs_threshold: {part!r} is no bound for {name}",
                "write C or lo_hi with 0 < lo < hi for k1, one upper bound for k2 and k3",
            )


def _bounds(text: float | str) -> list[float] | None:
    """`2.0` or `0.5_2.0` as one or two rising positive numbers, None where it is not that."""
    try:
        numbers = [float(part) for part in str(text).split("_")]
    except ValueError:
        return None
    rising = all(low < high for low, high in pairwise(numbers))
    return numbers if len(numbers) in (1, 2) and numbers[0] > 0 and rising else None
