"""Limits within which differences of log-probs are exponentiated, so that no token can overflow a loss."""

from __future__ import annotations

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this: exp(±20) spans 2e-9 to 5e8, whose squares are still finite in float32."""

GSPO_LOG_RATIO_BOUND = 10.0
"""Upper bound of a row's mean log-ratio in losses that have no dual clip: exp(10) ≈ 22,000."""

KL_BOUND = 10.0
"""The k3 estimate of one token is at most this."""
