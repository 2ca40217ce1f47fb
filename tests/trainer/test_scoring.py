"""Scoring while others are still being generated."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_policy import write_task

from quadriga.trainer.main_ppo import run_ppo

NOTING_WHEN = """
import time

def score(data_source, solution_str, ground_truth, extra_info=None):
    with open({file!r}, "a") as out:
        out.write(f"{{time.time()}}\\n")
    return float(len(solution_str))
"""


def test_samples_are_scored_while_others_are_still_being_generated(tmp_path):
    config = write_task(tmp_path / "task")
    times = tmp_path / "times"
    (tmp_path / "reward.py").write_text(NOTING_WHEN.format(file=str(times)))
    config["custom_reward_function"] = {"path": str(tmp_path / "reward.py"), "name": "score"}
    config["data"] |= {"max_response_length": 40, "val_max_samples": 1}
    config["actor_rollout_ref"]["rollout"] |= {"n": 2, "max_num_seqs": 1, "ignore_eos": True}  # one after the other
    config["trainer"] |= {"total_training_steps": 1, "test_freq": -1}
    config["algorithm"] = {"adv_estimator": "grpo"}
    run_ppo(config)
    run = Path(config["trainer"]["default_local_dir"])
    (generation,) = [
        e for e in json.loads((run / "timeline.json").read_text()) if e["name"] == "gen" and e["args"].get("step") == 1
    ][:1]
    scored = [float(line) for line in times.read_text().splitlines()][:16]
    assert len(scored) == 16
    end = (generation["ts"] + generation["dur"]) / 1e6
    early = sum(when < end for when in scored)
    assert early > 8, f"only {early} of 16 samples were scored before generation ended"
    rows = [json.loads(line) for line in (run / "samples" / "train_00000001.jsonl").read_text().splitlines()]
    assert all(row["score"] == len(row["response"]) for row in rows), "each score is that of its own row"
