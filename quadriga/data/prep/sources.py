"""Raw examples, split by split, from a local file or folder or from a dataset on the hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quadriga.data.files import SUFFIXES, Row, expand_path, load_rows
from quadriga.data.sampler import HOLD_OUT_STREAM, seeded_order
from quadriga.errors import DataError


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


SPLITS = ("train", "test")


def read_splits(source: str, *, hub_config: str | None, test_size: int | None, seed: int) -> dict[str, list[Row]]:
    """{"train": rows, "test": rows}.

    Args:
        source: a file (test rows are then drawn from it), a folder with `train.*` and `test.*` files or with `train/`
            and `test/` folders of json files, or a hub name such as `openai/gsm8k`.
        hub_config: configuration of the hub dataset.
        test_size: rows to hold out of a single file; None: a tenth.
    """
    path = expand_path(source)
    if path.is_file():
        return _hold_out(_all_rows([path]), source, test_size, seed)
    if test_size is not None:
        raise DataError(f"{source} is not a single file, so it has its own test split", "leave --test-size out")
    if path.is_dir():
        return {split: _all_rows(_split_files(path, split)) for split in SPLITS}
    if path.suffix in SUFFIXES or source.startswith((".", "/", "~", "$")):
        raise DataError(f"{source} does not exist", "give a file, a folder, or the name of a dataset on the hub")
    return _from_hub(source, hub_config)


def _all_rows(files: list[Path]) -> list[Row]:
    rows = load_rows(files)
    return rows.read(np.arange(len(rows)))


def _split_files(folder: Path, split: str) -> list[Path]:
    for suffix in SUFFIXES:
        if (file := folder / f"{split}{suffix}").is_file():
            return [file]
    if files := sorted((folder / split).rglob("*.json")):
        return files
    raise DataError(
        f"{folder} has no {split} split",
        f"put a file {split}.jsonl, {split}.json or {split}.parquet there, or json files in {split}/",
    )


def _hold_out(rows: list[Row], source: str, test_size: int | None, seed: int) -> dict[str, list[Row]]:
    size = max(1, len(rows) // 10) if test_size is None else test_size
    if not 0 < size < len(rows):
        raise DataError(
            f"cannot hold {size} test rows out of the {len(rows)} rows of {source}", "choose another --test-size"
        )
    order = seeded_order(len(rows), seed, HOLD_OUT_STREAM)
    picks = {"train": np.sort(order[size:]), "test": np.sort(order[:size])}
    return {split: [rows[number] for number in picks[split]] for split in SPLITS}


def _from_hub(name: str, config: str | None) -> dict[str, list[Row]]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{name!r} is no local file or folder, and reading from the hub needs the package 'datasets'",
            "pip install 'quadriga[hub]', or give --input a local file or folder",
        ) from error
    try:
        loaded: Any = datasets.load_dataset(name, config)
    except Exception as error:  # network, permission, unknown name: whatever it is, the user's way out is the same
        raise DataError(
            f"the dataset {name!r} cannot be read from the hub: {type(error).__name__}: {error}",
            "check the name and the network, or give --input a local file or folder",
        ) from error
    if missing := [split for split in SPLITS if split not in loaded]:
        raise DataError(
            f"the hub dataset {name!r} has no split {missing[0]!r}, only {', '.join(loaded)}", "use another dataset"
        )
    return {split: loaded[split].to_list() for split in SPLITS}
