"""Whatever happens to the bytes of a checkpoint, it is noticed, named and passed over, and the run goes on from the one before."""

from __future__ import annotations

import logging
import os
import random
import shutil
from pathlib import Path

import pytest
from test_killed_runs import ALGORITHMS
from user_run import assert_same_run, merged

from quadriga.checkpoint import CheckpointStore
from quadriga.trainer.main_ppo import run_ppo


def configuration(task: dict, folder: Path, steps: int) -> dict:
    trainer = {"default_local_dir": str(folder), "total_training_steps": steps, "save_freq": 1, "logger": []}
    return merged(task, ALGORITHMS["grpo"], {"trainer": trainer})


def damage(folder: Path, chance: random.Random) -> str:
    """Do something to one file of a checkpoint. Says what."""
    file = chance.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    content = file.read_bytes()
    kind = chance.choice(["flip", "cut", "grow", "delete", "zero", "swap"])
    if kind == "flip":
        place = chance.randrange(len(content))
        content = content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]
    elif kind == "cut":
        content = content[: chance.randrange(len(content))]
    elif kind == "grow":
        content += chance.randbytes(chance.randrange(1, 100))
    elif kind == "zero":
        content = bytes(len(content))
    elif kind == "swap":
        content = chance.randbytes(len(content))
    if kind == "delete":
        file.unlink()
    else:
        file.write_bytes(content)
    return f"{kind} {file.relative_to(folder)}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_damages_are_passed_over_by_name(task, tmp_path, chance, caplog):
    run_ppo(configuration(task, tmp_path / "run", 2))
    for number in range(100):
        store = CheckpointStore(shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / f"copy_{number}"))
        what = damage(store.folder / "global_step_2", chance)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = store.find("auto")
        assert found is not None, what
        assert found.step == 1, what
        assert "global_step_2" in caplog.text, f"{what} is passed over without a word"
        shutil.rmtree(store.folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(task, tmp_path, chance):
    os.environ["OMP_NUM_THREADS"] = "1"
    run_ppo(configuration(task, tmp_path / "whole", 6))
    for number in range(5):
        folder = tmp_path / f"damaged_{number}"
        run_ppo(configuration(task, folder, 4))
        print(damage(folder / "checkpoints" / "global_step_4", chance))
        run_ppo(configuration(task, folder, 6))
        assert_same_run(tmp_path / "whole", folder)
