"""The embedded task is learned, by every estimator the documentation names, through the command a user types."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def accuracies(tmp_path, *overrides: str) -> list[float]:
    """Held-out accuracy at every validation of a quickstart run with changes."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "quadriga.cli", "train", "--config-name=quickstart", *overrides]
    done = subprocess.run(
        [*command, f"trainer.default_local_dir={run}"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [v for m in metrics for k, v in m.items() if k.startswith("val/") and k.endswith("/acc/mean@1")]


def test_the_quickstart_reaches_ninety_percent(tmp_path):
    told = accuracies(tmp_path)
    assert 0.3 <= told[0] <= 0.6, "there is something to learn, and something to start from"
    assert told[-1] >= 0.9


@pytest.mark.parametrize("estimator", ["gae", "grpo", "rloo", "reinforce_plus_plus", "remax"])
def test_every_estimator_adds_twenty_points(tmp_path, estimator):
    told = accuracies(
        tmp_path,
        f"algorithm.adv_estimator={estimator}",
        *(["critic.optim.lr=1e-3"] if estimator == "gae" else []),
        "trainer.total_training_steps=20",
        "data.seed=3",
    )
    assert told[-1] >= told[0] + 0.2, told
