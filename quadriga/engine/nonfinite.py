"""A gradient that is not finite: the step is skipped and counted; too many in a row end the run, with evidence."""

from __future__ import annotations

import logging
from pathlib import Path

from quadriga.engine.sharding import rank
from quadriga.errors import WorkerError
from quadriga.protocol import DataProto

logger = logging.getLogger(__name__)


class NonFiniteGuard:
    """Counts steps with a non-finite gradient.

    Args:
        max_in_a_row: stop at so many consecutive ones.
        dump_dir: where the mini-batch that caused the last of them is written.
    """

    def __init__(self, max_in_a_row: int, dump_dir: str | Path) -> None:
        self.max_in_a_row, self.dump_dir = max_in_a_row, Path(dump_dir)
        self.total, self.in_a_row = 0, 0

    def saw_finite(self) -> None:
        self.in_a_row = 0

    def saw_non_finite(self, norm: float, data: DataProto, step: int) -> None:
        """Count it. WorkerError, naming the dump, when it was one too many."""
        self.total += 1
        self.in_a_row += 1
        logger.warning(
            "the gradient's norm is %s in optimiser step %d: the step is skipped (%d in a row, %d in all)",
            norm,
            step,
            self.in_a_row,
            self.total,
        )
        if self.in_a_row < self.max_in_a_row:
            return
        path = self._dump(data, step)
        raise WorkerError(
            f"the gradient was not finite in {self.in_a_row} optimiser steps in a row (norm {norm} in step {step}); the "
            f"mini-batch of this rank is in {path}",
            "look for NaN or huge values in its columns (DataProto.load_from_disk), lower the learning rate, or resume "
            "from an earlier checkpoint; TrainingEngine.train_mini_batch on the dump repeats the step",
        )

    def _dump(self, data: DataProto, step: int) -> Path:
        self.dump_dir.mkdir(parents=True, exist_ok=True)
        path = self.dump_dir / f"nonfinite-step{step}-rank{rank()}.dataproto"
        tensors = DataProto(batch=data.batch.cpu(), meta_info={"optimizer_step": step, "rank": rank()})
        tensors.save_to_disk(path)
        return path
