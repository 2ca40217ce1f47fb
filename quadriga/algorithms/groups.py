"""Statistics within the groups of rows that answer the same prompt."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quadriga.errors import DataError


def group_ids_from_uids(uids: Iterable[Hashable] | Any) -> Tensor:
    """Prompt uids (strings, numbers, tuples; list or 1-D array) → dense int64 ids `[B]`, by first appearance."""
    rows = uids.tolist() if hasattr(uids, "tolist") else list(uids)
    number: dict[Hashable, int] = {}
    try:
        return torch.tensor([number.setdefault(uid, len(number)) for uid in rows], dtype=torch.int64)
    except TypeError as error:
        raise DataError(
            f"Prompt uids must be hashable, one a row ({error}).", "give a 1-D array of strings or integers"
        ) from error


@dataclass(frozen=True)
class PromptGroups:
    """Rows by prompt. Every statistic comes back per row: `x[B]` → `[B]`, the value of the row's own group.

    Attributes:
        index: `[B]`, the dense group number of each row.
        counts: `[G]`, the rows of each group.
    """

    index: Tensor
    counts: Tensor

    @classmethod
    def of(cls, group_ids: Tensor) -> PromptGroups:
        """Groups from arbitrary integers `[B]` that are equal where the prompt is the same."""
        _, index, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
        return cls(index=index, counts=counts)

    @classmethod
    def of_pairs(cls, first: Tensor, second: Tensor) -> PromptGroups:
        """Groups of rows that are equal in both of two columns of integers."""
        _, index, counts = torch.unique(torch.stack([first, second], 1), dim=0, return_inverse=True, return_counts=True)
        return cls(index=index, counts=counts)

    def size(self) -> Tensor:
        return self.counts[self.index]

    def total(self, x: Tensor) -> Tensor:
        """Of numbers `[B]`, or of rows of them `[B, T]`."""
        totals = torch.zeros(len(self.counts), *x.shape[1:], dtype=x.dtype, device=x.device)
        return totals.index_add_(0, self.index, x)[self.index]

    def mean(self, x: Tensor) -> Tensor:
        return self.total(x) / self.size()

    def std(self, x: Tensor) -> Tensor:
        """Unbiased standard deviation; 0 in a group of one."""
        return (self.total((x - self.mean(x)).square()) / (self.size() - 1).clamp(min=1)).sqrt()

    def most(self, x: Tensor) -> Tensor:
        """The largest of the row's group."""
        largest = torch.full((len(self.counts),), -torch.inf, dtype=x.dtype, device=x.device)
        return largest.scatter_reduce(0, self.index, x, "amax")[self.index]

    def lead(self, x: Tensor) -> Tensor:
        """For the best row of each group how far it is ahead of the second best, 0 for all others and alone."""
        by_score = torch.argsort(x, descending=True, stable=True)
        best_first = by_score[torch.argsort(self.index[by_score], stable=True)]
        first = self.counts.cumsum(0) - self.counts
        first = first[self.counts > 1]
        best, second = best_first[first], best_first[first + 1]
        lead = torch.zeros_like(x)
        lead[best] = x[best] - x[second]
        return lead
