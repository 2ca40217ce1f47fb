"""Batches without end, from a dataset and a sampler. No worker processes: tokens are ready since loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from quadriga.data.ragged import RaggedTokens
from quadriga.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from quadriga.data.sampler import Sampler
    from quadriga.protocol import DataProto

Collate = Callable[[Sequence[dict[str, Any]]], "DataProto"]


class Dataset(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> dict[str, Any]: ...


class BatchLoader:
    """`next_batch()` gives (epoch, batch) for ever. A batch never crosses an epoch border.

    Every row gets `epoch` and `uid`, the text "epoch:index" ("epoch:index#k" for the k-th repetition of a row that a
    custom sampler puts twice into one batch).

    Args:
        collate: items to a DataProto.
        drop_last: leave out the rows at an epoch's end that do not fill a batch; else they are a smaller batch.
    """

    def __init__(
        self, dataset: Dataset, sampler: Sampler, batch_size: int, collate: Collate, drop_last: bool = True
    ) -> None:
        self.dataset, self.sampler, self.batch_size = dataset, sampler, batch_size
        self.collate, self.drop_last = collate, drop_last
        self.epoch = 0  # the one the sampler is in
        self._positions: Iterator[int] | None = None

    def __len__(self) -> int:
        """Batches per epoch."""
        whole, rest = divmod(len(self.sampler), self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def next_batch(self) -> tuple[int, DataProto]:
        epoch, positions = self._next_positions()
        return epoch, make_batch(self.dataset, positions, self.collate, epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "sampler": self.sampler.state_dict(), "data": self.fingerprint}

    @cached_property
    def fingerprint(self) -> str | None:
        """Of the tokens of all rows; None for a dataset of another kind."""
        tokens = getattr(self.dataset, "tokens", None)
        return tokens.digest() if isinstance(tokens, RaggedTokens) else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """CheckpointError if the rows are not those that the cursor was counted on."""
        if state.get("data") != self.fingerprint:
            raise CheckpointError(
                "the training set is not the one that the checkpoint was made with: its tokens differ",
                "resume with the same data files, prompt column, chat template and tokenizer, or start a new run",
            )
        self.sampler.load_state_dict(state["sampler"])
        self.epoch = int(state["epoch"])
        self._positions = None

    def _next_positions(self) -> tuple[int, list[int]]:
        for _ in range(2):  # the epoch at hand may have nothing left; a fresh one must give a batch
            if self._positions is None:
                self._positions = iter(self.sampler)
            epoch = self.epoch
            positions = list(islice(self._positions, self.batch_size))
            if len(positions) < self.batch_size:  # the sampler has gone on to its next epoch, so does the loader
                self._positions = None
                self.epoch += 1
            if len(positions) == self.batch_size or (positions and not self.drop_last):
                return epoch, positions
        raise DataError(
            f"the sampler {type(self.sampler).__name__} gave {len(positions)} rows in a whole epoch, "
            f"fewer than one batch of {self.batch_size}",
            "give more rows per epoch, or a smaller batch size",
        )


def make_batch(dataset: Dataset, positions: Sequence[int], collate: Collate, epoch: int) -> DataProto:
    """The rows at these positions as one DataProto, with `epoch` and `uid` for each."""
    label = "val" if epoch < 0 else str(epoch)
    if bad := [position for position in positions if not 0 <= position < len(dataset)]:
        raise DataError(f"the sampler gave row {bad[0]} of a dataset of {len(dataset)} rows", "correct the sampler")
    items = []
    times_seen: dict[int, int] = {}
    for position in positions:
        item = dict(dataset[position])
        index = item.setdefault("index", position)
        repeat = times_seen[index] = times_seen.get(index, -1) + 1
        items.append(item | {"epoch": epoch, "uid": f"{label}:{index}" + (f"#{repeat}" if repeat else "")})
    return collate(items)


def file_order_batches(dataset: Dataset, batch_size: int | None, collate: Collate) -> Iterator[DataProto]:
    """One pass in file order, for validation: epoch -1, uids "val:index". `batch_size` None: all rows at once."""
    size = batch_size or len(dataset)
    for start in range(0, len(dataset), size):
        yield make_batch(dataset, range(start, min(start + size, len(dataset))), collate, epoch=-1)
