"""Rows of parquet, json and jsonl files, each of which knows the file and row it came from."""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quadriga.errors import DataError

Row = dict[str, Any]
BUILTIN = "builtin:"
BUILTIN_DATASETS = (f"{BUILTIN}arithmetic/train", f"{BUILTIN}arithmetic/test")
SUFFIXES = (".parquet", ".json", ".jsonl")


class FileRows(Protocol):
    def __len__(self) -> int: ...

    def read(self, numbers: np.ndarray) -> list[Row]:
        """The rows with these numbers (ascending, within the file) as plain Python objects."""


class ArrowRows:
    """Rows of an Arrow table: compact until they are read."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table.combine_chunks()

    def __len__(self) -> int:
        return self.table.num_rows

    def read(self, numbers: np.ndarray) -> list[Row]:
        first, last = int(numbers[0]), int(numbers[-1])
        if last - first + 1 == len(numbers):
            return self.table.slice(first, len(numbers)).to_pylist()
        return self.table.take(pa.array(numbers)).to_pylist()


class ListRows:
    """Rows that are Python objects already."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, numbers: np.ndarray) -> list[Row]:
        return [self.rows[number] for number in numbers]


class Rows:
    """The rows of several files, numbered through from 0. Files may have different columns.

    Args:
        files: (name for messages, its rows) in order.
    """

    def __init__(self, files: Sequence[tuple[str, FileRows]]) -> None:
        self.names = [name for name, _ in files]
        self.parts = [rows for _, rows in files]
        self.starts = np.concatenate([[0], np.cumsum([len(part) for part in self.parts])]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, numbers: np.ndarray) -> list[Row]:
        """The rows with these ascending numbers."""
        rows: list[Row] = []
        cuts = np.searchsorted(numbers, self.starts)
        for part, start, low, high in zip(self.parts, self.starts, cuts, cuts[1:]):
            if high > low:
                rows.extend(part.read(numbers[low:high] - start))
        return rows

    def where(self, number: int) -> str:
        """File and row number within it (from 0), for messages."""
        part = int(np.searchsorted(self.starts, number, side="right")) - 1
        return f"{self.names[part]}, row {number - int(self.starts[part])}"


def load_rows(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Rows:
    """Reads one file or a list of files; `~` and environment variables in the paths are expanded.

    `builtin:arithmetic/train` and `…/test` name rows that Quadriga generates itself.
    """
    names = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    if not names:
        raise DataError("the list of data files is empty", "set data.train_files / data.val_files to at least one file")
    rows = Rows([(name, _builtin(name) if name.startswith(BUILTIN) else _read_file(name)) for name in names])
    if len(rows) == 0:
        raise DataError(f"no rows in {', '.join(names)}", "give a file with at least one row")
    return rows


def find_files(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> None:
    """DataError unless each is a file of a known kind, or a built-in dataset. Nothing is read."""
    for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
        name = os.fspath(path)
        if name.startswith(BUILTIN):
            if name not in BUILTIN_DATASETS:
                raise _no_such_builtin(name)
        else:
            _find_file(name)


def first_row(name: str) -> Row | None:
    """The first row of a file, read without the others; None where that is not possible (a JSON array) or there is none."""
    if name.startswith(BUILTIN):
        return None
    path = _find_file(name)
    if path.suffix == ".parquet":
        with _readable_parquet(name):
            batch = next(pq.ParquetFile(path).iter_batches(batch_size=1), None)
        return batch.to_pylist()[0] if batch is not None and batch.num_rows else None
    if path.suffix != ".jsonl":
        return None
    with _readable(name), path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                return (
                    None if line.lstrip()[:1] == b"[" else _json_object(_parse(line, f"{name}, line {number}"), name, 0)
                )
    return None


def expand_path(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """What the file system refuses becomes a DataError."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise DataError(f"{name} cannot be read: {why}", "check who may read the file, and its disk") from error


@contextmanager
def _readable_parquet(name: str) -> Iterator[None]:
    try:
        with _readable(name):
            yield
    except pa.ArrowException as error:
        raise DataError(f"{name} cannot be read as parquet: {error}", "write the file again") from error


def _builtin(name: str) -> FileRows:
    from quadriga.data.prep.arithmetic import BUILTIN_TASK, generate_arithmetic

    train, test = generate_arithmetic(**BUILTIN_TASK)
    known = dict(zip(BUILTIN_DATASETS, (train, test), strict=True))
    if name not in known:
        raise _no_such_builtin(name)
    return ListRows(known[name])


def _no_such_builtin(name: str) -> DataError:
    return DataError(f"there is no built-in dataset {name!r}", f"use one of {', '.join(BUILTIN_DATASETS)}, or a file")


def _read_file(name: str) -> FileRows:
    path = _find_file(name)
    return _read_parquet(path, name) if path.suffix == ".parquet" else _read_json(path, name)


def _find_file(name: str) -> Path:
    path = expand_path(name)
    shown = name if str(path) == name else f"{name} ({path})"
    with _readable(shown):
        exists, is_file = path.exists(), path.is_file()
    if not exists:
        raise DataError(f"data file {shown} does not exist", "check the path; `quadriga prep --help` makes datasets")
    if not is_file or path.suffix not in SUFFIXES:
        raise DataError(f"{shown} is not a {', '.join(SUFFIXES)} file", "give files of these kinds, or a list of them")
    return path


def _read_parquet(path: Path, name: str) -> FileRows:
    with _readable_parquet(name):
        table = pq.read_table(path)
    try:
        table.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DataError(f"{_bad_parquet_row(table, name)}: {error}", "store text as UTF-8") from error
    return ArrowRows(table)


def _bad_parquet_row(table: pa.Table, name: str) -> str:
    for number in range(table.num_rows):
        for column in table.column_names:
            try:
                table.column(column)[number].as_py()
            except UnicodeDecodeError:
                return f"{name}, row {number}: column {column!r} is not valid UTF-8"
    return f"{name} is damaged"


def _read_json(path: Path, name: str) -> FileRows:
    """A JSON array of objects, one JSON object a line, or (in a .json file) a single object over several lines."""
    with _readable(name):
        content = path.read_bytes()
    content = content.removeprefix(codecs.BOM_UTF8)
    if content.lstrip()[:1] == b"[":
        values = _parse(content, name)
    elif path.suffix == ".json" and (single := _single_object(content)) is not None:
        values = [single]
    else:
        lines = enumerate(content.splitlines(), 1)
        values = [_parse(line, f"{name}, line {number}") for number, line in lines if line.strip()]
    return ListRows([_json_object(value, name, number) for number, value in enumerate(values)])


def _single_object(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _parse(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not valid UTF-8 at byte {error.start}", "save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not valid JSON: {error}", "write one JSON object a line, or one JSON array of objects"
        ) from error
    except ValueError as error:  # a number with more digits than Python reads
        raise DataError(f"{where}: {error}", "write long numbers as text") from error
    except RecursionError as error:
        raise DataError(f"{where}: objects inside objects a thousand deep", "write flatter rows") from error


def _json_object(value: Any, name: str, number: int) -> Row:
    if not isinstance(value, dict):
        raise DataError(
            f"{name}, row {number}: a row must be a JSON object, found {type(value).__name__}",
            "write one JSON object a line, or one JSON array of objects",
        )
    return value


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields `advance(n)`. Nothing is drawn unless stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda n: bar.advance(task, n)
