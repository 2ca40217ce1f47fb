"""A disk that fills up under a run: the run ends with a word, nothing is lost, and it goes on when there is room again."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from test_killed_runs import ALGORITHMS
from user_run import UserRun, assert_same_run, merged

STEPS = 6
ROWS = 64  # of a step

IN_A_SMALL_FILE_SYSTEM = """
    import json, os, shutil, subprocess, sys
    from pathlib import Path
    from quadriga.checkpoint import CheckpointStore
    from quadriga.errors import QuadrigaError
    from quadriga.trainer.main_ppo import run_ppo

    disk, task, kept = Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    outcomes = []
    try:
        run_ppo(task)
    except QuadrigaError as error:
        outcomes.append(f"{type(error).__name__}: {error.what}")
    found = CheckpointStore(disk / "run" / "checkpoints").find("auto")
    outcomes.append(found.step if found else 0)
    (disk / "ballast").unlink(missing_ok=True)
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    run_ppo(task)
    shutil.copytree(disk / "run", kept)
    (kept / "outcomes.json").write_text(json.dumps(outcomes))
"""

BALLAST = """
import os

def fill_the_disk(data_source, solution_str, ground_truth, extra_info=None):
    with open({calls!r}, "a") as file:
        file.write("x")
    if os.path.getsize({calls!r}) == {at}:
        try:
            with open({ballast!r}, "wb", buffering=0) as file:
                while True:
                    file.write(bytes({chunk}))
        except OSError:
            pass
    return float(len(solution_str))
"""


def run_in_a_small_file_system(config: dict, disk: Path, megabytes: float, kept: Path) -> list:
    """The run, ended by the full disk; the newest checkpoint then; the run again with room. `kept` gets its run directory."""
    mount = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    small = f"mount -t tmpfs -o size={int(megabytes * 1024)}k tmpfs {disk}"
    if not shutil.which("unshare") or subprocess.run([*mount, small], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system (unshare --map-root-user --mount)")
    script = [*mount, f'{small} && exec "$0" -c "$1" "$2" "$3" "$4"', sys.executable]
    arguments = [textwrap.dedent(IN_A_SMALL_FILE_SYSTEM), str(disk), json.dumps(config), str(kept)]
    done = subprocess.run([*script, *arguments], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((kept / "outcomes.json").read_text())


def configuration(task: dict, folder: Path, *changes: dict) -> dict:
    trainer = {"total_training_steps": STEPS, "save_freq": 1, "logger": [], "default_local_dir": str(folder)}
    return merged(task, ALGORITHMS["grpo"], {"trainer": trainer}, *changes)


@pytest.mark.slow
def test_checkpoints_fill_the_disk(task, tmp_path):
    UserRun(configuration(task, tmp_path / "whole")).run()
    (tmp_path / "disk").mkdir()
    config = configuration(task, tmp_path / "disk" / "run")
    outcome, newest = run_in_a_small_file_system(config, tmp_path / "disk", 3.0, tmp_path / "kept")
    print(outcome, newest)
    assert outcome.startswith("CheckpointError: ")
    assert "left, a checkpoint needs" in outcome
    assert 1 <= newest < STEPS
    assert_same_run(tmp_path / "whole", tmp_path / "kept")


@pytest.mark.slow
def test_something_else_fills_the_disk(task, tmp_path):
    """At the last score of step 3: metrics, samples, timeline and the checkpoint have little room, or none."""

    def reward(at: int, disk: Path, chunk: int) -> dict:
        calls, file = tmp_path / f"calls_{chunk}", tmp_path / f"reward_{chunk}.py"
        file.write_text(BALLAST.format(calls=str(calls), ballast=str(disk / "ballast"), at=at, chunk=chunk))
        return {"custom_reward_function": {"path": str(file), "name": "fill_the_disk"}}

    UserRun(configuration(task, tmp_path / "whole", reward(-1, tmp_path, 1))).run()
    for chunk in (1 << 17, 1 << 14, 1 << 12):  # what is left is smaller than that
        disk = tmp_path / f"disk_{chunk}"
        disk.mkdir()
        config = configuration(task, disk / "run", reward(ROWS * 3, disk, chunk))
        outcome, newest = run_in_a_small_file_system(config, disk, 8.0, tmp_path / f"kept_{chunk}")
        print(outcome, newest)
        assert outcome.startswith(("CheckpointError: ", "QuadrigaError: Cannot write")), outcome
        assert newest in (1, 2), "that of step 2 was maybe still being written"
        assert_same_run(tmp_path / "whole", tmp_path / f"kept_{chunk}")
