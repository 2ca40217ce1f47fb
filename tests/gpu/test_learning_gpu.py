"""Twenty steps of the quickstart on a GPU, as a user starts them: the embedded model learns its sums."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.timeout(300)
def test_the_embedded_model_learns_within_twenty_steps(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quadriga.trainer.main_ppo", "--config-name=quickstart"]
    settings = ["trainer.total_training_steps=20", "trainer.n_gpus_per_node=1", f"trainer.default_local_dir={tmp_path}"]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    held_out = [value for line in lines for key, value in line.items() if key.endswith("acc/mean@1")]
    assert held_out[-1] > held_out[0] + 0.3
    assert max(line["rollout/logprob_diff_mean"] for line in lines if "rollout/logprob_diff_mean" in line) < 0.05
