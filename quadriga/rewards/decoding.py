"""Token ids to texts, all rows at once."""

from __future__ import annotations

from typing import Any


def decode_rows(tokenizer: Any, rows: list[list[int]]) -> list[str]:
    """`tokenizer.batch_decode(rows, skip_special_tokens=True)`, on all cores where the tokenizer's backend can.

    transformers decodes row by row and walks through every id in Python first: with a thousand long rows that takes as
    long as scoring them.
    """
    backend = getattr(tokenizer, "_tokenizer", None)
    decode = getattr(type(tokenizer), "_decode", None)
    is_own = getattr(decode, "__module__", "").startswith("transformers.tokenization_utils")
    if backend is None or not hasattr(backend, "decode_batch") or not is_own or tokenizer.clean_up_tokenization_spaces:
        return tokenizer.batch_decode(rows, skip_special_tokens=True)
    return backend.decode_batch(rows, skip_special_tokens=True)
