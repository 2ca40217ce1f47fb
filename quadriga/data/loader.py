"""Batches without end, from a dataset and a sampler. No worker processes: tokens are ready since loading.

The rows of a batch are padded to the longest of them, never to a configured maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from quadriga.data.ragged import RaggedTokens
from quadriga.errors import CheckpointError, DataError
from quadriga.protocol import DataProto

if TYPE_CHECKING:
    from quadriga.data.sampler import Sampler

Collate = Callable[[Sequence[dict[str, Any]]], DataProto]


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


_TENSOR_FIELDS = ("input_ids", "loss_mask")


def collate_prompts(items: Sequence[dict[str, Any]], *, pad_token_id: int) -> DataProto:
    """Prompts, padded on the left so that every answer begins at the same column.

    Tensors [batch, longest] int64: input_ids, attention_mask, position_ids. All other fields: arrays over rows.
    """
    return _collate(items, pad_token_id, pad_left=True)


def collate_sft(items: Sequence[dict[str, Any]], *, pad_token_id: int) -> DataProto:
    """Whole training examples, padded on the right; `loss_mask[b, t]` is 1 where token t itself is a target."""
    return _collate(items, pad_token_id, pad_left=False)


def collate_pairs(items: Sequence[dict[str, Any]], *, pad_token_id: int) -> DataProto:
    """Preference pairs as rows like those of `collate_sft`: row 2i is the chosen side of pair i, row 2i + 1 the rejected."""
    sides = [{**item[side], "uid": item["uid"]} for item in items for side in ("chosen", "rejected")]
    return collate_sft(sides, pad_token_id=pad_token_id)


def _collate(items: Sequence[dict[str, Any]], pad_token_id: int, *, pad_left: bool) -> DataProto:
    lengths = np.array([len(item["input_ids"]) for item in items])
    column = np.arange(lengths.max())
    real = column >= (column.size - lengths)[:, None] if pad_left else column < lengths[:, None]
    tensors = {
        "attention_mask": torch.from_numpy(real.astype(np.int64)),
        "position_ids": torch.from_numpy(np.maximum(np.cumsum(real, axis=1) - 1, 0)),
    }
    for name, fill in (("input_ids", pad_token_id), ("loss_mask", 0)):
        if name in items[0]:
            padded = np.full(real.shape, fill, dtype=np.int64)
            padded[real] = np.concatenate([item[name] for item in items])
            tensors[name] = torch.from_numpy(padded)
    fields = dict.fromkeys(name for item in items for name in item if name not in _TENSOR_FIELDS)
    non_tensors = {name: _field([item.get(name) for item in items]) for name in fields}
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)


def _field(values: list[Any]) -> np.ndarray:
    if all(type(value) is int for value in values):
        return np.array(values, dtype=np.int64)
    # Filled one by one: NumPy would turn equally long lists into a second dimension.
    field = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        field[row] = value
    return field
