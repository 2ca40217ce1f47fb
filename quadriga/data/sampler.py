"""Which rows come next. The whole state is (seed, epoch, cursor), so a resumed run takes the very next row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from quadriga.data.order import seeded_order
from quadriga.errors import CheckpointError, DataError


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
