"""The options of `algorithm.rollout_correction`, read in one place: by the checks before a run, and by the correction itself.

Bounds are of the ratio π/μ, trainer over rollout. (verl's k1 bounds are of μ/π: [lo, hi] there is [1/hi, 1/lo] here.)
"""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

from quadriga.config.schema_algorithm import RolloutCorrectionConfig
from quadriga.config.typed import Problems
from quadriga.errors import ConfigError

SECTION = "algorithm.rollout_correction"
REJECTION_SCOPES = ("token", "seq_sum", "seq_mean", "seq_max")
REJECTION_STATISTICS = ("k1", "k2", "k3")
REJECTIONS = tuple(map("_".join, product(REJECTION_SCOPES, REJECTION_STATISTICS)))


class Bounds(NamedTuple):
    """`2.0` is an upper bound alone, `0.5_2.0` has both."""

    lower: float | None
    upper: float


class Rejection(NamedTuple):
    """One test of `rollout_rs`: a statistic of the log-ratio over a scope, and what it must be within."""

    scope: str
    statistic: str
    bounds: Bounds


def parse_bounds(threshold: float | str, key: str = "rollout_is_threshold") -> Bounds:
    """2.0 or "2.0" → (None, 2.0); "0.5_2.0" → (0.5, 2.0). ConfigError for anything else."""
    try:
        numbers = [float(part) for part in str(threshold).split("_")]
    except ValueError:
        numbers = []
    rising = len(numbers) == 1 or (len(numbers) == 2 and numbers[0] < numbers[1])
    if not (rising and numbers[0] > 0 and math.isfinite(numbers[-1])):
        raise ConfigError(
            f"{SECTION}.{key}={threshold!r} is neither a number above 0 nor lo_hi",
            f"set {SECTION}.{key}=2.0, or 0.5_2.0 for two bounds",
        )
    return Bounds(None if len(numbers) == 1 else numbers[0], numbers[-1])


def parse_rejections(tests: str | None, thresholds: float | str | None) -> list[Rejection]:
    """`rollout_rs` with `rollout_rs_threshold`, one test after the other. ConfigError where they cannot be read."""
    if tests is None:
        return []
    names = [name.strip() for name in tests.split(",")]
    for name in names:
        if name not in REJECTIONS:
            raise ConfigError(f"{SECTION}.rollout_rs: unknown name {name!r}", f"use {', '.join(REJECTIONS)}")
    parts = [] if thresholds is None else [part.strip() for part in str(thresholds).split(",")]
    if len(parts) not in (1, len(names)):
        raise ConfigError(
            f"{SECTION}.rollout_rs_threshold={thresholds} has {len(parts)} bounds for {len(names)} names in rollout_rs",
            "give one for all or one for each, with commas: 0.5_2.0 for k1, 0.01 for k2 and k3",
        )
    return [_rejection(name, part) for name, part in zip(names, parts * len(names) if len(parts) == 1 else parts)]


def _rejection(name: str, part: str) -> Rejection:
    scope, _, statistic = name.rpartition("_")
    try:
        bounds = parse_bounds(part)
    except ConfigError:
        bounds = None
    if bounds is None or (bounds.lower is not None and statistic != "k1"):
        raise ConfigError(
            f"{SECTION}.rollout_rs_threshold: {part!r} is no bound for {name}",
            "write C or lo_hi with 0 < lo < hi for k1, one upper bound for k2 and k3",
        )
    if statistic == "k1" and bounds.lower is None:
        bounds = Bounds(1 / bounds.upper, bounds.upper)
    return Rejection(scope, statistic, bounds)


def turned(tests: str, thresholds: float | str) -> str:
    """`rollout_rs_threshold` with each lo_hi of a k1 test as 1/hi_1/lo: bounds of μ/π, as verl has them, as bounds of π/μ.

    Raises:
        ConfigError: tests or bounds cannot be read.
    """
    parse_rejections(tests, thresholds)
    names = [name.strip() for name in tests.split(",")]
    parts = [part.strip() for part in str(thresholds).split(",")]
    if not any("_" in part for part in parts):
        return str(thresholds)
    parts = parts * len(names) if len(parts) == 1 else parts
    return ",".join(
        "_".join(str(1 / float(bound)) for bound in reversed(part.split("_"))) if "_" in part else part
        for part in parts
    )


def report_rollout_correction(correction: RolloutCorrectionConfig, problems: Problems) -> None:
    """Note what cannot be read, and what does not go together."""
    for read in (
        lambda: parse_bounds(correction.rollout_is_threshold),
        lambda: parse_rejections(correction.rollout_rs, correction.rollout_rs_threshold),
    ):
        try:
            read()
        except ConfigError as error:
            problems.add(error.what, error.fix)
    if correction.m2po_threshold is not None and correction.bypass_mode:
        problems.add(
            f"{SECTION}.m2po_threshold measures recomputed log-probs against the rollout's, and bypass_mode recomputes none",
            f"remove {SECTION}.m2po_threshold, or set {SECTION}.bypass_mode=False",
        )
