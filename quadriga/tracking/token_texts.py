"""The text of single tokens, for whoever shows a response token by token."""

from __future__ import annotations

from typing import Any


class TokenTexts:
    """The text of each token by itself, such that the texts of a response, joined, read like the response."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, ids: list[int]) -> list[str]:
        new = sorted(set(ids) - self._known.keys())
        if new:
            texts = self._tokenizer.batch_decode([[i] for i in new], skip_special_tokens=False)
            for token, name, text in zip(new, self._tokenizer.convert_ids_to_tokens(new), texts):
                # Decoding one token by itself loses the space before it where the vocabulary marks that as "▁".
                lost_space = isinstance(name, str) and name.startswith("▁") and not text.startswith(" ")
                self._known[token] = f" {text}" if lost_space else text
        return [self._known[token] for token in ids]
