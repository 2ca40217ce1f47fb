"""Scores of a generation's rows: a sample is scored as soon as it is finished, while others are still being generated."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from quadriga.controller.remote_batch import RemoteBatch, in_parts
from quadriga.protocol import DataProto
from quadriga.rewards.managers import BaseRewardManager
from quadriga.rewards.result import RewardResult
from quadriga.workers.rollout_rows import FinishedSample


class SampleScores:
    """What a reward manager says of the rows of one generation.

    Managers that score one sample at a time are given samples early; others see the whole batch at the end.

    Args:
        manager: a reward manager.
        rows: the rows that are generated, in order, with the columns that the reward function is given.
    """

    def __init__(self, manager: Any, rows: DataProto | RemoteBatch) -> None:
        self.manager, self.rows = manager, rows
        keys = zip(rows.non_tensor_batch["uid"], rows.non_tensor_batch["sample_index"])
        self._row_of = {(uid, int(sample)): row for row, (uid, sample) in enumerate(keys)}
        self._handles: dict[int, Future[RewardResult]] = {}

    @property
    def pending(self) -> list[str]:
        """The samples that have not been heard of, as `uid/sample`."""
        return [f"{uid}/{sample}" for (uid, sample), row in self._row_of.items() if row not in self._handles]

    def add(self, finished: Iterable[FinishedSample]) -> None:
        """Have samples scored, each once."""
        new = {self._row_of[sample.uid, sample.sample_index]: sample.token_ids for sample in finished}
        new = {row: ids.tolist() for row, ids in new.items() if row not in self._handles}
        samples = self.manager.samples_of(self.rows, list(new), list(new.values()))
        self._handles.update(zip(new, self.manager.pool.submit(samples)))

    def told(self, batch: DataProto | RemoteBatch) -> dict[str, Any]:
        """The manager's answer (`return_dict`) for the generated rows; waits for scores that are still out.

        The scores are in `row_scores` `[B]` if the manager puts them on the last tokens, as managers do that score one
        sample at a time; else in `reward_tensor` `[B, R]`.
        """
        if not can_stream(self.manager):
            return self.manager(fetched(batch), return_dict=True)
        missing = [row for row in range(len(batch)) if row not in self._handles]
        if missing:
            rows = iter(missing)
            for part in in_parts(batch[missing], ("prompts", "responses", "attention_mask")):
                handles = self.manager.pool.submit(self.manager.samples(part))
                self._handles.update((row, handle) for handle, row in zip(handles, rows))
        results = self.manager.pool.collect([self._handles[row] for row in range(len(batch))])
        if type(self.manager).assemble is BaseRewardManager.assemble and self.manager.num_examine <= 0:
            return self.manager.by_row(results, batch.batch["response_lengths"])
        return self.manager.assemble(fetched(batch), results, return_dict=True)


def fetched(batch: DataProto | RemoteBatch) -> DataProto:
    return batch.fetch() if isinstance(batch, RemoteBatch) else batch


def can_stream(manager: Any) -> bool:
    """Whether a sample's score does not depend on the batch it is in, nor on a subclass's own way through it."""
    return (
        isinstance(manager, BaseRewardManager)
        and type(manager).__call__ is BaseRewardManager.__call__
        and type(manager).samples is BaseRewardManager.samples
        and not manager.pool.function.batched
    )
