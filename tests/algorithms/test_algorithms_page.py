"""The page docs/algorithms.md must name everything that there is to choose from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from quadriga.algorithms import (
    AGGREGATION_MODES,
    DPO_LOSSES,
    adv_estimator_names,
    compute_advantage,
    kl_estimator_names,
    policy_loss_names,
)
from quadriga.algorithms import advantages as advantage_module
from quadriga.config.rollout_correction import REJECTION_SCOPES, REJECTION_STATISTICS

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()

CHOICES = [
    *adv_estimator_names(),
    *policy_loss_names(),
    *kl_estimator_names(),
    *AGGREGATION_MODES,
    *DPO_LOSSES,
    *REJECTION_SCOPES,
    *REJECTION_STATISTICS,
]


@pytest.mark.parametrize("name", sorted(set(CHOICES)))
def test_every_choice_is_on_the_page(name):
    assert f"`{name}`" in PAGE


def test_the_example_of_ones_own_estimator_runs(monkeypatch):
    monkeypatch.setattr(advantage_module._ESTIMATORS, "_functions", dict(advantage_module._ESTIMATORS._functions))
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(example, {"__name__": "example"})
    rewards, mask = torch.tensor([[0.0, 3.0], [1.0, 0.0]]), torch.tensor([[1, 1], [1, 0]])
    advantages, _ = compute_advantage("centred", token_level_rewards=rewards, response_mask=mask)
    assert advantages.tolist() == [[1, 1], [-1, 0]]
