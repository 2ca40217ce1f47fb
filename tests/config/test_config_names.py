"""The names that the configuration knows are those of the rooms that implement them."""

from __future__ import annotations

import json
import subprocess
import sys

from quadriga.config import names

REGISTERED = """
import json
from quadriga.algorithms.advantages import adv_estimator_names
from quadriga.algorithms.aggregate import AGGREGATION_MODES
from quadriga.algorithms.kl import kl_estimator_names
from quadriga.algorithms.policy_losses import policy_loss_names
from quadriga.algorithms.value_losses import DPO_LOSSES
print(json.dumps([adv_estimator_names(), policy_loss_names(), kl_estimator_names(), AGGREGATION_MODES]
                 + [DPO_LOSSES]))
"""


def test_algorithm_names_are_those_of_the_registries() -> None:
    # In a process of its own: other tests register functions in this one.
    done = subprocess.run([sys.executable, "-c", REGISTERED], capture_output=True, text=True, timeout=120, check=True)
    known = [names.ADV_ESTIMATORS, names.POLICY_LOSSES, names.KL_ESTIMATORS, names.LOSS_AGGREGATIONS]
    known.append(names.DPO_LOSSES)
    assert [sorted(group) for group in json.loads(done.stdout)] == [sorted(group) for group in known]


def test_group_estimators_are_estimators() -> None:
    assert set(names.GROUP_ESTIMATORS) < set(names.ADV_ESTIMATORS)
