"""The page docs/algorithms.md must name everything that there is to choose from."""

from __future__ import annotations

from pathlib import Path

import pytest

from quadriga.algorithms import AGGREGATION_MODES, adv_estimator_names, kl_estimator_names, policy_loss_names
from quadriga.algorithms.correction import REJECTION_SCOPES, REJECTION_STATISTICS

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()

CHOICES = [
    *adv_estimator_names(),
    *policy_loss_names(),
    *kl_estimator_names(),
    *AGGREGATION_MODES,
    *REJECTION_SCOPES,
    *REJECTION_STATISTICS,
]


@pytest.mark.parametrize("name", sorted(set(CHOICES)))
def test_every_choice_is_on_the_page(name):
    assert f"`{name}`" in PAGE
