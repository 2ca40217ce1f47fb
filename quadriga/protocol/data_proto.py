"""DataProto: the one thing that travels between the rooms of the house.

A DataProto is a table. Each row is one sample; tensor columns live in `batch`, everything else (strings, dicts, ragged
lists) in `non_tensor_batch`; `meta_info` belongs to the table as a whole.

    data = DataProto.from_dict(tensors={"input_ids": ids}, non_tensors={"uid": uids}, meta_info={"step": 3})
    parts = data.chunk(2);  DataProto.concat(parts) == data

A tensor column may live elsewhere: `data.leave_in_store(store)` gives the same table with handles in place of its wide columns.
All that is done with rows and columns means the same wherever they are and moves no data; only `data.batch[key]` needs the
column here, and `data.fetch()` brings it.

Contracts broken by the caller (rows that do not match, missing keys, values that disagree) raise AssertionError.

Between processes it goes by pickle protocol 5 (Ray): columns travel as raw buffers beside the pickle, without being
copied into it; the receiver copies each of them once, out of the shared object store into memory of its own. A view
would save that copy, but Ray maps its store writable into every worker and torch has no read-only tensors, so that one
in-place operation would silently change the data of all other workers. To disk and to untrusted places it goes as
bytes that cannot run code (codec.py).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from quadriga.protocol import codec
from quadriga.protocol.columns import (
    as_column,
    check_columns,
    column_bytes,
    column_info,
    concat_arrays,
    concat_tensors,
    cut_rows,
    join_tensordict,
    list_of_dict_to_dict_of_list,
    make_batch,
    merge_meta_info,
    object_array,
    require,
    require_present,
    same_keys,
    split_tensordict,
    take_rows,
    union_numpy_dict,
    union_tensor_dict,
    union_two_dict,
    values_equal,
)
from quadriga.protocol.padding import DataProtoConfig
from quadriga.protocol.stored_column import Store, StoredColumn, is_wide

PART_BYTES = 4 << 20
"""What `fetch_in_parts` brings here at a time."""


@dataclass
class DataProtoItem:
    """One row: `batch` has batch_size [], `non_tensor_batch` holds the bare values."""

    batch: Any = None  # TensorDict | None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict = field(default_factory=dict)


@dataclass(eq=False)
class DataProto:
    """A table of `len(self)` rows.

    Args:
        batch: tensor columns, batch_size `[rows]`; None if there are none.
        non_tensor_batch: other columns, arrays whose first dimension is `rows`.
        meta_info: facts about the whole table. `select`, slices, chunks and copies of rows share it by reference.
        elsewhere: tensor columns that live in a store. A table that has some has a `batch` too, if an empty one.
    """

    batch: Any = None  # TensorDict | None; Any, because its type stubs let no column be used as a tensor
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict = field(default_factory=dict)
    elsewhere: dict[str, StoredColumn] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
        if self.batch is None and self.elsewhere:
            self.batch = TensorDict({}, batch_size=[len(next(iter(self.elsewhere.values())))])
        self.check_consistency()

    def check_consistency(self) -> None:
        """AssertionError unless batch has one batch dimension and every column has the same number of rows."""
        rows = check_columns(self.batch, self.non_tensor_batch)
        for key, column in self.elsewhere.items():
            require(len(column) == rows, f"batch['{key}'] has {len(column)} rows, the other columns have {rows}")
            require(key not in self.batch.keys(), f"batch['{key}'] is here and elsewhere too")  # noqa: SIM118

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return len(next(iter(self.non_tensor_batch.values()), ()))

    def __eq__(self, other: object) -> bool:
        """Same columns, same values (NaN equals NaN), same meta_info; the order of the keys does not matter."""
        if not isinstance(other, DataProto):
            return NotImplemented
        return len(self) == len(other) and values_equal(self._fields(), other._fields())

    def _fields(self) -> tuple[Any, dict[str, np.ndarray], dict]:
        """The three parts of the table, with all columns here."""
        return self.fetch().batch, self.non_tensor_batch, self.meta_info

    __hash__ = None  # type: ignore[assignment]  # mutable, compared by value

    # ---- construction -----------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, torch.Tensor] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Build from columns. Lists in `non_tensors` become 1-D object arrays; no tensors means `batch` is None."""
        require(num_batch_dims == 1, f"only support num_batch_dims=1, got {num_batch_dims}")
        batch = make_batch(tensors) if tensors else None
        columns = {key: as_column(key, values) for key, values in (non_tensors or {}).items()}
        meta_info = dict(meta_info or {})
        if auto_padding:
            meta_info[DataProtoConfig.auto_padding_key] = True
        return cls(batch=batch, non_tensor_batch=columns, meta_info=meta_info)

    @classmethod
    def from_single_dict(
        cls, data: dict[str, Any], meta_info: dict | None = None, auto_padding: bool = False
    ) -> DataProto:
        """Build from one dict of tensors and arrays, as a data loader gives it. ValueError for any other type."""
        for key, value in data.items():
            if not isinstance(value, torch.Tensor | np.ndarray):
                raise ValueError(f"Unsupported type in data {type(value)} for key '{key}': give a tensor or an array")
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        arrays = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        return cls.from_dict(tensors, arrays, meta_info=meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDict, meta_info: dict | None = None) -> DataProto:
        """Tensors become `batch`, a NonTensorStack an object column, NonTensorData an entry of meta_info."""
        batch, columns, info = split_tensordict(tensor_dict)
        return cls(batch=batch, non_tensor_batch=columns, meta_info={**(meta_info or {}), **info})

    def to_tensordict(self) -> TensorDict:
        """Inverse of `from_tensordict`. AssertionError if a key is used in more than one of the three places."""
        return join_tensordict(*self._fields())

    def to(self, device: Any) -> DataProto:
        """Move the tensors to `device`, in place; returns self. Those that are elsewhere are fetched."""
        if self.batch is not None:
            self.batch, self.elsewhere = self.fetch().batch.to(device), {}
        return self

    # ---- here and elsewhere -----------------------------------------------------------------------------------------

    def leave_in_store(self, store: Store, columns: Sequence[str] | None = None) -> DataProto:
        """This table with these tensor columns in `store`; None: its wide ones, which are dense and have more than one number a
        row. Columns that are elsewhere already stay there."""
        require_present(columns or [], self.batch_keys(), "batch")
        here = {key: self.batch.get(key) for key in self._here() if columns is None or key in columns}
        leaving = {key: column for key, column in here.items() if columns is not None or is_wide(column)}
        if not leaving:
            return self
        stored = {key: StoredColumn.put(store, key, column) for key, column in leaving.items()}
        batch = self.batch.exclude(*leaving)
        return type(self)(batch, dict(self.non_tensor_batch), self.meta_info, {**self.elsewhere, **stored})

    def fetch(self, columns: Sequence[str] | None = None) -> DataProto:
        """This table with these tensor columns, or all, in memory of this process; itself, if they are here already."""
        require_present(columns or [], self.batch_keys(), "batch")
        wanted = [key for key in self.elsewhere if columns is None or key in columns]
        if not wanted:
            return self
        batch = self.batch.copy()
        for key in wanted:
            batch[key] = self.elsewhere[key].fetch()
        rest = {key: column for key, column in self.elsewhere.items() if key not in wanted}
        return type(self)(batch, dict(self.non_tensor_batch), self.meta_info, rest)

    def fetch_in_parts(self, columns: Sequence[str] | None = None, part_bytes: int = PART_BYTES) -> Iterator[DataProto]:
        """The rows, with these tensor columns or all: a few at a time if some are fetched, all at once if they are here."""
        chosen = self.select(columns)
        row_bytes = sum(column.row_bytes for column in chosen.elsewhere.values())
        rows = max(1, part_bytes // max(1, row_bytes)) if chosen.elsewhere else max(1, len(chosen))
        return (part.fetch() for part in chosen.split(rows))

    @property
    def store(self) -> Store | None:
        """Where the columns are that are elsewhere; None if all are here."""
        return next((column.store for column in self.elsewhere.values()), None)

    # ---- rows -------------------------------------------------------------------------------------------------------

    def __getitem__(self, item: Any) -> Any:
        """int -> DataProtoItem; slice, or list, array or tensor of indices or booleans -> DataProto."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list | np.ndarray | torch.Tensor):
            return self.select_idxs(item)
        if isinstance(item, int | np.integer) and not isinstance(item, bool):
            if not -len(self) <= item < len(self):
                raise IndexError(f"row {item} of a DataProto with {len(self)} rows")
            if self.elsewhere:
                return self.select_idxs([item]).fetch()[0]
            return DataProtoItem(
                batch=None if self.batch is None else self.batch[int(item)],
                non_tensor_batch={key: column[item] for key, column in self.non_tensor_batch.items()},
                meta_info=self.meta_info,
            )
        raise TypeError(f"Indexing with {type(item)} is not supported")

    def __iter__(self) -> Iterator[DataProtoItem]:
        parts = self.fetch_in_parts() if self.elsewhere else (self,)
        return (part[row] for part in parts for row in range(len(part)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows `start:end:step` as views on the columns (a negative step copies)."""
        if step is not None and step < 0:
            return self.select_idxs(np.arange(len(self))[start:end:step])
        return self._rows(slice(start, end, step), len(range(len(self))[start:end:step]))

    def select_idxs(self, idxs: list | np.ndarray | torch.Tensor) -> DataProto:
        """Copies of the rows with these indices, or of those where a boolean mask is true."""
        index = np.asarray(idxs.detach().cpu() if isinstance(idxs, torch.Tensor) else idxs)
        if index.dtype == bool:
            require(index.shape == (len(self),), f"a mask of shape {index.shape} cannot select from {len(self)} rows")
            index = np.flatnonzero(index)
        require(
            index.ndim == 1 and (index.dtype.kind in "iu" or index.size == 0),
            f"rows are selected by a list of integers or booleans, got {index.dtype} of shape {index.shape}",
        )
        if index.size and not (-len(self) <= index.min() and index.max() < len(self)):
            raise IndexError(f"rows {index.min()} to {index.max()} of a DataProto with {len(self)} rows")
        return self._rows(torch.from_numpy(index.astype(np.int64)), len(index))

    def _rows(self, rows: Any, count: int) -> DataProto:
        batch = self.batch
        if batch is not None:
            taken = {key: take_rows(batch.get(key), rows) for key in self._here()}
            batch = TensorDict(taken, batch_size=[count], device=batch.device)
        array_rows = rows if isinstance(rows, slice) else rows.numpy()
        columns = {key: column[array_rows] for key, column in self.non_tensor_batch.items()}
        stored = {key: column.take(array_rows) for key, column in self.elsewhere.items()}
        return type(self)(batch=batch, non_tensor_batch=columns, meta_info=self.meta_info, elsewhere=stored)

    def reorder(self, indices: torch.Tensor) -> None:
        """Put the rows in the order of `indices`, in place."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch, self.elsewhere = ordered.batch, ordered.non_tensor_batch, ordered.elsewhere

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row `repeat_times` times: a a b b if `interleave`, else a b a b."""
        rows = np.arange(len(self))
        return self.select_idxs(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor) -> DataProto:
        """Row i `repeat_times[i]` times, copies side by side."""
        times = torch.as_tensor(repeat_times).cpu().numpy()
        require(times.shape == (len(self),), f"repeat_times needs one number a row ({len(self)}), got {times.shape}")
        return self.select_idxs(np.repeat(np.arange(len(self)), times.astype(np.int64)))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """Turn each row into `n_split` rows: columns in `split_keys` are cut along dimension 1, others are repeated."""
        split = list(split_keys or ())
        require_present(split, [*self.batch_keys(), *self.non_tensor_batch], "columns")
        whole = self.fetch([key for key in split if key in self.elsewhere])
        unfolded = whole.repeat(n_split)
        for key in split:
            if key in whole.non_tensor_batch:
                unfolded.non_tensor_batch[key] = cut_rows(key, whole.non_tensor_batch[key], n_split)
            else:
                unfolded.batch[key] = cut_rows(key, whole.batch[key], n_split)
        return unfolded

    # ---- columns ----------------------------------------------------------------------------------------------------

    def batch_keys(self) -> list[str]:
        """Names of the tensor columns, wherever they are."""
        return [*self._here(), *self.elsewhere]

    def row_shape(self, key: str) -> tuple[int, ...]:
        """Shape of one row of a tensor column, wherever it is."""
        require_present([key], self.batch_keys(), "batch")
        return self.elsewhere[key].row_shape if key in self.elsewhere else tuple(self.batch[key].shape[1:])

    def _here(self) -> list[str]:
        return [] if self.batch is None else list(self.batch.keys())

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """A table of these columns only; None keeps all. Shares memory with this one unless `deepcopy`."""
        columns, info, stored = self.non_tensor_batch, self.meta_info, self.elsewhere
        batch = None if self.batch is None else self.batch.copy()
        if batch_keys is not None:
            require_present(batch_keys, self.batch_keys(), "batch")
            batch = None if batch is None else batch.select(*(key for key in batch_keys if key not in stored))
            stored = {key: stored[key] for key in batch_keys if key in stored}
        if non_tensor_batch_keys is not None:
            require_present(non_tensor_batch_keys, columns, "non_tensor_batch")
            columns = {key: columns[key] for key in non_tensor_batch_keys}
        if meta_info_keys is not None:
            require_present(meta_info_keys, info, "meta_info")
            info = {key: info[key] for key in meta_info_keys}
        chosen = type(self)(batch=batch, non_tensor_batch=dict(columns), meta_info=info, elsewhere=dict(stored))
        return copy.deepcopy(chosen) if deepcopy else chosen

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Remove these columns and entries and return them. AssertionError if one is absent; then all of them stay."""
        popped = self.select(batch_keys or [], non_tensor_batch_keys or [], meta_info_keys or [])
        if batch_keys:
            self.batch = self.batch.exclude(*(key for key in batch_keys if key not in popped.elsewhere))
            self.elsewhere = {k: v for k, v in self.elsewhere.items() if k not in popped.elsewhere}
        else:
            popped.batch = None
        self.non_tensor_batch = {k: v for k, v in self.non_tensor_batch.items() if k not in popped.non_tensor_batch}
        self.meta_info = {k: v for k, v in self.meta_info.items() if k not in popped.meta_info}
        return popped

    def rename(self, old_keys: str | list[str] | None = None, new_keys: str | list[str] | None = None) -> DataProto:
        """Rename columns of `batch`, in place; returns self."""
        for keys in (old_keys, new_keys):
            if not isinstance(keys, str | list | None):
                raise TypeError(f"keys to rename must be a str or a list of str, got {type(keys)}")
        old, new = ([keys] if isinstance(keys, str) else keys or [] for keys in (old_keys, new_keys))
        if len(old) != len(new):
            raise ValueError(f"new_keys and old_keys must have the same length, got {len(new)} and {len(old)}")
        require_present(old, self.batch_keys(), "batch")
        if self.batch is not None:
            names = dict(zip(old, new, strict=True))
            columns = {names.get(key, key): value for key, value in self.batch.items()}
            stored = {names.get(key, key): value for key, value in self.elsewhere.items()}
            one_each = len(columns | stored) == len(self.batch_keys())
            require(one_each, f"renaming {old} to {new} gives two columns one name")
            self.batch = TensorDict(columns, batch_size=self.batch.batch_size, device=self.batch.device)
            self.elsewhere = stored
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the columns and meta_info of `other`, in place; returns self. What both have must be equal."""
        mine, theirs = self, other
        if self.elsewhere or other.elsewhere:
            mine, theirs = self._with_both_here(other), other._with_both_here(self)
        if theirs.batch is None:
            batch = mine.batch
        elif mine.batch is None:
            batch = theirs.batch.copy()
        else:
            batch = union_tensor_dict(mine.batch.copy(), theirs.batch)
        columns = union_numpy_dict(dict(self.non_tensor_batch), other.non_tensor_batch)
        meta_info = union_two_dict(dict(self.meta_info), other.meta_info)
        if self.elsewhere:  # what was fetched in order to compare
            batch = batch.exclude(*self.elsewhere)
        whole = type(self)(batch, columns, meta_info, {**theirs.elsewhere, **self.elsewhere})
        self.__dict__.update(whole.__dict__)
        return self

    def _with_both_here(self, other: DataProto) -> DataProto:
        """This table, with those columns here that `other` has too, so that the two can be compared; those that are known to be
        the same without a look stay where they are."""
        return self.fetch(
            [
                key
                for key in other.batch_keys()
                if key in self.elsewhere and not self.elsewhere[key].is_same(other.elsewhere.get(key))
            ]
        )

    def put_columns(self, other: DataProto) -> DataProto:
        """Add the columns of `other`, in place of those of the same name; returns self. meta_info stays as it is."""
        if other.batch is None and not other.non_tensor_batch:
            return self
        rest = self.select([key for key in self.batch_keys() if key not in other.batch_keys()])
        rest.non_tensor_batch = {k: v for k, v in self.non_tensor_batch.items() if k not in other.non_tensor_batch}
        rest.union(other.select(meta_info_keys=[]))
        self.batch, self.non_tensor_batch, self.elsewhere = rest.batch, rest.non_tensor_batch, rest.elsewhere
        return self

    # ---- parts and wholes -------------------------------------------------------------------------------------------

    def is_padding_enabled(self) -> bool:
        """Whether `chunk` may make parts that differ by a row (see DataProtoConfig)."""
        return bool(self.meta_info.get(DataProtoConfig.auto_padding_key, False)) or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append `padding_size` copies of the last row, or of the first if `padding_candidate` is "first", in place."""
        if padding_size == 0:
            return
        require(len(self) > 0, "a DataProto without rows has no row to pad with")
        filler = 0 if padding_candidate == "first" else len(self) - 1
        self.reorder(torch.tensor([*range(len(self)), *[filler] * padding_size]))

    def chunk(self, chunks: int) -> list[DataProto]:
        """`chunks` parts of equal size, as views; with padding enabled the first ones may be a row longer."""
        require(chunks > 0, f"the number of chunks must be positive, got {chunks}")
        require(
            len(self) % chunks == 0 or self.is_padding_enabled(),
            f"only support equal chunk. Got size of DataProto {len(self)} and chunk {chunks}.",
        )
        bounds = [len(self) // chunks * i + min(i, len(self) % chunks) for i in range(chunks + 1)]
        return [self.slice(start, end) for start, end in pairwise(bounds)]

    def split(self, split_size: int) -> list[DataProto]:
        """Parts of `split_size` rows, as views; the last one may be shorter."""
        require(split_size > 0, f"split_size must be positive, got {split_size}")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Stack tables with the same columns. `metrics` of the meta_infos are gathered into `{name: list of values}`;
        every other meta_info key must have the same value wherever it occurs."""
        data = list(data)
        require(len(data) > 0, "concat needs at least one DataProto")
        store = next((part.store for part in data if part.elsewhere), None)
        stored = list(dict.fromkeys(key for part in data for key in part.elsewhere))
        if store is not None:  # a column that is elsewhere in one part goes there from the others
            same_keys([part.batch_keys() for part in data], "batch")
            data = [part.leave_in_store(store, stored) for part in data]
        with_batch = [part.batch for part in data if part.batch is not None]
        require(len(with_batch) in (0, len(data)), "concat needs tensors in every part or in none")
        return type(data[0])(
            batch=concat_tensors(with_batch) if with_batch else None,
            non_tensor_batch=concat_arrays([part.non_tensor_batch for part in data]),
            meta_info=merge_meta_info([part.meta_info for part in data]),
            elsewhere={key: StoredColumn.concat(key, [part.elsewhere[key] for part in data]) for key in stored},
        )

    def make_iterator(
        self, mini_batch_size: int, epochs: int, seed: int | None = None, dataloader_kwargs: dict | None = None
    ) -> Iterator[DataProto]:
        """Mini-batches, `epochs` times over. `dataloader_kwargs` go to torch's DataLoader ({"shuffle": True}); with a
        `seed` the order is reproducible. AssertionError unless `mini_batch_size` divides the number of rows."""
        require(
            mini_batch_size > 0 and len(self) % mini_batch_size == 0,
            f"{len(self)} rows cannot be divided into mini-batches of {mini_batch_size}",
        )
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        if len(self) == 0:
            return iter(())
        # The loader only deals out row numbers; collating takes the rows out of the table in one go.
        loader: DataLoader = DataLoader(
            range(len(self)),  # type: ignore[arg-type]
            batch_size=mini_batch_size,
            collate_fn=self.select_idxs,
            generator=generator,
            **(dataloader_kwargs or {}),
        )
        return (batch for _ in range(epochs) for batch in loader)

    # ---- bytes ------------------------------------------------------------------------------------------------------

    def to_bytes(self) -> memoryview:
        """All of it as one read-only bytes-like object. TypeError, naming key and type, for what is not plain data."""
        return codec.to_bytes(self._fields())

    @classmethod
    def from_bytes(cls, data: Any) -> DataProto:
        """Inverse of `to_bytes`; runs no code from `data`. DataError if `data` is anything else."""
        return cls(*codec.from_bytes(data))

    def save_to_disk(self, filepath: str | os.PathLike) -> None:
        """Write to a file, atomically. TypeError, naming key and type, for what is not plain data."""
        codec.save(filepath, self._fields())

    @classmethod
    def load_from_disk(cls, filepath: str | os.PathLike) -> DataProto:
        """Inverse of `save_to_disk`; runs no code from the file. DataError, naming it, if it is anything else."""
        return cls(*codec.load(filepath))

    def __getstate__(self) -> tuple:
        return codec.to_pickle_state((self.batch, self.non_tensor_batch, self.meta_info)), self.elsewhere

    def __setstate__(self, state: tuple) -> None:
        here, self.elsewhere = state
        self.batch, self.non_tensor_batch, self.meta_info = codec.from_pickle_state(here)

    def __copy__(self) -> DataProto:
        batch = None if self.batch is None else self.batch.copy()
        return type(self)(batch, dict(self.non_tensor_batch), dict(self.meta_info), dict(self.elsewhere))

    def __deepcopy__(self, memo: dict) -> DataProto:
        batch = None if self.batch is None else self.batch.clone()
        columns, info = copy.deepcopy(self.non_tensor_batch, memo), copy.deepcopy(self.meta_info, memo)
        return type(self)(batch, columns, info, dict(self.elsewhere))

    # ---- looking at it ----------------------------------------------------------------------------------------------

    def print_size(self, prefix: str = "") -> None:
        """Print the memory of the columns that are here, in GB; object columns count their pointers only."""
        tensors = sum(column_bytes(self.batch.get(key)) for key in self._here())
        arrays = sum(column.nbytes for column in self.non_tensor_batch.values())
        text = f"Size of tensordict: {tensors / 1024**3:.6f} GB, size of non_tensor_batch: {arrays / 1024**3:.6f} GB"
        print(f"{prefix}, {text}" if prefix else text)

    def get_data_info(self) -> str:
        """One line a column: its name, type, shape, dtype and device."""
        lines = ["batch", *(f"  {key}: {column_info(self.batch.get(key))}" for key in self._here())]
        lines += [f"  {key}: {column}" for key, column in self.elsewhere.items()]
        lines += ["non_tensor_batch", *(f"  {key}: {column_info(col)}" for key, col in self.non_tensor_batch.items())]
        lines += ["meta_info", *(f"  {key}: {type(value).__name__}" for key, value in self.meta_info.items())]
        return "\n".join(lines)


def collate_fn(items: list[DataProtoItem]) -> DataProto:
    """Stack rows into a table; the meta_info is that of the first."""
    require(len(items) > 0, "collate_fn needs at least one row")
    batches = [item.batch for item in items if item.batch is not None]
    require(len(batches) in (0, len(items)), "collate_fn needs tensors in every row or in none")
    columns = list_of_dict_to_dict_of_list([item.non_tensor_batch for item in items])
    return DataProto(
        batch=torch.stack(batches).contiguous() if batches else None,
        non_tensor_batch={key: object_array(values) for key, values in columns.items()},
        meta_info=items[0].meta_info,
    )
