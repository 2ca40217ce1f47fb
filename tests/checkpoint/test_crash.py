"""SIGKILL, a full disk: the previous checkpoint or the new one loads, never neither, never a half."""

from __future__ import annotations

import random
import resource
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dying_writer import count_points, die_at, write_engine, write_files, write_in_background
from ranks import start_process
from tiny_engine import make_engine, train, whole_state

from quadriga.checkpoint import CheckpointStore
from quadriga.checkpoint.shards import load_engine
from quadriga.errors import CheckpointError

SCENARIOS = {
    # steps already there, the step that is written when the process dies, how many are kept
    "first": ([], 1, None),
    "next": ([1, 2], 3, None),
    "next, the oldest is deleted": ([1, 2], 3, 2),
    "same step again": ([2], 2, 1),
}


def prepare(folder: Path, write: Callable[..., None], steps: list[int]) -> Path:
    folder.mkdir()
    for step in steps:
        write(folder, step, None)
    return folder


def check(folder: Path, write: Callable[..., None], steps: list[int], new: int, keep: int | None) -> int | None:
    """What is there can be loaded, is old or new, and the store goes on working. Returns the step that was found."""
    found = CheckpointStore(folder, keep).find("auto")
    allowed = {new, steps[-1] if steps else None}
    assert (found.step if found else None) in allowed
    if found is not None:
        assert found.read_state() == {"step": found.step}
        if write in (write_engine, write_in_background):
            engine, truth = make_engine(seed=9), make_engine()
            load_engine(engine, found.folder("actor"))
            train(truth, found.step)
            loaded, expected = whole_state(engine), whole_state(truth)
            assert all((loaded[name] == expected[name]).all() for name in expected)
        else:
            part = found.folder("critic") / "part_1"
            assert part.read_bytes() == random.Random(f"critic 1 {found.step}").randbytes(part.stat().st_size)
    write_files(folder, 7, keep)
    assert all(path.name.startswith("global_step_") or path.name == "latest" for path in folder.iterdir())
    again = CheckpointStore(folder, keep).find("auto")
    assert again is not None
    assert again.step == 7
    return found.step if found else None


def die_everywhere(tmp_path: Path, write: Callable[..., None], scenario: str, deaths: int) -> None:
    steps, new, keep = SCENARIOS[scenario]
    before = prepare(tmp_path / "before", write, steps)
    counted = shutil.copytree(before, tmp_path / "counted")
    assert start_process(count_points, tmp_path / "points", write, counted, new, keep) == 0
    points = int((tmp_path / "points").read_text())
    assert points > deaths
    found, killed = [], 0
    for number in range(deaths):
        point = 1 + number * (points - 1) // max(1, deaths - 1)
        folder = shutil.copytree(before, tmp_path / f"at_{point}")
        status = start_process(die_at, point, write, folder, new, keep)
        assert status in (-9, 0), f"point {point} of {points}: exit status {status}"
        killed += status == -9
        found.append(check(folder, write, steps, new, keep))
        shutil.rmtree(folder)
    assert killed >= 0.95 * (deaths - 1), f"only {killed} of {deaths} died: threads make the last points vary, no more"
    if steps != [new]:
        assert found == sorted(found, key=lambda step: step or 0), "once the new one is there, it stays"
        assert len(set(found)) == 2, "some die before the commit, some after it"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_sigkill_on_the_way_leaves_the_old_or_the_new_checkpoint(tmp_path, scenario):
    die_everywhere(tmp_path, write_files, scenario, deaths=9)


@pytest.mark.parametrize("write", [write_engine, write_in_background])
def test_sigkill_while_a_real_engine_is_written(tmp_path, write):
    die_everywhere(tmp_path, write, "next, the oldest is deleted", deaths=5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_sigkill_at_a_hundred_points(tmp_path, scenario):
    die_everywhere(tmp_path, write_files, scenario, deaths=100)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("write", [write_engine, write_in_background])
def test_sigkill_at_a_hundred_points_of_a_real_engine(tmp_path, write):
    die_everywhere(tmp_path, write, "next, the oldest is deleted", deaths=100)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sigkill_at_random_instants_of_large_writes(tmp_path, chance):
    size = 4 << 20
    before = tmp_path / "before"
    write_files(before, 1, None, size)
    begin = time.monotonic()
    assert start_process(write_files, shutil.copytree(before, tmp_path / "timed"), 2, 1, size) == 0
    duration = time.monotonic() - begin
    for number in range(50):
        folder = shutil.copytree(before, tmp_path / f"at_{number}")
        start_process(write_files, folder, 2, 1, size, kill_after_s=chance.uniform(0, 1.2 * duration))
        check(folder, write_files, [1], 2, 1)
        shutil.rmtree(folder)


# ---- full disk ----


def write_with_a_limit(limit: int, report: Path, write: Callable[..., None], *arguments: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        write(*arguments)
    except CheckpointError as error:
        report.write_text(str(error)[:limit])


@pytest.mark.parametrize(("write", "limit"), [(write_files, 1500), (write_engine, 30_000)])
def test_a_file_that_cannot_grow_is_an_error_that_leaves_the_old_checkpoint(tmp_path, write, limit):
    folder = prepare(tmp_path / "checkpoints", write, [1])
    assert start_process(write_with_a_limit, limit, tmp_path / "report", write, folder, 2, 1) == 0
    assert "Cannot write" in (tmp_path / "report").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["global_step_1", "latest"]
    assert check(folder, write, [1], 2, 1) == 1


FULL_DISK = """
    import sys
    from pathlib import Path
    from dying_writer import write_files
    from quadriga.checkpoint import CheckpointStore
    from quadriga.errors import CheckpointError

    disk = Path(sys.argv[1])
    folder = disk / "checkpoints"
    outcomes = []
    part = 280 << 10
    for left in range(1028, 1160, 4):  # KiB: more than is required before writing, less or little more than is needed
        for path in disk.rglob("*"):
            path.is_file() and path.unlink()
        write_files(folder, 1, None, part)
        (disk / "reserve").write_bytes(bytes(left << 10))
        try:
            (disk / "filler").write_bytes(bytes(8 << 20))
        except OSError:
            (disk / "reserve").unlink()
        try:
            write_files(folder, 2, None, part)
            outcomes.append("written")
        except CheckpointError as error:
            outcomes.append(error.what.rpartition(": ")[2])
        found = CheckpointStore(folder).find("auto")
        assert found.step in ((2,) if outcomes[-1] == "written" else (1, 2)), found
        assert not list(folder.glob(".*")), list(folder.iterdir())
        (disk / "filler").unlink()
        write_files(folder, 3, 1)
        assert CheckpointStore(folder).find("auto").step == 3
    print(outcomes)
    assert set(outcomes) == {"written", "No space left on device"}, outcomes
"""


def test_a_disk_that_is_full_at_any_stage_leaves_the_old_checkpoint(tmp_path):
    mount = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    disk = f"mount -t tmpfs -o size=6m tmpfs {tmp_path}"
    if not shutil.which("unshare") or subprocess.run([*mount, disk], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system (unshare --map-root-user --mount)")
    script = [*mount, f'{disk} && exec "$0" -c "$1" {tmp_path}', sys.executable, textwrap.dedent(FULL_DISK)]
    done = subprocess.run(script, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- what a loaded engine is worth ----


def test_an_engine_resumed_after_the_crash_repeats_the_undisturbed_run(tmp_path):
    """Killed while step 4 is saved, resumed from what is there: steps and weights are those of a run without a fault."""
    folder = prepare(tmp_path / "checkpoints", write_engine, [2])
    undisturbed = make_engine()
    losses = train(undisturbed, 6)
    assert start_process(die_at, 60, write_engine, folder, 4, None) == -9
    found = CheckpointStore(folder).find("auto")
    assert found is not None
    resumed = make_engine(seed=3)
    load_engine(resumed, found.folder("actor"))
    assert train(resumed, 6 - found.step, first_seed=found.step) == losses[found.step :]
    truth, state = whole_state(undisturbed), whole_state(resumed)
    assert all((state[name] == truth[name]).all() for name in truth)
