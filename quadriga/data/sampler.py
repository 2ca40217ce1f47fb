"""The order of rows: a permutation that is the same on every machine and in every library version, and a sampler that resumes on
the next row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from quadriga.errors import CheckpointError, DataError

_WORD = 2**64
# Epochs count up from 0, so the streams for other purposes count down from the top and never meet them.
SUBSAMPLE_STREAM = _WORD - 1
HOLD_OUT_STREAM = _WORD - 2


def raw_stream(seed: int, stream: int) -> np.random.Philox:
    """Philox4x64-10 with key words (seed, stream) mod 2^64 and counter 0.

    Only its raw 64-bit output is ever used: NumPy guarantees that stream for ever, while it may change the
    algorithms behind `Generator.permutation` or `Generator.integers`.
    """
    return np.random.Philox(key=np.array([seed % _WORD, stream % _WORD], dtype=np.uint64))


def seeded_order(num_rows: int, seed: int, stream: int) -> np.ndarray:
    """The permutation [num_rows] int64 that belongs to (seed, stream).

    Row i draws the i-th raw word of the stream; rows are sorted by their word, equal words by row number.
    """
    return np.argsort(raw_stream(seed, stream).random_raw(num_rows), kind="stable")


def select_samples(num_rows: int, max_samples: int, *, shuffle: bool, seed: int) -> np.ndarray:
    """Ascending numbers of the rows to keep: all for a negative `max_samples`, else the first n, or a drawn n."""
    if max_samples == 0:
        raise DataError(f"max_samples=0 leaves 0 of {num_rows} rows", "use -1 for all rows, or a positive number")
    if max_samples < 0 or max_samples >= num_rows:
        return np.arange(num_rows)
    if not shuffle:
        return np.arange(max_samples)
    return np.sort(seeded_order(num_rows, seed, SUBSAMPLE_STREAM)[:max_samples])


@runtime_checkable
class Sampler(Protocol):
    """What `data.sampler` must name: a class built as `Cls(data_source=dataset, data_config=config)`.

    Its state must be such that `load_state_dict(state_dict())` continues with the row after the last one given.
    """

    def __iter__(self) -> Iterator[int]:
        """The positions in the dataset that are left of this epoch. When they end, the epoch has ended."""

    def __len__(self) -> int:
        """Positions per epoch."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def update(self, batch: Any) -> None:
        """Called after each training step with its scored batch: a curriculum learns from it. `batch.batch["score"]` has
        a number and `batch.non_tensor_batch["index"]` the row of the dataset, for every sample."""


class ResumableSampler:
    """Every row once an epoch, in file order or in the order of (seed, epoch); see `order.seeded_order`.

    With `drop_last` an epoch ends with its last whole batch: the `num_rows % batch_size` rows that are over are
    left out of this epoch, and with `shuffle` they are others in the next one.
    """

    def __init__(self, num_rows: int, batch_size: int, shuffle: bool, seed: int, drop_last: bool = True) -> None:
        if drop_last and num_rows < batch_size:
            raise DataError(
                f"the training set has {num_rows} rows, fewer than one batch of data.train_batch_size={batch_size}",
                f"set data.train_batch_size to at most {num_rows}, or give more data",
            )
        self.num_rows, self.shuffle, self.seed = num_rows, shuffle, seed
        self.rows_per_epoch = num_rows - num_rows % batch_size if drop_last else num_rows
        self.epoch = 0
        self.cursor = 0

    def __len__(self) -> int:
        return self.rows_per_epoch

    def __iter__(self) -> Iterator[int]:
        order = seeded_order(self.num_rows, self.seed, self.epoch) if self.shuffle else np.arange(self.num_rows)
        while self.cursor < self.rows_per_epoch:
            self.cursor += 1  # before the yield: a row that was handed out counts as taken
            yield int(order[self.cursor - 1])
        self.epoch += 1
        self.cursor = 0

    def state_dict(self) -> dict[str, Any]:
        """(seed, epoch, cursor), with the number of rows and whether they are shuffled, to check them against."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "cursor": self.cursor,
            "num_rows": self.num_rows,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine = self.state_dict()
        if missing := mine.keys() - state.keys():
            raise CheckpointError(f"the sampler state lacks {', '.join(sorted(missing))}", "use another checkpoint")
        for name, fix in (
            ("num_rows", "resume with the same data files, max_samples, max_prompt_length and filter"),
            ("seed", "resume with the same data.seed"),
            ("shuffle", "resume with the same data.shuffle"),
        ):
            if state[name] != mine[name]:
                raise CheckpointError(
                    f"the checkpoint was made with {name}={state[name]}, this run has {name}={mine[name]}: "
                    "it could not continue on the next row",
                    f"{fix}, or start a new run",
                )
        self.epoch, self.cursor = int(state["epoch"]), int(state["cursor"])

    def update(self, batch: Any) -> None:
        """The order does not depend on results."""
