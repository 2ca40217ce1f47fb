"""Where the sequences of a packed stream of tokens lie, and who sees whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor` on `device`, without waiting for it: a GPU reads from pinned memory while the host goes on."""
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class Run:
    """Neighbouring segments of equal shape, which one batched call can do.

    Attributes:
        count: segments.
        length: tokens of each.
        prefix_length: tokens before each, from another place in the stream; 0: none.
        blocks: `(start, how many)` of the region of the stream with the prefixes, each `prefix_length` tokens long.
        block_of: for each segment the number of its prefix in that region.
    """

    count: int
    length: int
    prefix_length: int = 0
    blocks: tuple[int, int] = (0, 0)
    block_of: tuple[int, ...] = ()


class SequenceLayout:
    """The segments of a stream of tokens. A token sees the earlier ones of its segment, and all of its prefix.

    Not a dataclass: FSDP makes a new one of every dataclass that it hands to a layer, and what is kept here for all
    layers would be computed again by each.

    Args:
        lengths: tokens of each segment, all ≥ 1, on the host.
        prefixes: the number of the segment that precedes each, −1 for none. A prefix has no prefix itself.
        cu_seqlens: `[segments + 1]` int32 on the device, 0 first: segment i is `[cu_seqlens[i], cu_seqlens[i+1])`.
    """

    def __init__(self, lengths: tuple[int, ...], prefixes: tuple[int, ...], cu_seqlens: Tensor) -> None:
        self.lengths, self.prefixes, self.cu_seqlens = lengths, prefixes, cu_seqlens
        self._masks: dict[tuple, Tensor] = {}
        self.kept: dict[str, Any] = {}
        """What a layer's attention has made of this layout and all others need too."""
        self.parallel: Any = None
        """The `SequenceParallel` of a stream of which this rank holds a part; None: it holds all."""

    @classmethod
    def of(cls, lengths: Sequence[int], prefixes: Sequence[int] | None = None) -> SequenceLayout:
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(tuple(lengths), tuple(prefixes or [-1] * len(lengths)), bounds)

    def to(self, device: torch.device | str) -> SequenceLayout:
        moved = SequenceLayout(self.lengths, self.prefixes, to_device(self.cu_seqlens, device))
        moved.parallel = self.parallel
        # Made on the host, before the device has to wait for them.
        if self.shares and torch.device(device).type == "cuda":
            moved.__dict__["context_tokens"] = to_device(self.context_tokens, device)
        return moved

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.lengths))[:-1]

    @cached_property
    def max_length(self) -> int:
        return max(self.lengths)

    @cached_property
    def shares(self) -> bool:
        """Whether any segment has a prefix."""
        return any(prefix >= 0 for prefix in self.prefixes)

    @cached_property
    def max_context(self) -> int:
        """Most tokens that a segment and its prefix have together."""
        return max(self.contexts)

    @cached_property
    def contexts(self) -> tuple[int, ...]:
        """Tokens that each segment and its prefix have together."""
        return tuple(length + self._prefix_length(i) for i, length in enumerate(self.lengths))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The segments as runs of equal shape, in order: one batched call does a run, and nothing is padded for it."""
        shapes = [(length, self._prefix_length(i)) for i, length in enumerate(self.lengths)]
        runs, at = [], 0
        for (length, prefix_length), same in groupby(shapes):
            count = len(list(same))
            runs.append(Run(count, length) if prefix_length == 0 else self._prefixed_run(at, count))
            at += count
        return tuple(runs)

    def mask(self, length: int, prefix: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """`[length, prefix + length]` to add to scores: 0 where the row's token sees the column's, else −inf.

        Kept as long as the layout: all layers of a model ask for the same ones.
        """
        key = (length, prefix, window, dtype)
        if key not in self._masks:
            device = self.cu_seqlens.device
            visible = torch.ones(length, prefix + length, dtype=torch.bool, device=device).tril(prefix)
            if window is not None:
                visible = visible.triu(prefix + 1 - window)
            hidden = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
            self._masks[key] = hidden
        return self._masks[key]

    def _prefixed_run(self, first: int, count: int) -> Run:
        """A run whose prefixes lie, with others of the same length perhaps, in one region of the stream."""
        prefixes = self.prefixes[first : first + count]
        low, high = min(prefixes), max(prefixes)
        length = self.lengths[low]
        # `packing` sorts segments so that it is so; then the prefixes are a view of the stream and not copies of tokens.
        if any(self.lengths[i] != length for i in range(low, high + 1)):
            raise ValueError("prefixes of equal length must be neighbours")
        return Run(
            count,
            self.lengths[first],
            length,
            (self.starts[low], high - low + 1),
            tuple(prefix - low for prefix in prefixes),
        )

    def _prefix_length(self, segment: int) -> int:
        prefix = self.prefixes[segment]
        return 0 if prefix < 0 else self.lengths[prefix]

    @cached_property
    def context_tokens(self) -> Tensor:
        """`[tokens of all contexts]` index in the stream: each segment's prefix, then the segment. On the device."""
        starts, lengths, prefixes = (torch.tensor(x) for x in (self.starts, self.lengths, self.prefixes))
        # Two pieces for each segment, its prefix (maybe of length 0) and itself: where each begins, and how long it is.
        begins = torch.stack([starts[prefixes.clamp(min=0)], starts], 1).flatten()
        counts = torch.stack([lengths[prefixes.clamp(min=0)] * (prefixes >= 0), lengths], 1).flatten()
        shifts = begins - (counts.cumsum(0) - counts)
        tokens = torch.arange(int(counts.sum())) + shifts.repeat_interleave(counts)
        return tokens.to(self.cu_seqlens.device)
