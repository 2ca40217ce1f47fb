"""An evaluation as a run directory: `quadriga dash`, `runs` and `samples` show it from its first sample on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from quadriga.commands.evaluation_figures import Figure
from quadriga.dashboard.files import read_json
from quadriga.errors import ConfigError
from quadriga.tracking import RunDirectory
from quadriga.tracking.run_record import RunRecord

STEP = 0
"""Nothing is trained: all samples and figures are of this step. The progress that is told counts samples instead."""


class EvaluationRecord:
    """Writes samples as they come, and figures at the end. A context manager around all of it: what ends it is recorded.

    Args:
        folder: the run directory; what an earlier evaluation left there is moved aside.
        options: what the command was given.
        total: samples that are to come.

    Raises:
        ConfigError: the folder is that of another kind of run.
    """

    def __init__(self, folder: Path, options: dict[str, Any], total: int) -> None:
        kind = (read_json(folder, "status.json") or {}).get("kind", "eval")
        if kind != "eval" or any(folder.glob("checkpoints/global_step_*")):
            raise ConfigError(
                f"--run-dir {folder} is the folder of a {kind if kind != 'eval' else 'training'} run",
                "give the evaluation a folder of its own",
            )
        self._directory = RunDirectory(folder)
        self._directory.begin()
        self._directory.write_config(options)
        about = {"kind": "eval", "changed": {"model": options["model"], "data": options["data"]}}
        self._record = RunRecord(folder, about)
        self._total, self._done = total, 0

    def __enter__(self) -> EvaluationRecord:
        self._tell("start", total_steps=self._total, start_step=0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        status = "finished" if error is None else "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        self._tell("end", status=status, error="" if error is None else f"{type(error).__name__}: {error}")
        self._record.close()
        self._directory.close()

    def add(self, sample: dict[str, Any]) -> None:
        """One more sample has its score."""
        self._directory.append_sample(STEP, sample, "val")
        self._done += 1
        self._tell("step", step=self._done, metrics={})

    def conclude(self, figures: Sequence[Figure]) -> None:
        """All of them have."""
        values = {f"val/{figure.data_source}/{figure.name}": figure.value for figure in figures}
        self._directory.append_metrics(STEP, values)
        accuracies = [figure for figure in figures if figure.name.startswith("acc/mean@")]
        self._record.tell(intervals={f.data_source: [f.low, f.high] for f in accuracies if f.low is not None})
        self._tell("step", step=self._done, metrics=values)

    def _tell(self, kind: str, **payload: Any) -> None:
        self._record.take({"kind": kind, "time": time.time(), **payload})
