"""Fixtures of the data suite."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_data import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_without_template() -> Any:
    return make_tokenizer(None)


@pytest.fixture(scope="session", params=["qwen2_5", "smollm2"])
def real_tokenizer(request: pytest.FixtureRequest, shared_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared_dir / "data" / "tokenizers" / request.param)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """`write(rows, "a.jsonl")`: a file of the kind its name says."""

    def write_rows(rows: list[Any], name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
        else:
            path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
        return path

    return write_rows
