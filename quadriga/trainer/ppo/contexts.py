"""Episodes of several contexts in a batch: each context is a row that is trained on, and all of them together are one episode.

An agent that rewrites its context, or asks the policy beside it, leaves an episode with more than one row. The batch is scored with
one row an episode, its last context; then `with_all_contexts` puts the others before it. What judges episodes (advantages, figures)
sees *lines*: the contexts of an episode one after the other, so that its score counts once, credit goes back from its last token to
its first, and every token gets its share.

Columns of such a batch: `episode` `[B]`, which sample of the step a row belongs to, -1 for rows that only fill up a mini-batch; and
`context`, which context of it, from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from quadriga.agents.episode import Episode, EpisodeRow, unanswered
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.trainer.ppo.groups import Group, padded_left, token_columns

CONTEXT_COLUMNS = ("episode", "num_tokens", "response_lengths")
"""What `by_episode` needs to know."""
FILLING = -1


def further_contexts(groups: Sequence[Group]) -> list[list[EpisodeRow]]:
    """Of each sample that is trained on, the contexts before its last one."""
    samples = [sample for group in groups for sample in group.written[: group.n]]
    return [list(sample.rows[:-1]) if isinstance(sample, Episode) else [] for sample in samples]


def with_all_contexts(
    batch: DataProto,
    further: Sequence[Sequence[EpisodeRow]],
    pad_token_id: int,
    leave: Callable[[DataProto], DataProto],
    parts: int,
    divisor: int,
) -> DataProto:
    """A scored batch of one row a sample, with the `further_contexts` of each before it. They have its score, and their own turns'
    rewards.

    Args:
        leave: puts wide columns where those of the batch are.
        parts: mini-batches are made of so many equal parts of the batch: what is in one stays in it.
        divisor: of the rows of each part. Rows without anything written fill up what is missing.
    """
    count = len(batch)
    rows = [row for own in further for row in own]
    owners = np.repeat(np.arange(count), [len(own) for own in further])
    first = count + np.cumsum(
        [0, *map(len, further)]
    )  # of each sample's further rows, where they stand behind the batch
    in_parts = [
        [place for k in samples for place in (*range(first[k], first[k + 1]), k)]
        for samples in np.array_split(np.arange(count), parts)
    ]
    size = -(-max(map(len, in_parts)) // divisor) * divisor
    filling = first[-1]
    for part in in_parts:
        missing = size - len(part)
        part += range(filling, filling + missing)
        filling += missing
    fills = filling - first[-1]
    added = batch[np.concatenate([owners, np.zeros(fills, int)])]
    added.put_columns(leave(_columns([*rows, *[unanswered([pad_token_id])] * fills], batch, pad_token_id)))
    for table, episodes, contexts in (
        (batch, np.arange(count), [len(own) for own in further]),
        (
            added,
            np.r_[owners, np.full(fills, FILLING)],
            [*(c for own in further for c in range(len(own))), *[0] * fills],
        ),
    ):
        table.put_columns(DataProto.from_dict({"episode": torch.from_numpy(episodes)}))
        table.non_tensor_batch["context"] = object_array(contexts)
    return DataProto.concat([batch, added])[np.concatenate(in_parts)]


def _columns(rows: Sequence[EpisodeRow], batch: DataProto, pad_token_id: int) -> DataProto:
    """Those of a batch that are about the tokens of its rows, for other rows."""
    (prompt_width,), (width,) = batch.row_shape("prompts"), batch.row_shape("responses")
    present = set(batch.batch_keys())
    prompts, mask = padded_left([row.prompt_ids for row in rows], prompt_width, pad_token_id)
    tensors = token_columns(
        rows,
        prompts,
        mask,
        width,
        pad_token_id,
        truncated="rollout_sampled_log_probs" in present,
        versions="token_versions" in present,
        turn_rewards="turn_rewards" in present,
    )
    nothing = torch.zeros(len(rows), width)
    tensors["token_level_scores"] = tensors.get("turn_rewards", nothing)
    tensors |= {name: nothing for name in ("rm_scores", "reward_tensor") if name in present}
    return DataProto.from_dict(tensors)


def one_row_each(batch: DataProto) -> DataProto:
    """The last context of each episode alone."""
    if "episode" not in batch.batch_keys():
        return batch
    episodes = batch.batch["episode"]
    ends = torch.cat([episodes[1:] != episodes[:-1], torch.ones(1, dtype=torch.bool)])
    return batch[(episodes >= 0) & ends]


def without_filling(batch: DataProto) -> DataProto:
    """The rows that belong to an episode."""
    return batch[batch.batch["episode"] >= 0] if "episode" in batch.batch_keys() else batch


def by_episode(function: Callable[..., Any]) -> Callable[..., Any]:
    """Has `function(rows, …)`, which returns columns and figures, see lines where the rows are contexts of episodes."""

    @wraps(function)
    def on_lines(rows: DataProto, *args: Any, **kwargs: Any) -> Any:
        if "episode" not in rows.batch.keys():  # noqa: SIM118 (a TensorDict is no dict)
            return function(rows, *args, **kwargs)
        lines = Lines(rows)
        columns, figures = function(lines.table, *args, **kwargs)
        if "perf/total_num_tokens" in figures:
            figures["perf/total_num_tokens"] = float(rows.batch["num_tokens"][lines.kept].sum())
        return {name: lines.taken_apart(column) for name, column in columns.items()}, figures

    return on_lines


class Lines:
    """The episodes of a batch `[B]` as one row each: `[E, L]`, what stands after the prompts of its contexts one after the other.

    Attributes:
        table: these rows. Its prompts are those of the first contexts; numbers of rows are those of the last.
        kept: the rows of the batch that are no filling.
    """

    def __init__(self, rows: DataProto) -> None:
        tensors = rows.batch
        self.kept = (tensors["episode"] >= 0).nonzero().squeeze(-1)
        _, self._line = tensors["episode"][self.kept].unique_consecutive(return_inverse=True)
        lengths = tensors["response_lengths"][self.kept]
        self._shape = (len(tensors["episode"]), rows.row_shape("response_mask")[0])
        count = int(self._line.max()) + 1
        ends = lengths.cumsum(0)
        first = torch.searchsorted(self._line, torch.arange(count))
        last = torch.searchsorted(self._line, torch.arange(count), right=True) - 1
        totals = torch.zeros(count, dtype=lengths.dtype).index_add_(0, self._line, lengths)
        begins = ends - lengths - (ends - lengths)[first][self._line]  # of each context in its line
        self._width = max(1, int(totals.max()))
        self._there = torch.arange(self._shape[1]) < lengths[:, None]
        self._places = (begins[:, None] + torch.arange(self._shape[1]))[self._there]
        self._lines = self._line[:, None].expand_as(self._there)[self._there]
        columns = {name: self._column(name, tensors[name][self.kept], first, last) for name in tensors.keys()}  # noqa: SIM118
        columns["response_lengths"] = totals
        labels = {name: column[self.kept[last].numpy()] for name, column in rows.non_tensor_batch.items()}
        self.table = DataProto(TensorDict(columns, batch_size=[count]), labels, rows.meta_info)

    def _column(self, name: str, values: Tensor, first: Tensor, last: Tensor) -> Tensor:
        if name == "attention_mask":
            prompt = values[first, : values.shape[1] - self._shape[1]]
            return torch.cat([prompt, self.joined(values[:, -self._shape[1] :])], dim=1)
        return self.joined(values) if values.shape[1:2] == self._shape[1:] else values[last]

    def joined(self, values: Tensor) -> Tensor:
        """`[kept, R, …]` as `[E, L, …]`."""
        line = values.new_zeros(int(self._line.max()) + 1, self._width, *values.shape[2:])
        line[self._lines, self._places] = values[self._there]
        return line

    def taken_apart(self, line: Tensor) -> Tensor:
        """`[E, L]` as `[B, R]`; 0 where no token is."""
        values = line.new_zeros(self._shape)
        own = values[self.kept]
        own[self._there] = line[self._lines, self._places]
        values[self.kept] = own
        return values
