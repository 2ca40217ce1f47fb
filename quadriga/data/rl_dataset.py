"""Prompts for reinforcement learning, tokenised once when they are loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from quadriga.data.chat import ChatEncoder, Prompt, check_messages
from quadriga.data.files import Row, Rows, load_rows, progress_bar
from quadriga.data.ragged import RaggedTokens, check_truncation, kept_tokens
from quadriga.data.sampler import select_samples
from quadriga.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CHUNK_ROWS = 2000
# Made by Quadriga; a column of the same name in a file is not passed on.
RESERVED = {"input_ids", "attention_mask", "position_ids", "raw_prompt", "index", "epoch", "uid"}


class RLDataset:
    """Rows of prompts; item i is a dict of the row's columns and

    * `input_ids`: prompt tokens [length] int32, without padding,
    * `raw_prompt`: the messages, or the plain string,
    * `index`: the row's number over all files as they were loaded. Filtering and subsampling do not change it.

    Args:
        data_files: parquet, json or jsonl file, or several.
        prompt_key: column with the messages or a plain string.
        reward_fn_key: column that names the scoring function; it also appears as `data_source`.
        default_source: what it says in rows without that column; None: every row must have it.
        max_prompt_length: limit in tokens, after the chat template.
        filter_overlong_prompts: drop rows over the limit (`dropped_indices` has them); else `truncation` applies.
        truncation: `error`, or the side to cut: `left`, `right`, `middle`.
        max_samples: use at most so many rows, before filtering: drawn by `seed` if `shuffle`, else the first; -1: all.
        chat_template, apply_chat_template_kwargs: see `ChatEncoder`.
    """

    def __init__(
        self,
        data_files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_length: int,
        prompt_key: str = "prompt",
        reward_fn_key: str = "data_source",
        default_source: str | None = None,
        filter_overlong_prompts: bool = False,
        truncation: str = "error",
        max_samples: int = -1,
        shuffle: bool = False,
        seed: int = 0,
        chat_template: str | None = None,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check_truncation(truncation)
        self.prompt_key = prompt_key
        self.reward_fn_key = reward_fn_key
        self.default_source = default_source
        self.rows = self._load(data_files)
        self.indices = select_samples(len(self.rows), max_samples, shuffle=shuffle, seed=seed)
        self.dropped_indices = np.empty(0, dtype=np.int64)
        self.sources: set[str] = set()
        self.without_truth: dict[str, int] = {}
        """By data source, the first row that has no reward_model.ground_truth."""
        self._seen_ids: dict[tuple[Any, ...], int] = {}
        self.tokens = self._tokenise(ChatEncoder(tokenizer, chat_template, apply_chat_template_kwargs))
        del self._seen_ids
        if filter_overlong_prompts:
            self._drop_overlong(max_prompt_length)
        else:
            self._truncate(max_prompt_length, truncation)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> dict[str, Any]:
        if not 0 <= position < len(self):
            raise IndexError(f"row {position} of {len(self)}")
        index = self.indices[position]
        row = self.rows.read(np.array([index]))[0]
        item = {name: value for name, value in row.items() if name not in RESERVED and name != self.prompt_key}
        item["input_ids"] = self.tokens[position]
        item["raw_prompt"] = self._prompt(row, int(index))
        item["data_source"] = item[self.reward_fn_key] = self._source(row)
        item["reward_model"] = row.get("reward_model") or {}
        item["extra_info"] = row.get("extra_info") or {}
        item["index"] = int(index)
        return item

    def _load(self, data_files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Rows:
        return load_rows(data_files)

    def _tokenise(self, encoder: ChatEncoder) -> RaggedTokens:
        chunks = []
        with progress_bar("tokenising prompts", len(self)) as advance:
            for start in range(0, len(self), CHUNK_ROWS):
                indices = self.indices[start : start + CHUNK_ROWS]
                prompts = [self._check(row, int(index)) for index, row in zip(indices, self.rows.read(indices))]
                ids = encoder.encode_prompts(prompts, lambda i, at=indices: self.rows.where(int(at[i])))  # type: ignore[misc]
                chunks.append(RaggedTokens.from_rows(ids))
                advance(len(indices))
        tokens = RaggedTokens.concat(chunks)
        if (empty := np.flatnonzero(tokens.lengths == 0)).size:
            where = self.rows.where(int(self.indices[empty[0]]))
            raise DataError(f"{where}: the prompt has no tokens", "remove the row, or give it a prompt")
        return tokens

    def _check(self, row: Row, index: int) -> Prompt:
        """The row's prompt, after a look at every field the system relies on."""
        where = self.rows.where(index)
        source = self._source(row)
        if not isinstance(source, str) or not source:
            raise DataError(
                _missing(where, self.reward_fn_key, source, row),
                f"name each row's task in a column {self.reward_fn_key!r}, or set data.reward_fn_key to another one",
            )
        for name in ("reward_model", "extra_info"):
            if not isinstance(row.get(name), (dict, type(None))):
                raise DataError(
                    f"{where}: {name!r} must be an object, found {row[name]!r}", "see docs/data.md for the row format"
                )
        self.sources.add(str(source))
        if (row.get("reward_model") or {}).get("ground_truth") is None:
            self.without_truth.setdefault(str(source), index)
        self._check_unique(row, source, index)
        return self._prompt(row, index)

    def _source(self, row: Row) -> Any:
        source = row.get(self.reward_fn_key)
        return self.default_source if source is None and self.default_source else source

    def _prompt(self, row: Row, index: int) -> Prompt:
        where, prompt = self.rows.where(index), row.get(self.prompt_key)
        if prompt is None:
            raise DataError(
                _missing(where, self.prompt_key, prompt, row), "set data.prompt_key to the column with the prompts"
            )
        return prompt if isinstance(prompt, str) else check_messages(prompt, f"{where}, column {self.prompt_key!r}")

    def _check_unique(self, row: Row, source: str, index: int) -> None:
        extra = row.get("extra_info") or {}
        if extra.get("index") is None:
            return
        identity = (source, str(extra.get("split")), str(extra["index"]))
        first = self._seen_ids.setdefault(identity, index)
        if first != index:
            raise DataError(
                f"two rows have the same data source {identity[0]!r}, split {identity[1]!r} and "
                f"extra_info.index {identity[2]!r}: {self.rows.where(first)} and {self.rows.where(index)}",
                "list each file once and make extra_info.index unique, or leave it out",
            )

    def _drop_overlong(self, limit: int) -> None:
        fits = self.tokens.lengths <= limit
        self.dropped_indices = self.indices[~fits]
        if not len(self.dropped_indices):
            return
        if not fits.any():
            raise DataError(
                f"filter_overlong_prompts dropped all {len(self)} rows: the shortest prompt has "
                f"{self.tokens.lengths.min()} tokens, data.max_prompt_length is {limit}",
                "raise data.max_prompt_length",
            )
        shown = "; ".join(self.rows.where(int(index)) for index in self.dropped_indices[:10])
        more = len(self.dropped_indices) - 10
        logger.warning(
            "filter_overlong_prompts dropped %d of %d rows with more than %d prompt tokens: %s%s",
            len(self.dropped_indices), len(self), limit, shown, f"; and {more} more" if more > 0 else "",
        )  # fmt: skip
        self.tokens, self.indices = self.tokens.select(np.flatnonzero(fits)), self.indices[fits]

    def _truncate(self, limit: int, mode: str) -> None:
        lengths = self.tokens.lengths
        overlong = np.flatnonzero(lengths > limit)
        if not len(overlong):
            return
        if mode == "error":
            raise DataError(
                f"{self.rows.where(int(self.indices[overlong[0]]))}: the prompt has {lengths[overlong[0]]} tokens, "
                f"data.max_prompt_length is {limit} ({len(overlong)} of {len(self)} rows are over it)",
                f"raise data.max_prompt_length (the longest needs {lengths.max()}), set "
                "data.filter_overlong_prompts=True, or data.truncation to left, right or middle",
            )
        logger.warning(
            "truncated %d of %d prompts to %d tokens (data.truncation=%s)", len(overlong), len(self), limit, mode
        )
        self.tokens = RaggedTokens.from_rows(row[kept_tokens(len(row), limit, mode)] for row in self.tokens)


def _missing(where: str, column: str, value: Any, row: Row) -> str:
    if column not in row:
        return f"{where}: there is no column {column!r}; the columns are {', '.join(map(repr, row))}"
    return f"{where}: column {column!r} holds {value!r}"
