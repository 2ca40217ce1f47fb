"""Examples with a mask over the tokens that are targets: for supervised fine-tuning, and pairs of which one is preferred."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quadriga.data.assistant_mask import Example, encode_chats
from quadriga.data.chat import ChatEncoder, Message, Prompt, check_messages
from quadriga.data.files import Row, load_rows, progress_bar
from quadriga.data.ragged import RaggedTokens, check_truncation, kept_tokens
from quadriga.data.sampler import select_samples
from quadriga.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

CHUNK_ROWS = 1000
SHORT = 8
"""Answers of at most so many tokens are looked at more closely: they may be white space."""

Conversation = list[Message] | tuple[Prompt, str]
"""Whole chat of which every assistant message is a target, or a prompt and the answer to it."""


class ExampleDataset:
    """Each row is `sides` conversations (one to imitate; two to compare), tokenised when the dataset is made.

    A prompt and its answer are a user and an assistant message where there is a chat template (the prompt may also be a
    list of messages). Without one they are plain text: prompt, answer, EOS, the last two targets.

    Args:
        max_length: limit in tokens for each conversation; `truncation` says what happens to a longer one.
        empty_response: what to do with a row that has nothing to learn from (an answer without text after templating,
            or none left after truncation): `error`, or `skip`, which counts and names them (`dropped_indices`).
        max_samples, shuffle, seed, chat_template, apply_chat_template_kwargs: as in `RLDataset`.
    """

    sides = 1

    def __init__(
        self,
        data_files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        truncation: str = "error",
        empty_response: str = "error",
        max_samples: int = -1,
        shuffle: bool = False,
        seed: int = 0,
        chat_template: str | None = None,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_truncation(truncation)
        self.max_length, self.truncation = max_length, truncation
        self.rows = load_rows(data_files)
        self.indices = select_samples(len(self.rows), max_samples, shuffle=shuffle, seed=seed)
        self.encoder = ChatEncoder(tokenizer, chat_template, apply_chat_template_kwargs)
        self.tokens, self.masks = self._encode_all()
        self.dropped_indices = self._drop_empty(empty_response)

    def conversations(self, row: Row, where: str) -> Sequence[Conversation]:
        """The `sides` conversations of a row; `where` names its file and number. For subclasses."""
        raise AttributeError(f"{type(self).__name__} does not say what the conversations of a row are")

    def __len__(self) -> int:
        return len(self.indices)

    def side(self, position: int, side: int) -> dict[str, Any]:
        """`input_ids` [length] int32, `loss_mask` [length] uint8 (1: this token is a target), `index` of the row."""
        if not 0 <= position < len(self):
            raise IndexError(f"row {position} of {len(self)}")
        at = position * self.sides + side
        return {"input_ids": self.tokens[at], "loss_mask": self.masks[at], "index": int(self.indices[position])}

    # ---- tokens ------------------------------------------------------------------------------------------------------

    def _encode_all(self) -> tuple[RaggedTokens, RaggedTokens]:
        tokens, masks, straddling = [], [], 0
        with progress_bar("tokenising examples", len(self)) as advance:
            for start in range(0, len(self), CHUNK_ROWS):
                indices = np.repeat(self.indices[start : start + CHUNK_ROWS], self.sides)
                examples = self._encode(indices, lambda i, at=indices: self.rows.where(int(at[i])))  # type: ignore[misc]
                cut = [self._limit(example, int(index)) for index, example in zip(indices, examples)]
                straddling += sum(example.straddles for example in examples)
                tokens.append(RaggedTokens.from_rows(ids for ids, _ in cut))
                masks.append(RaggedTokens.from_rows((mask for _, mask in cut), np.uint8))
                advance(len(indices) // self.sides)
        if straddling:
            logger.warning(
                "%d of %d rows have a token that is half prompt and half answer; it is not a target. If they are many, "
                "let the chat template end its generation prompt with a special token or a line break",
                straddling, len(self),
            )  # fmt: skip
        return RaggedTokens.concat(tokens), RaggedTokens.concat(masks)

    def _encode(self, indices: np.ndarray, where: Callable[[int], str]) -> list[Example]:
        """`indices` holds each row `sides` times."""
        rows = self.rows.read(indices[:: self.sides])
        conversations = [c for i, row in enumerate(rows) for c in self.conversations(row, where(i * self.sides))]
        plain = [c for c in conversations if isinstance(c, tuple) and isinstance(c[0], str)]
        if self.encoder.chat_template is None and len(plain) == len(conversations):
            return self._encode_plain(plain, where)  # type: ignore[arg-type]
        return encode_chats([_as_chat(*c) if isinstance(c, tuple) else c for c in conversations], self.encoder, where)

    def _encode_plain(self, pairs: Sequence[tuple[str, str]], where: Callable[[int], str]) -> list[Example]:
        eos = self.encoder.tokenizer.eos_token_id
        if eos is None:
            raise DataError(
                "the tokenizer has no EOS token: a model could not learn to stop", "set tokenizer.eos_token"
            )
        prompts = self.encoder.encode_prompts([prompt for prompt, _ in pairs], where)
        responses = self.encoder.encode([response for _, response in pairs], where)["input_ids"]
        return [
            Example([*prompt, *response, eos], np.repeat(np.array([0, 1], np.uint8), [len(prompt), len(response) + 1]))
            for prompt, response in zip(prompts, responses)
        ]

    def _limit(self, example: Example, index: int) -> tuple[np.ndarray, np.ndarray]:
        ids, mask, _ = example
        if len(ids) > self.max_length and self.truncation == "error":
            raise DataError(
                f"{self.rows.where(index)}: the example has {len(ids)} tokens, data.max_length is {self.max_length}",
                "raise data.max_length, or set data.truncation to left, right or middle",
            )
        kept = kept_tokens(len(ids), self.max_length, self.truncation)
        return np.array(ids, dtype=np.int32)[kept], mask[kept]

    # ---- rows without an answer --------------------------------------------------------------------------------------

    def _drop_empty(self, empty_response: str) -> np.ndarray:
        has_text = self._has_text().reshape(len(self), self.sides).all(axis=1)
        dropped = self.indices[~has_text]
        if not len(dropped):
            return dropped
        shown = "; ".join(self.rows.where(int(index)) for index in dropped[:10])
        if len(dropped) == len(self):
            raise DataError(
                f"all {len(self)} rows have nothing to learn from: their answer has no text, or none within "
                f"data.max_length={self.max_length}: {shown}",
                "check the keys that name the answer, or raise data.max_length",
            )
        if empty_response == "error":
            raise DataError(
                f"{len(dropped)} of {len(self)} rows have nothing to learn from: their answer has no text, or none within "
                f"data.max_length={self.max_length}: {shown}",
                "give them an answer or remove them, raise data.max_length, or leave them out with data.empty_response=skip",
            )
        logger.warning("left out %d of %d rows that have nothing to learn from: %s", len(dropped), len(self), shown)
        kept = np.flatnonzero(np.repeat(has_text, self.sides))
        self.tokens, self.masks = self.tokens.select(kept), self.masks.select(kept)
        self.indices = self.indices[has_text]
        return dropped

    def _has_text(self) -> np.ndarray:
        """For each conversation, whether its targets hold anything but special tokens and white space."""
        tokenizer = self.encoder.tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        counted = (self.masks.flat > 0) & ~np.isin(self.tokens.flat, list(special))
        up_to = np.concatenate([[0], np.cumsum(counted)])
        plain_targets = up_to[self.tokens.offsets[1:]] - up_to[self.tokens.offsets[:-1]]
        has_text = plain_targets > 0
        for at in np.flatnonzero(has_text & (plain_targets <= SHORT)).tolist():
            targets = self.tokens[at][self.masks[at] > 0]
            has_text[at] = bool(tokenizer.decode(targets, skip_special_tokens=True).strip())
        return has_text


def follow(row: Row, path: Sequence[str], where: str, keys: str) -> Any:
    """The value at `path` inside a row; DataError says what is there instead, and that `keys` choose it."""
    value: Any = row
    for depth, key in enumerate(path):
        if not isinstance(value, dict) or value.get(key) is None:
            there = ", ".join(map(repr, value)) if isinstance(value, dict) else type(value).__name__
            inside = f"inside {'.'.join(path[:depth])} " if depth else ""
            raise DataError(f"{where}: there is no {key!r} {inside}(found: {there})", f"set {keys} to what there is")
        value = value[key]
    return value


def _as_chat(prompt: Prompt, response: str) -> list[Message]:
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [*turns, {"role": "assistant", "content": response}]


_KEYS = "data.messages_key, or data.prompt_key and data.response_key and their dict keys,"


class SFTDataset(ExampleDataset):
    """Item i: `input_ids` [length] int32, `loss_mask` [length] uint8 (1: this token is a target), `index`.

    Two layouts, chosen by `messages_key`:

    * set: the column holds a whole conversation; every assistant message is a target.
    * None: `prompt_key` and `response_key`, and `prompt_dict_keys`, `response_dict_keys` to follow inside those columns,
      e.g. `["answer"]` in `extra_info`.

    The other arguments are those of `ExampleDataset`.
    """

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any,
        *,
        prompt_key: str = "prompt",
        response_key: str = "response",
        prompt_dict_keys: Sequence[str] | None = None,
        response_dict_keys: Sequence[str] | None = None,
        messages_key: str | None = None,
        **options: Any,
    ) -> None:
        self.prompt_path = [prompt_key, *(prompt_dict_keys or ())]
        self.response_path = [response_key, *(response_dict_keys or ())]
        self.messages_key = messages_key
        super().__init__(data_files, tokenizer, **options)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return self.side(position, 0)

    def conversations(self, row: Row, where: str) -> Sequence[Conversation]:
        if self.messages_key is not None:
            chat = follow(row, [self.messages_key], where, _KEYS)
            return [check_messages(chat, f"{where}, column {self.messages_key!r}")]
        prompt = follow(row, self.prompt_path, where, _KEYS)
        response = follow(row, self.response_path, where, _KEYS)
        if not isinstance(response, str):
            raise DataError(
                f"{where}: the response {'.'.join(self.response_path)} must be a string, found {response!r}",
                "correct the row",
            )
        if not isinstance(prompt, str):
            prompt = check_messages(prompt, f"{where}, {'.'.join(self.prompt_path)}")
        return [(prompt, response)]


CHOSEN, REJECTED = 0, 1
_PAIR_KEYS = "data.prompt_key, data.chosen_key and data.rejected_key"


class PreferenceDataset(ExampleDataset):
    """Item i: `chosen` and `rejected`, each with `input_ids` and `loss_mask` as in `SFTDataset`, and `index`.

    `chosen_key` and `rejected_key` hold either the answers as text, to the prompt in `prompt_key` (text or messages); or
    lists of messages, which follow the prompt's messages where there is a prompt and are whole conversations otherwise.
    The other arguments are those of `ExampleDataset`.
    """

    sides = 2

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any,
        *,
        prompt_key: str = "prompt",
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        **options: Any,
    ) -> None:
        self.prompt_key, self.answer_keys = prompt_key, (chosen_key, rejected_key)
        super().__init__(data_files, tokenizer, **options)

    def __getitem__(self, position: int) -> dict[str, Any]:
        chosen, rejected = self.side(position, CHOSEN), self.side(position, REJECTED)
        return {"chosen": chosen, "rejected": rejected, "index": chosen["index"]}

    def conversations(self, row: Row, where: str) -> Sequence[Conversation]:
        prompt: Prompt | None = row.get(self.prompt_key)
        if prompt is not None and not isinstance(prompt, str):
            prompt = check_messages(prompt, f"{where}, column {self.prompt_key!r}")
        pair = [self._conversation(row, prompt, key, where) for key in self.answer_keys]
        if pair[CHOSEN] == pair[REJECTED]:
            raise DataError(
                f"{where}: chosen and rejected are the same, so there is no preference", "remove the row, or mend it"
            )
        return pair

    def _conversation(self, row: Row, prompt: Prompt | None, key: str, where: str) -> Conversation:
        answer = follow(row, [key], where, _PAIR_KEYS)
        if isinstance(answer, str):
            if prompt is None:
                raise DataError(f"{where}: {key!r} is an answer as text, and there is no prompt", f"set {_PAIR_KEYS}")
            return prompt, answer
        messages = check_messages(answer, f"{where}, column {key!r}")
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}, *messages]
        return [*(prompt or ()), *messages]
