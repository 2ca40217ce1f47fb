"""The whole program, killed over and over at random instants, in one process without Ray: a hundred deaths in minutes."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

import pytest
from test_killed_runs import ALGORITHMS
from user_run import assert_same_run, merged

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "transformers.models.llama.modeling_llama",
        "torch.distributed.fsdp",
        "peft",
        "quadriga.trainer.main_ppo",
        "quadriga.trainer.ppo.ray_trainer",
        "quadriga.workers.actor_rollout_ref",
        "quadriga.rollout.native.engine",
    ]
)

RUNS = {
    "grpo": (ALGORITHMS["grpo"], 30),
    "ppo": (ALGORITHMS["ppo"], 30),
    "lora": (merged(ALGORITHMS["grpo"], {"actor_rollout_ref": {"model": {"lora_rank": 4}}}), 20),
}


def train(config: dict) -> None:
    from quadriga.trainer.main_ppo import run_ppo

    folder = Path(config["trainer"]["default_local_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    with (folder / "console.txt").open("a") as console:
        os.dup2(console.fileno(), 1)
        os.dup2(console.fileno(), 2)
        run_ppo(config)


def attempt(config: dict, chance: random.Random | None = None) -> int:
    """One life of the run, ended by SIGKILL at an instant that `chance` chooses; its exit status."""
    os.environ["OMP_NUM_THREADS"] = "1"
    process = _CONTEXT.Process(target=train, args=(config,))
    process.start()
    if chance is not None:
        recorded = Path(config["trainer"]["default_local_dir"]) / "metrics.jsonl"
        wanted = lines_in(recorded) + chance.randrange(4)
        deadline = time.monotonic() + 60
        while process.is_alive() and lines_in(recorded) < wanted and time.monotonic() < deadline:
            time.sleep(0.005)
        process.join(chance.uniform(0, 1.0 if wanted == 0 else 0.15))
        process.kill()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def lines_in(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_with_many_lives_equals_one_with_one(task, tmp_path, chance, kind):
    changes, kills = RUNS[kind]

    def configuration(folder: str) -> dict:
        trainer = {
            "total_training_steps": 12,
            "save_freq": 2,
            "test_freq": 5,
            "max_actor_ckpt_to_keep": 2,
            "default_local_dir": str(tmp_path / folder),
        }
        return merged(task, changes, {"trainer": trainer})

    assert attempt(configuration("whole")) == 0
    killed, folder = 0, 0
    while killed < kills:
        config = configuration(f"lives_{folder}")
        lives = [attempt(config, chance) for _ in range(5)]
        assert set(lives) <= {0, -9}, (Path(config["trainer"]["default_local_dir"]) / "console.txt").read_text()
        assert attempt(config) == 0
        assert_same_run(tmp_path / "whole", tmp_path / f"lives_{folder}")
        killed += lives.count(-9)
        folder += 1
    print(f"{killed} deaths in {folder} runs")
