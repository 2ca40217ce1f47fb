"""Which tokens of a rendered chat the assistant itself wrote, exact against the chat template.

The chat is rendered and tokenised once, as a whole, so its ids are those of `apply_chat_template`. The assistant's part
is then found in the text, in one of two ways:

* The template marks it with `{% generation %}`: the marks are used as they are.
* Otherwise message k is what the render of messages[:k + 1] adds to the render of messages[:k] with the header of an
  answer: just what the model would have to write after that prompt. Both must be prefixes of the whole render. A
  template that rewrites earlier turns (say, removes their reasoning) fails this test: an error, not a wrong mask.

White space that a template writes after the end-of-turn token is not the assistant's: generation stops at that token.
A token is the assistant's if it lies wholly inside its text. One that is half prompt and half answer is not: after that
prompt the model could never write it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from quadriga.data.chat import ChatEncoder, Message
from quadriga.errors import DataError

Span = tuple[int, int]
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FIX = (
    "set data.chat_template to a template that marks the assistant's text with {% generation %} … {% endgeneration %}"
)


class Example(NamedTuple):
    ids: list[int]
    mask: np.ndarray  # [tokens] uint8: 1 where the token itself is a target
    straddles: bool = False  # a token is half prompt and half answer


def encode_chats(chats: Sequence[list[Message]], encoder: ChatEncoder, where: Callable[[int], str]) -> list[Example]:
    """Every chat tokenised, with the mask of the assistant's tokens; `where(i)` names the file and row of chat i."""
    for row, chat in enumerate(chats):
        if not any(message["role"] == "assistant" for message in chat):
            raise DataError(
                f"{where(row)}: no message of the role 'assistant', so there is nothing to learn", "remove the row"
            )
    texts = encoder.render(chats, where, for_answer=False)
    if _GENERATION_TAG.search(encoder.chat_template or ""):
        marked = encoder.encode_marked(chats, where)
        return [
            Example(ids, np.array(own, np.uint8)) for ids, own in zip(marked["input_ids"], marked["assistant_masks"])
        ]
    if not encoder.tokenizer.is_fast:
        raise DataError(
            f"the tokenizer {encoder.tokenizer.name_or_path!r} cannot tell which characters a token stands for",
            "use a fast tokenizer (one with a tokenizer.json)",
        )
    spans = _assistant_spans(chats, texts, encoder, where)
    encoding = encoder.encode(texts, where, return_offsets_mapping=True)
    marks = [_mark(offsets, own) for offsets, own in zip(encoding["offset_mapping"], spans)]
    return [Example(ids, *mark) for ids, mark in zip(encoding["input_ids"], marks)]


def _assistant_spans(
    chats: Sequence[list[Message]], texts: Sequence[str], encoder: ChatEncoder, where: Callable[[int], str]
) -> list[list[Span]]:
    """Character spans of the assistant's text in each rendered chat."""
    turns = [
        (row, k) for row, chat in enumerate(chats) for k, message in enumerate(chat) if message["role"] == "assistant"
    ]

    def where_turn(turn: int) -> str:
        return f"{where(turns[turn][0])}, message {turns[turn][1]}"

    prompts = encoder.render([chats[row][:k] for row, k in turns], where_turn, for_answer=True)
    answered = encoder.render([chats[row][: k + 1] for row, k in turns], where_turn, for_answer=False)
    end_of_turn = tuple(encoder.tokenizer.get_added_vocab())
    spans: list[list[Span]] = [[] for _ in chats]
    for turn, (row, _) in enumerate(turns):
        start, end = len(prompts[turn]), len(answered[turn])
        if not (start <= end and texts[row].startswith(prompts[turn]) and texts[row].startswith(answered[turn])):
            raise DataError(
                f"{where_turn(turn)}: the chat template renders this turn differently when more turns follow, or after "
                "its own generation prompt, so the assistant's tokens cannot be told exactly",
                _FIX,
            )
        stripped = texts[row][start:end].rstrip()
        if stripped.endswith(end_of_turn):
            end = start + len(stripped)
        spans[row].append((start, end))
    return spans


def _mark(offsets: Sequence[Span], spans: Sequence[Span]) -> tuple[np.ndarray, bool]:
    first, last = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    inside = np.zeros(len(offsets), dtype=bool)
    straddles = False
    for start, end in spans:
        inside |= (start <= first) & (last <= end) & (first < last)
        straddles |= bool(((first < start) & (start < last)).any())
    return inside.astype(np.uint8), straddles
