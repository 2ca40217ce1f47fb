"""Examples for supervised fine-tuning: whole conversations with a mask over the tokens that are targets."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quadriga.data.assistant_mask import Example, encode_chats
from quadriga.data.chat import ChatEncoder, Prompt
from quadriga.data.files import Row, load_rows
from quadriga.data.length_limit import check_truncation, kept_tokens
from quadriga.data.messages import Message, check_messages
from quadriga.data.order import select_samples
from quadriga.data.progress import progress_bar
from quadriga.data.ragged import RaggedTokens
from quadriga.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CHUNK_ROWS = 1000


class SFTDataset:
    """Item i: `input_ids` [length] int32, `loss_mask` [length] uint8 (1: this token is a target), `index`.

    Two layouts, chosen by `messages_key`:

    * set: the column holds a whole conversation; every assistant message is a target.
    * None: `prompt_key` and `response_key`. With a chat template they are a user and an assistant message (the prompt
      may also be a list of messages). Without one they are plain text: prompt, response, EOS, the last two targets.

    Args:
        prompt_dict_keys, response_dict_keys: keys to follow inside the column, e.g. `["answer"]` in `extra_info`.
        max_length: limit in tokens for the whole example; `truncation` says what happens to a longer one.
        max_samples, shuffle, seed, chat_template, apply_chat_template_kwargs: as in `RLDataset`.

    Rows that have no target left after truncation are dropped and reported (`dropped_indices`).
    """

    def __init__(
        self,
        data_files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        prompt_key: str = "prompt",
        response_key: str = "response",
        prompt_dict_keys: Sequence[str] | None = None,
        response_dict_keys: Sequence[str] | None = None,
        messages_key: str | None = None,
        truncation: str = "error",
        max_samples: int = -1,
        shuffle: bool = False,
        seed: int = 0,
        chat_template: str | None = None,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_truncation(truncation)
        self.prompt_path = [prompt_key, *(prompt_dict_keys or ())]
        self.response_path = [response_key, *(response_dict_keys or ())]
        self.messages_key = messages_key
        self.max_length, self.truncation = max_length, truncation
        self.rows = load_rows(data_files)
        self.indices = select_samples(len(self.rows), max_samples, shuffle=shuffle, seed=seed)
        self.encoder = ChatEncoder(tokenizer, chat_template, apply_chat_template_kwargs)
        self.tokens, self.masks = self._encode_all()
        self.dropped_indices = self._drop_untargeted()

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> dict[str, Any]:
        if not 0 <= position < len(self):
            raise IndexError(f"row {position} of {len(self)}")
        return {
            "input_ids": self.tokens[position],
            "loss_mask": self.masks[position],
            "index": int(self.indices[position]),
        }

    def _encode_all(self) -> tuple[RaggedTokens, RaggedTokens]:
        tokens, masks, straddling = [], [], 0
        with progress_bar("tokenising examples", len(self)) as advance:
            for start in range(0, len(self), CHUNK_ROWS):
                indices = self.indices[start : start + CHUNK_ROWS]
                examples = self._encode(indices, lambda i, at=indices: self.rows.where(int(at[i])))  # type: ignore[misc]
                cut = [self._limit(example, int(index)) for index, example in zip(indices, examples)]
                straddling += sum(example.straddles for example in examples)
                tokens.append(RaggedTokens.from_rows(ids for ids, _ in cut))
                masks.append(RaggedTokens.from_rows((mask for _, mask in cut), np.uint8))
                advance(len(indices))
        if straddling:
            logger.warning(
                "%d of %d rows have a token that is half prompt and half answer; it is not a target. If they are many, "
                "let the chat template end its generation prompt with a special token or a line break",
                straddling, len(self),
            )  # fmt: skip
        return RaggedTokens.concat(tokens), RaggedTokens.concat(masks)

    def _encode(self, indices: np.ndarray, where: Callable[[int], str]) -> list[Example]:
        rows = list(enumerate(self.rows.read(indices)))
        if self.messages_key is not None:
            column = self.messages_key
            chats = [
                check_messages(_follow(row, [column], where(i)), f"{where(i)}, column {column!r}") for i, row in rows
            ]
            return encode_chats(chats, self.encoder, where)
        pairs = [self._prompt_and_response(row, where(i)) for i, row in rows]
        if self.encoder.chat_template is None and all(isinstance(prompt, str) for prompt, _ in pairs):
            return self._encode_plain(pairs, where)  # type: ignore[arg-type]
        return encode_chats([_as_chat(prompt, response) for prompt, response in pairs], self.encoder, where)

    def _prompt_and_response(self, row: Row, where: str) -> tuple[Prompt, str]:
        prompt = _follow(row, self.prompt_path, where)
        response = _follow(row, self.response_path, where)
        if not isinstance(response, str):
            raise DataError(
                f"{where}: the response {_name(self.response_path)} must be a string, found {response!r}",
                "correct the row",
            )
        return (
            prompt if isinstance(prompt, str) else check_messages(prompt, f"{where}, {_name(self.prompt_path)}")
        ), response

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

    def _drop_untargeted(self) -> np.ndarray:
        targets = np.array([int(mask.sum()) for mask in self.masks])
        dropped = self.indices[targets == 0]
        if len(dropped) == len(self):
            raise DataError(
                f"none of the {len(self)} rows has a target token within data.max_length={self.max_length}",
                "raise data.max_length",
            )
        if len(dropped):
            shown = "; ".join(self.rows.where(int(index)) for index in dropped[:10])
            logger.warning(
                "dropped %d of %d rows without a target token after truncation: %s", len(dropped), len(self), shown
            )
            kept = np.flatnonzero(targets)
            self.tokens, self.masks = self.tokens.select(kept), self.masks.select(kept)
            self.indices = self.indices[kept]
        return dropped


def _as_chat(prompt: Prompt, response: str) -> list[Message]:
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [*turns, {"role": "assistant", "content": response}]


def _follow(row: Row, path: Sequence[str], where: str) -> Any:
    value: Any = row
    for depth, key in enumerate(path):
        if not isinstance(value, dict) or value.get(key) is None:
            found = ", ".join(map(repr, value)) if isinstance(value, dict) else type(value).__name__
            inside = f"inside {_name(path[:depth])} " if depth else ""
            raise DataError(
                f"{where}: there is no {key!r} {inside}(found: {found})",
                "set data.messages_key, or data.prompt_key and data.response_key and their dict keys, to what there is",
            )
        value = value[key]
    return value


def _name(path: Sequence[str]) -> str:
    return ".".join(path)
