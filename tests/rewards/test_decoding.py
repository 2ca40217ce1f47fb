"""Texts of many rows at once are those of one row after another."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import quadriga
from quadriga.models.load import load_tokenizer
from quadriga.rewards.managers.base import decode_rows

ASSET = Path(quadriga.__file__).parent / "assets" / "arithmetic"


def rows_of(tokenizer):
    draw = random.Random(3)
    return [[draw.randrange(len(tokenizer)) for _ in range(draw.randrange(30))] for _ in range(50)]


@pytest.mark.parametrize("name", ["embedded", "qwen2_5", "smollm2"])
def test_rows_decode_as_transformers_decodes_them(name, request):
    folder = ASSET if name == "embedded" else request.getfixturevalue("shared_dir") / "data" / "tokenizers" / name
    tokenizer = load_tokenizer(folder)
    rows = rows_of(tokenizer)
    assert decode_rows(tokenizer, rows) == [tokenizer.decode(row, skip_special_tokens=True) for row in rows]


def test_a_tokenizer_with_its_own_way_is_asked_itself():
    class Shouting:
        clean_up_tokenization_spaces = False
        _tokenizer = load_tokenizer(ASSET)._tokenizer

        def _decode(self, row):
            return "LOUD"

        def batch_decode(self, rows, skip_special_tokens):
            return [self._decode(row) for row in rows]

    assert decode_rows(Shouting(), [[1, 2], [3]]) == ["LOUD", "LOUD"]
