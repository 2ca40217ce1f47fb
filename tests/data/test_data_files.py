"""Reading files: every kind, every way a path can be written, every way a file can be bad."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quadriga.data.files import load_rows
from quadriga.errors import DataError


@pytest.mark.parametrize("name", ["a.parquet", "a.json", "a.jsonl"])
def test_every_kind_of_file_gives_the_same_rows(write, name):
    rows = [{"x": 1, "chat": [{"role": "user", "content": "é漢"}]}, {"x": 2, "chat": []}]
    loaded = load_rows(write(rows, name))
    assert loaded.read(np.arange(2)) == rows


def test_a_json_file_may_also_hold_one_object_a_line_with_blank_lines_and_a_bom(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"x": 1}\r\n\n{"x": 2}')
    assert load_rows(path).read(np.arange(2)) == [{"x": 1}, {"x": 2}]


def test_files_of_different_kinds_and_columns_are_numbered_through(write):
    files = [
        write([{"x": 0}, {"x": 1}], "a.parquet"),
        write([], "empty.jsonl"),
        write([{"y": "2"}, {"x": 3}], "b.jsonl"),
    ]
    rows = load_rows(files)
    assert len(rows) == 4
    assert rows.read(np.array([1, 2, 3])) == [{"x": 1}, {"y": "2"}, {"x": 3}]
    assert rows.read(np.array([0, 3])) == [{"x": 0}, {"x": 3}]
    assert rows.where(1) == f"{files[0]}, row 1"
    assert rows.where(2) == f"{files[2]}, row 0"


def test_home_and_environment_variables_are_expanded(write, tmp_path, monkeypatch):
    write([{"x": 1}], "a.jsonl")
    monkeypatch.setenv("MY_DATA", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(load_rows(["$MY_DATA/a.jsonl", "${MY_DATA}/a.jsonl", "~/a.jsonl"])) == 3


def test_built_in_rows_need_no_file():
    assert len(load_rows("builtin:arithmetic/train")) == 4096
    with pytest.raises(DataError, match="builtin:arithmetic/test"):
        load_rows("builtin:chess/train")


def test_missing_file_is_named_with_its_expanded_path(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"\$MY_DATA/none.parquet \(.*/none.parquet\) does not exist"):
        load_rows("$MY_DATA/none.parquet")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"[]"])
def test_a_dataset_without_rows_is_an_error(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match="no rows in"):
        load_rows(path)


def test_an_empty_list_of_files_is_an_error():
    with pytest.raises(DataError, match="empty"):
        load_rows([])


def test_folders_and_unknown_kinds_are_errors(tmp_path):
    (tmp_path / "a.csv").write_text("x\n1\n")
    for path in (tmp_path, tmp_path / "a.csv"):
        with pytest.raises(DataError, match=r"is not a \.parquet, \.json, \.jsonl file"):
            load_rows(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"x": 1}\n{"x": \xff}\n', "line 2: not valid UTF-8 at byte 6"),
        (b'{"x": 1}\n\n{"x": 2\n', "line 3: not valid JSON"),
        (b'{"x": 1}\n[1, 2]\n', "row 1: a row must be a JSON object, found list"),
        (b'[{"x": 1}, 7]', "row 1: a row must be a JSON object, found int"),
        (b'[{"x": 1}', "not valid JSON"),
    ],
)
def test_bad_json_is_named_by_file_and_line(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_rows(path)
    assert str(path) in caught.value.what
    assert caught.value.fix


def test_text_in_parquet_that_is_not_utf8_is_named_by_row(tmp_path):
    texts = pa.array([b"good", b"\xff\xfe", b"good"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"x": [1, 2, 3], "prompt": texts}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row 1: column 'prompt' is not valid UTF-8"):
        load_rows(tmp_path / "a.parquet")


def test_a_damaged_parquet_file_is_an_error(tmp_path: Path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        load_rows(tmp_path / "a.parquet")
