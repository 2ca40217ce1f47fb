"""The whole program, killed over and over at random instants, in one process without Ray: a hundred deaths in minutes."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
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
    "two steps ahead": (merged(ALGORITHMS["grpo"], {"async_training": {"staleness": 2}}), 20),
}
STEPS = 12


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


def killed_again_and_again(task: dict, folder: Path, chance: random.Random, changes: dict, kills: int) -> list[Path]:
    """Runs with five lives or so each, until `kills` of those have ended by SIGKILL; and an undisturbed one, the first."""

    def configuration(name: str) -> dict:
        trainer = {
            "total_training_steps": STEPS,
            "save_freq": 2,
            "test_freq": 5,
            "max_actor_ckpt_to_keep": 2,
            "default_local_dir": str(folder / name),
        }
        return merged(task, changes, {"trainer": trainer})

    assert attempt(configuration("whole")) == 0
    killed, runs = 0, [folder / "whole"]
    while killed < kills:
        config = configuration(f"lives_{len(runs) - 1}")
        runs.append(Path(config["trainer"]["default_local_dir"]))
        lives = [attempt(config, chance) for _ in range(5)]
        assert set(lives) <= {0, -9}, (runs[-1] / "console.txt").read_text()
        assert attempt(config) == 0
        killed += lives.count(-9)
    print(f"{killed} deaths in {len(runs) - 1} runs")
    return runs


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_with_many_lives_equals_one_with_one(task, tmp_path, chance, kind):
    whole, *others = killed_again_and_again(task, tmp_path, chance, *RUNS[kind])
    for other in others:
        assert_same_run(whole, other)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_free_run_with_many_lives_trains_on_every_group_once(task, tmp_path, chance):
    free = merged(ALGORITHMS["grpo"], {"async_training": {"staleness": 2, "mode": "free"}})
    for run in killed_again_and_again(task, tmp_path, chance, free, kills=10):
        files = sorted((run / "samples").glob("train_*"))
        uids = Counter(json.loads(line)["uid"] for file in files for line in file.read_text().splitlines())
        assert len(uids) == STEPS * 8
        assert set(uids.values()) == {8}, "groups of eight, none lost, none twice"
