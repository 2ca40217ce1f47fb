"""Between rows of a batch and the rollout engine: rows become requests, completions become rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from quadriga.protocol import DataProto
from quadriga.rollout.interface import Completion, Request
from quadriga.rollout.sampling import SamplingParams

REPEAT_SHIFT = 40
"""A row that a sampler draws twice into one batch ("epoch:index#k") gets its own random numbers through these bits."""


class FinishedSample(NamedTuple):
    """A sample on its way to the driver, while others are still being generated."""

    uid: str
    sample_index: int
    token_ids: np.ndarray
    """`[R]` int32"""
    log_probs: np.ndarray
    """`[R]` float32, of the distribution that was sampled from; `[0]` where they are not needed."""
    full_log_probs: np.ndarray
    """`[R]` float32, of softmax(logits / temperature); `[0]` where they are not needed."""
    finish_reason: str
    version: int

    @classmethod
    def of(cls, done: Completion, with_log_probs: bool) -> FinishedSample:
        """With log-probs it has all that a row is made of; without them, what scoring needs."""
        both = (done.log_probs, done.full_log_probs) if with_log_probs else ([], [])
        log_probs, full = (np.array(values, np.float32) for values in both)
        ids = np.array(done.token_ids, np.int32)
        return cls(done.request_id, done.sample_index, ids, log_probs, full, done.finish_reason, done.version)

    def as_completion(self) -> Completion:
        ids, log_probs, full = (v.tolist() for v in (self.token_ids, self.log_probs, self.full_log_probs))
        return Completion(self.uid, (0, 0), self.sample_index, ids, log_probs, full, self.finish_reason, self.version)


def requests_of(
    prompts: DataProto, params: SamplingParams, step: int, done: Collection[tuple[str, int]] = ()
) -> list[Request]:
    """One request per prompt; its samples are the rows that carry the same uid, less those (uid, sample) that are `done`.

    `prompts` has `input_ids`, `attention_mask` `[B, P]` (padded left) and the columns uid, epoch, index, sample_index.
    """
    columns = prompts.non_tensor_batch
    ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"].bool()
    samples: dict[str, list[int]] = {}
    first_row: dict[str, int] = {}
    for row, uid in enumerate(columns["uid"]):
        sample = int(columns["sample_index"][row])
        if (uid, sample) not in done:
            first_row.setdefault(uid, row)
            samples.setdefault(uid, []).append(sample)
    return [
        Request(
            request_id=uid,
            prompt_ids=ids[row][mask[row]].tolist(),
            params=params,
            uid=_random_key(uid, int(columns["epoch"][row]), int(columns["index"][row])),
            sample_indices=tuple(samples[uid]),
            step=step,
        )
        for uid, row in first_row.items()
    ]


def rows_of(
    prompts: DataProto, completions: Iterable[Completion], width: int | None, pad_token_id: int, truncated: bool
) -> DataProto:
    """The completions as rows in the order of `prompts`, padded right to `width` (None: the longest).

    Tensors: prompts `[B, P]`, responses, response_mask, rollout_log_probs `[B, R]`, and input_ids, attention_mask,
    position_ids `[B, P+R]`, and the lengths num_tokens and response_lengths `[B]`. With `truncated` sampling also
    rollout_sampled_log_probs, of the distribution in use.
    """
    by_key = {(c.request_id, c.sample_index): c for c in completions}
    columns = prompts.non_tensor_batch
    keys = zip(columns["uid"], columns["sample_index"])
    ordered = [by_key[uid, int(sample_index)] for uid, sample_index in keys]
    width = width or longest(ordered)
    lengths = torch.tensor([len(c.token_ids) for c in ordered])
    response_mask = (torch.arange(width) < lengths[:, None]).long()
    responses = _filled([c.token_ids for c in ordered], response_mask, pad_token_id, torch.long)
    attention_mask = torch.cat([prompts.batch["attention_mask"], response_mask], dim=1)
    tensors = {
        "prompts": prompts.batch["input_ids"],
        "responses": responses,
        "response_mask": response_mask,
        "input_ids": torch.cat([prompts.batch["input_ids"], responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "num_tokens": attention_mask.sum(1),
        "response_lengths": lengths,
        "rollout_log_probs": _filled([c.full_log_probs for c in ordered], response_mask, 0.0, torch.float32),
    }
    if truncated:
        sampled = [c.log_probs for c in ordered]
        tensors["rollout_sampled_log_probs"] = _filled(sampled, response_mask, 0.0, torch.float32)
    return DataProto.from_dict(tensors=tensors)


def longest(completions: Sequence[Completion]) -> int:
    return max((len(c.token_ids) for c in completions), default=1) or 1


def _random_key(uid: str, epoch: int, index: int) -> tuple[int, int]:
    repeat = int(uid.rpartition("#")[2]) if "#" in uid else 0
    return epoch & 0xFFFFFFFF, index + (repeat << REPEAT_SHIFT)


def _filled(values: list[list[Any]], mask: torch.Tensor, padding: Any, dtype: torch.dtype) -> torch.Tensor:
    flat = [v for row in values for v in row]
    full = torch.full(mask.shape, padding, dtype=dtype)
    full[mask.bool()] = torch.tensor(flat, dtype=dtype)
    return full
