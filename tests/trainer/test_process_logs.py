"""What the processes of a run print is in its directory, the last words of a crash too, and still on the terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_policy import write_task

CRASH = """
import faulthandler, os, sys, time
from quadriga.tracking.process_log import keep_output
faulthandler.enable()
keep_output(sys.argv[1], "actor_rollout", 1)
keep_output(sys.argv[1], "critic", 1)
print("from Python")
print("to the other stream", file=sys.stderr)
os.write(2, b"from native code\\n")
time.sleep(2)
print("at last")
os.abort()
"""


def test_what_python_and_native_code_say_is_kept_and_shown(tmp_path):
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], capture_output=True, text=True, timeout=60)
        assert done.returncode < 0
    for text in ("from Python", "to the other stream", "from native code"):
        assert text in done.stdout, "before it crashed it was copied"
    log = (tmp_path / "logs" / "actor_rollout_1.log").read_text()
    for text in ("from Python", "to the other stream", "from native code", "at last", "Fatal Python error: Aborted"):
        assert log.count(text) == 2, "a later process goes on in the same file"
    assert log.count("actor_rollout rank 1, pid ") == 2
    assert (tmp_path / "logs" / "critic_1.log").read_text() == log


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path):
    (tmp_path / "logs").write_text("no folder")
    done = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert "from Python" in done.stdout
    assert "Fatal Python error: Aborted" in done.stderr


@pytest.mark.slow
def test_the_logs_of_a_run_have_what_its_workers_and_its_runner_said(tmp_path):
    """Also after it was resumed."""
    config = write_task(tmp_path / "task")
    (tmp_path / "task" / "loss.py").write_text(LOSS)
    (tmp_path / "task" / "sampler.py").write_text(SAMPLER)
    config["algorithm"] = {"adv_estimator": "grpo"}
    config["actor_rollout_ref"]["actor"]["policy_loss"] = {"loss_mode": f"{tmp_path}/task/loss.py:loss"}
    config["data"]["sampler"] = {"class_path": f"{tmp_path}/task/sampler.py", "class_name": "Sampler"}
    config["trainer"] |= {"executor": "ray", "test_freq": -1}
    program = "import sys, json; from quadriga.trainer.main_ppo import run_ppo; run_ppo(json.loads(sys.argv[1]))"
    for steps in (1, 2):
        config["trainer"]["total_training_steps"] = steps
        command = [sys.executable, "-c", program, json.dumps(config)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=170)
        assert done.returncode == 0, done.stderr
    logs = Path(config["trainer"]["default_local_dir"]) / "logs"
    worker, runner = (logs / "actor_rollout_0.log").read_text(), (logs / "runner_0.log").read_text()
    assert worker.count("in the loss") == 2
    assert worker.count("on its standard error") == 2
    assert worker.count("actor_rollout rank 0, pid ") == 2
    assert "a sampler is made" in runner
    assert "in the loss" in done.stdout + done.stderr, "and on the terminal"


LOSS = """
import sys
def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg):
    print("in the loss")
    print("on its standard error", file=sys.stderr)
    return loss_agg(-(log_prob - old_log_prob).exp() * advantages, response_mask), {}
"""
SAMPLER = """
from quadriga.data.sampler import ResumableSampler

class Sampler(ResumableSampler):
    def __init__(self, data_source, data_config):
        print("a sampler is made")
        super().__init__(len(data_source), data_config.train_batch_size, data_config.shuffle, data_config.seed)
"""
