"""How many rows a dataset has, where that can be told without reading it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

LARGEST_TEXT = 2 << 30
"""Bytes of jsonl whose lines are still counted (about a second)."""


def count_rows(files: str | Iterable[str]) -> tuple[int | None, str]:
    """Rows of all files together, or None, and why it is not known."""
    total = 0
    for name in [files] if isinstance(files, str) else files:
        rows, why_not = _count_file(name)
        if rows is None:
            return None, why_not
        total += rows
    return total, ""


def _count_file(name: str) -> tuple[int | None, str]:
    if name.startswith("builtin:"):
        return None, f"{name} is generated when the run starts"
    path = Path(os.path.expandvars(name)).expanduser()
    if not path.is_file():
        return None, f"{name} is not a local file"
    if path.suffix == ".parquet":
        return _count_parquet(path)
    if path.suffix == ".jsonl" and path.stat().st_size <= LARGEST_TEXT:
        try:
            with path.open("rb") as lines:
                return sum(1 for line in lines if line.strip()), ""
        except OSError as error:
            return None, f"{path} cannot be read: {error.strerror or error}"
    return None, f"{name} is too large, or of a kind, to be counted without reading it"


def _count_parquet(path: Path) -> tuple[int | None, str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_metadata(path).num_rows, ""
    except (pa.ArrowException, OSError) as error:
        return None, f"{path} cannot be read as parquet: {error}"
