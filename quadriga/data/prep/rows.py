"""The row format every prepared dataset has, and how it is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from quadriga.data.files import Row


def make_row(
    *,
    data_source: str,
    prompt: str | list[dict[str, str]],
    ability: str,
    ground_truth: Any,
    split: str,
    index: int,
    **extra: Any,
) -> Row:
    """One row; `extra` goes to `extra_info` beside split and index."""
    return {
        "data_source": data_source,
        "prompt": prompt,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **extra},
    }


def user_turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Written beside its place and renamed, so that a half-written file is never found there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".tmp")
    pq.write_table(pa.Table.from_pylist(list(rows)), unfinished)
    os.replace(unfinished, path)
