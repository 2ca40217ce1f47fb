"""Tokens to text while they come, and what of it may be shown already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "�"


class Pieces:
    """The text that each token adds; joined, it is the text of all tokens.

    A token that ends in the middle of a character adds nothing, and the one that completes it adds the whole.

    Args:
        tokenizer: None: there is none here, and a token is called token_id:7.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Decoding starts a little before what is new: some tokenizers write a word at the start of a text in another way.
        self._start = self._told = 0

    def add(self, token_id: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        self._ids.append(token_id)
        before = self._decode(self._ids[self._start : self._told])
        now = self._decode(self._ids[self._start :])
        if (now.endswith(_INCOMPLETE) and len(self._ids) - self._told < 8) or len(now) <= len(before):
            return ""
        self._start, self._told = self._told, len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class Showing:
    """The part of an answer that can be shown while it is written: none of a stop text, and nothing from a mark on.

    Args:
        stops: texts that end the answer; they are not shown.
        marks: texts with which something begins that is understood only as a whole, such as a tool call.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], marks: Sequence[str]) -> None:
        self._pieces = Pieces(tokenizer)
        self._ends = (*stops, *marks)
        self._text = ""
        self._sent = 0

    def add(self, token_ids: Sequence[int]) -> str:
        """What may be shown in addition, now that these tokens have come."""
        self._text += "".join(map(self._pieces.add, token_ids))
        return self._show(len(self._text) - self._held_back())

    def rest(self, whole: str) -> str:
        """What is still to be shown of the `whole` text, which is known at the end."""
        shown = self._text[: self._sent]
        return whole[len(shown) :] if whole.startswith(shown) else ""

    def _show(self, end: int) -> str:
        places = [place for text in self._ends if (place := self._text.find(text)) >= 0]
        end = min([end, *places])
        new = self._text[self._sent : end]
        self._sent = max(end, self._sent)
        return new

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop text or a mark."""
        longest = max(map(len, self._ends), default=1) - 1
        for length in range(min(longest, len(self._text)), 0, -1):
            if any(text.startswith(self._text[-length:]) for text in self._ends):
                return length
        return 0


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first of the stop texts in it."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text
