"""A training run as a user starts it: the command line, in a process tree of its own that can be killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

TIMED = (
    "time",
    "timing_s/",
    "stream/engines",
    "stream/groups",
    "stream/samples",
    "perf/",
    "memory/",
    "reward/seconds",
    "training/restarts",
    "training/samples_generated_again",
)
"""Metrics that no two runs have in common."""


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    from omegaconf import OmegaConf

    result: Any = OmegaConf.to_container(OmegaConf.merge(*parts))
    return result


def overrides(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """`a.b=value` for every leaf."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from overrides(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={value}"


class UserRun:
    """The command `python -m quadriga.trainer.main_ppo …`, started as often as one likes.

    Args:
        config: nested keys; `trainer.default_local_dir` is the run directory.
    """

    started: ClassVar[list[UserRun]] = []

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.folder = Path(config["trainer"]["default_local_dir"])
        self.process: subprocess.Popen[str] | None = None
        self.started.append(self)

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        log = (self.folder / "console.txt").open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quadriga.trainer.main_ppo", *overrides(self.config)],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
            text=True,
            start_new_session=True,
        )
        log.close()

    def finish(self, timeout_s: float = 240) -> int:
        """Wait for the end; returns the exit status."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    def run(self) -> None:
        self.start()
        assert self.finish() == 0, self.console()[-4000:]

    def kill(self, whole_tree: bool) -> None:
        """SIGKILL to the command, and with `whole_tree` to every process that descends from it, Ray's included."""
        assert self.process is not None
        victims = [self.process.pid, *(descendants(self.process.pid) if whole_tree else [])]
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)

    def kill_during(self, chance: random.Random, steps: int, whole_tree: bool) -> str:
        """SIGKILL a little after a step that chance chooses was recorded. Says when."""
        lines, delay_s = chance.randrange(steps), chance.uniform(0, 0.3)
        deadline = time.monotonic() + 180
        while self.steps_recorded() < lines or not (self.folder / "timeline.json").exists():
            assert self.process is not None
            assert self.process.poll() is None, self.console()[-4000:]
            assert time.monotonic() < deadline, self.console()[-4000:]
            time.sleep(0.01)
        time.sleep(delay_s)
        self.kill(whole_tree)
        scope = "tree" if whole_tree else "driver"
        return f"{scope} killed {delay_s:.3f} s after step {lines}, {self.steps_recorded()} steps recorded"

    def steps_recorded(self) -> int:
        file = self.folder / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def console(self) -> str:
        return (self.folder / "console.txt").read_text()


def end_all_runs() -> None:
    """Kill, with all their descendants, the runs of tests that did not wait for their end."""
    while UserRun.started:
        run = UserRun.started.pop()
        if run.process is not None and run.process.poll() is None:
            run.kill(whole_tree=True)


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]


def read_run(folder: Path) -> dict[str, Any]:
    """What must be equal in two runs: metrics less times, every sample, the final weights, the driver's state."""
    from safetensors.torch import load_file

    newest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    state = json.loads((newest / "state.json").read_text())
    del state["config"]
    weights = {
        f"{path.parent.name}/{path.name}/{name}": tensor
        for path in sorted(newest.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    return {
        "metrics": [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in metrics],
        "samples": {path.name: path.read_text() for path in sorted((folder / "samples").iterdir())},
        "state": state,
        "weights": {name: tensor.numpy().tobytes() for name, tensor in weights.items()},
    }


def assert_same_run(one: Path, other: Path) -> None:
    """Bit for bit."""
    expected, found = read_run(one), read_run(other)
    assert len(expected["metrics"]) == len(found["metrics"])
    for ours, theirs in zip(found["metrics"], expected["metrics"]):
        different = {k: (ours.get(k), theirs.get(k)) for k in {*ours, *theirs} if ours.get(k) != theirs.get(k)}
        assert not different, f"step {theirs['step']}: {different}"
    for part in ("samples", "state", "weights"):
        assert found[part].keys() == expected[part].keys()
        different = [name for name in expected[part] if found[part][name] != expected[part][name]]
        assert not different, f"{part} differ in {different[:5]}"
