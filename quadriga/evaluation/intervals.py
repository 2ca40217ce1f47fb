"""How far a figure may be off: 95 % confidence intervals of a mean over prompts.

Prompts are the independent draws; samples of one prompt are not. So an interval is over one value a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.959964
"""Standard deviations on either side that hold 95 % of a normal distribution."""


def share_interval(values: Sequence[float], samples_per_prompt: int = 1) -> tuple[float, float]:
    """Interval of a mean of values in [0, 1]: Wilson's, which is right near 0 and 1 too, where others have no width.

    With several samples a prompt, values vary less than single right-or-wrong answers would: the interval is that of as
    many independent answers as would vary as little, at most as many as there were samples.
    """
    n = len(values)
    mean = sum(values) / n
    variance = sum((v - mean) ** 2 for v in values) / n
    draws: float = n
    if 0 < mean < 1:
        most = n * samples_per_prompt
        draws = most if variance == 0 else min(most, n * mean * (1 - mean) / variance)
    centre = (mean + Z * Z / (2 * draws)) / (1 + Z * Z / draws)
    half = Z / (1 + Z * Z / draws) * math.sqrt(mean * (1 - mean) / draws + Z * Z / (4 * draws * draws))
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Interval of a mean of any values, from their spread; None for a single one, which has none."""
    n = len(values)
    if n < 2:
        return None
    mean = sum(values) / n
    half = Z * math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return mean - half, mean + half
