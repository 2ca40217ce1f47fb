"""The folder of a run: everything that a viewer, a resume or a bug report needs.

outputs/<project>/<experiment>/
  config.yaml        the resolved configuration
  metrics.jsonl      one line a step: {"step": …, "time": …, "<metric>": …}, each step once, in order
  samples/           train_00000012.jsonl, val_00000010.jsonl: what was asked, answered and scored
  timeline.json      the phases of every step, for a trace viewer (chrome://tracing, ui.perfetto.dev)
  status.json        where the run stands, or how it ended
  events.jsonl       what happened: starts, resumes, warnings, alarms, steering, the end
  steering/          what `quadriga tell` told the run, and what it did
  stalls/            the stacks of all processes, whenever a phase took far too long
  logs/              what each process printed: runner_0.log, actor_rollout_0.log, …, agents.log, rewards.log
  checkpoints/
  earlier/           the files of runs that were started anew in the same folder
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from quadriga.atomic_file import named_disk_errors, write_atomically
from quadriga.errors import ConfigError, QuadrigaError
from quadriga.tracking.run_lock import RunLock

_LOG = logging.getLogger(__name__)
_MOVED_ASIDE = (
    "config.yaml",
    "samples",
    "timeline.json",
    "status.json",
    "events.jsonl",
    "steering",
    "stalls",
    "tensorboard",
    "sinks.json",
    "curves.svg",
    "curves.png",
    "summary.html",
    "checkpoints",
    "metrics.jsonl",  # last: as long as it is here, a crash in between is made good next time
)


class RunDirectory:
    """Paths and files of one run. Making the object makes the folders; `begin` makes it this process's to write.

    Args:
        path: the folder, usually `trainer.default_local_dir`; relative to the working directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        self.config_file = self.path / "config.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.timeline_file = self.path / "timeline.json"
        self.samples = self.path / "samples"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self._lock = RunLock(self.path / ".lock")
        self._last_step: int | None = None
        try:
            for folder in (self.path, self.samples, self.logs, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.path, error.strerror or str(error)) from error

    def begin(self, resumed_step: int | None = None) -> list[int]:
        """Prepare the files for a run that goes on after `resumed_step`, or that starts anew (None).

        Resumed: what was recorded for later steps is cut off, because those steps come again; -1 cuts off all. Anew: the
        files of an earlier run, its checkpoints too, are moved to `earlier/<k>/`, never deleted.

        Returns:
            the steps before `resumed_step` that this directory's metrics.jsonl should have and has not.

        Raises:
            ConfigError: another process is writing to this directory.
        """
        self.lock()
        for unfinished in (*self.path.glob(".*.tmp"), *self.samples.glob(".*.tmp")):  # of a process that was killed
            unfinished.unlink(missing_ok=True)
        if resumed_step is None:
            self._move_earlier_run_aside()
        else:
            self._cut_after(resumed_step)
        self._last_step = None
        return self._missing_before(resumed_step or 0)

    def close(self) -> None:
        """The counterpart of `begin`."""
        self.unlock()

    def lock(self) -> None:
        """Keep other processes from writing here until `unlock` was called as often. ConfigError: one is at it."""
        self._lock.acquire()

    def unlock(self) -> None:
        self._lock.release()

    def write_config(self, config: Any) -> None:
        """Write the resolved configuration, typed or as plain nested dicts, as YAML; whole or not at all."""
        from omegaconf import OmegaConf

        plain = asdict(config) if is_dataclass(config) and not isinstance(config, type) else config
        write_atomically(self.config_file, OmegaConf.to_yaml(OmegaConf.create(plain)).encode())

    def append_metrics(self, step: int, metrics: Mapping[str, float | None], when: float | None = None) -> None:
        """Add the line of a step. `metrics` are plain finite numbers or None (see `metric_values`).

        Raises:
            ValueError: the step, or a later one, has its line already.
        """
        if self._last_step is None:
            self._last_step = max(self.recorded_steps(), default=-1)
        if step <= self._last_step:
            raise ValueError(
                f"step {step} cannot be logged after step {self._last_step}: a step is logged once, with all its metrics"
            )
        line = {"step": step, "time": round(time.time() if when is None else when, 3), **metrics}
        self._append(self.metrics_file, json.dumps(line, allow_nan=False, ensure_ascii=False).encode() + b"\n")
        self._last_step = step

    def sync_metrics(self) -> None:
        """Wait until all lines will survive a power cut: before a checkpoint counts that was written after them."""
        with named_disk_errors(self.metrics_file):
            for path in (self.metrics_file, self.path):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                except OSError as error:
                    # Some network file systems cannot sync a folder; their servers keep its order themselves.
                    if path.is_file() or error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
                        raise
                finally:
                    os.close(descriptor)

    def _missing_before(self, step: int) -> list[int]:
        if not any(self.checkpoints.glob("global_step_*")):
            return []  # what is resumed was done, and recorded, in another directory
        recorded = self.recorded_steps()
        return [earlier for earlier in range(1, step + 1) if earlier not in recorded]

    def read_metrics(self, wanted: Callable[[str], bool] = lambda name: True) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl, in order; a line that a crash left unfinished is passed over.

        Args:
            wanted: which names to keep besides "step". The lines of a long run are large: who reads them while it goes on
                keeps few.
        """
        return list(self.metrics_lines(wanted))

    def metrics_lines(self, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[dict[str, Any]]:
        """The same, one after the other."""
        for line, _ in self._lines():
            if line is not None:
                yield {sys.intern(k): v for k, v in line.items() if k == "step" or wanted(k)}

    def recorded_steps(self) -> set[int]:
        """The steps that have their line."""
        return {line["step"] for line in self.read_metrics(lambda name: False)}

    def write_samples(
        self,
        step: int,
        rows: Iterable[Mapping[str, Any]],
        kind: str = "train",
        folder: str | os.PathLike[str] | None = None,
    ) -> Path:
        """Write what happened to each row in a step, one JSON object a line: prompt, response, score, uid, ….

        Args:
            kind: "train" or "val", the first part of the file's name.
            folder: elsewhere than `samples/`, e.g. `trainer.rollout_data_dir`.
        """
        target = self.samples if folder is None else Path(folder).expanduser()
        target.mkdir(parents=True, exist_ok=True)
        path = target / f"{kind}_{step:08d}.jsonl"
        text = "".join(f"{_json_line({'step': step, **row})}\n" for row in rows)
        with named_disk_errors(path):
            write_atomically(path, text.encode(errors="replace"))
        return path

    def append_sample(self, step: int, row: Mapping[str, Any], kind: str) -> None:
        """Add one row to those of a step, for what comes one by one."""
        line = f"{_json_line({'step': step, **row})}\n"
        self._append(self.samples / f"{kind}_{step:08d}.jsonl", line.encode(errors="replace"))

    def sample_files(self, kind: str = "train") -> dict[int, Path]:
        """Step → file, in order of the steps."""
        steps = {path: path.stem.removeprefix(f"{kind}_") for path in self.samples.glob(f"{kind}_*.jsonl")}
        return dict(sorted((int(step), path) for path, step in steps.items() if step.isdecimal()))

    def read_samples(self, step: int, kind: str = "train") -> list[dict[str, Any]]:
        """The rows of one step, as `write_samples` wrote them; what somebody else made of a line is passed over."""
        path = self.samples / f"{kind}_{step:08d}.jsonl"
        with path.open("rb") as file:
            return [row for line in file if (row := _parse(line)) is not None]

    def log_file(self, role: str, rank: int) -> Path:
        """Where a worker writes what it prints."""
        return self.logs / f"{role}_{rank}.log"

    def _lines(self) -> Iterator[tuple[dict[str, Any] | None, bytes]]:
        """Every line of metrics.jsonl, parsed and raw; None for one that is no metrics line."""
        if not self.metrics_file.exists():
            return
        with self.metrics_file.open("rb") as file:
            for raw in file:
                yield _parse(raw), raw

    def _cut_after(self, step: int) -> None:
        kept: dict[int, bytes] = {}
        dropped = damaged = 0
        for values, raw in self._lines():
            if values is None:
                damaged += 1
            elif values["step"] > step or values["step"] in kept:
                dropped += 1
            else:
                kept[values["step"]] = raw
        if dropped or damaged:
            write_atomically(self.metrics_file, b"".join(kept[k] for k in sorted(kept)))
        if damaged:
            _LOG.warning("%s: %d unfinished or damaged line(s) removed", self.metrics_file, damaged)
        for kind in ("train", "val"):
            for later, path in self.sample_files(kind).items():
                if later > step:
                    path.unlink()

    def _move_earlier_run_aside(self) -> None:
        has_metrics = self.metrics_file.exists() and self.metrics_file.stat().st_size > 0
        if not has_metrics and not any(self.checkpoints.glob("global_step_*")):
            return
        number = 1
        while (folder := self.path / "earlier" / str(number)).exists():
            number += 1
        folder.mkdir(parents=True)
        for (
            name
        ) in _MOVED_ASIDE:  # the metrics last: as long as they are here, a crash in between is made good next time
            if (self.path / name).exists():
                os.rename(self.path / name, folder / name)
        self.samples.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        _LOG.warning("a run starts anew in %s; the files of the earlier one are now in %s", self.path, folder)

    @staticmethod
    def _append(path: Path, line: bytes) -> None:
        """One write system call, so that a killed process leaves whole lines."""
        with named_disk_errors(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                written = os.write(descriptor, line)
            finally:
                os.close(descriptor)
        if written < len(line):
            raise QuadrigaError(f"Cannot write to {path}: the disk is full.", "free some space and resume")


def unwritable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"the run directory {path} cannot be made: {why}",
        "set trainer.default_local_dir to a folder that you can write to",
    )


def _parse(raw: bytes) -> dict[str, Any] | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None


def _json_line(row: dict[str, Any]) -> str:
    """Strict JSON in UTF-8: a number that is not finite becomes null, half a character an escape."""
    text = json.dumps(row, ensure_ascii=False, default=_plain)
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(json.loads(text, parse_constant=lambda name: None), ensure_ascii=False)
    return text.encode(
        "utf-8", "backslashreplace"
    ).decode()  # a lone surrogate's escape is the one that JSON has for it


def _plain(value: Any) -> Any:
    """What JSON does not know: numbers and arrays of numpy and torch become lists, anything else its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
