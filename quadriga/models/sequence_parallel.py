"""A stream of packed tokens split over s ranks: each computes a part of it, and attention is divided by heads.

The s ranks pack the same rows. Each takes an equal part of the stream through the layers. Around attention they trade: each
gives its tokens' queries, keys and values of all heads, and gets those of all tokens for its share of the heads; afterwards
the other way round. So attention sees whole sequences, shared prompts included, and nothing else needs to know.

A rank tells log-probs and values of its own part; `whole` puts the parts together without a gradient for the others', so
that every rank can compute the loss of whole rows, and the gradients of all ranks add up to that of the rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quadriga.models.layout import SequenceLayout
from quadriga.models.packing import PackedRows

_GROUPS: dict[Any, Any] = {}
"""Process groups by (the group of all, s): all engines of a process share them."""


class SequenceParallel:
    """The s ranks, neighbours, that share their sequences with this one.

    Attributes:
        size: s.
        rank: this rank's number among them.
    """

    def __init__(self, size: int) -> None:
        world, own = dist.get_world_size(), dist.get_rank()
        self.size, self.rank = size, own % size
        everyone = dist.group.WORLD
        if (everyone, size) not in _GROUPS:
            ranks = [list(range(start, start + size)) for start in range(0, world, size)]
            # All ranks make all groups, in the same order; each keeps its own.
            groups = [dist.new_group(members, timeout=_timeout()) for members in ranks]
            _GROUPS[everyone, size] = groups[own // size]
        self.group = _GROUPS[everyone, size]

    # ---- rows and tokens ---------------------------------------------------------------------------------------------

    def rows_of_all(self, columns: dict[str, Tensor], device: torch.device) -> tuple[dict[str, Tensor], slice]:
        """The rows of the ranks that share, in their order and on the host, and which of them are this rank's own.

        Ranks may have different numbers of rows, with the same columns of the same widths.
        """
        own = len(next(iter(columns.values())))
        counts = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(self.size)]
        dist.all_gather(counts, torch.tensor([own], device=device), group=self.group)
        rows = [int(count) for count in counts]
        most = max(rows)
        whole = {}
        for name, column in columns.items():
            sent = column.to(device).contiguous()
            if own < most:
                sent = torch.cat([sent, sent.new_zeros(most - own, *sent.shape[1:])])
            parts = [torch.empty_like(sent) for _ in range(self.size)]
            dist.all_gather(parts, sent, group=self.group)
            whole[name] = torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)]).cpu()
        before = sum(rows[: self.rank])
        return whole, slice(before, before + own)

    def part(self, packed: PackedRows) -> PackedRows:
        """This rank's part of the stream: its tokens, the response tokens predicted from them, and the layout of the whole.

        The stream is filled up to a multiple of s with a segment that nobody else sees.
        """
        length = packed.input_ids.shape[1]
        missing = -length % self.size
        ids, positions = packed.input_ids, packed.position_ids
        lengths, prefixes = packed.layout.lengths, packed.layout.prefixes
        if missing:
            ids = torch.cat([ids, ids.new_zeros(1, missing)], 1)
            positions = torch.cat([positions, torch.arange(missing).unsqueeze(0)], 1)
            lengths, prefixes = (*lengths, missing), (*prefixes, -1)
        layout = SequenceLayout.of(lengths, prefixes)
        layout.parallel = self
        share = (length + missing) // self.size
        start, end = self.rank * share, (self.rank + 1) * share
        own = ((packed.predictors >= start) & (packed.predictors < end)).nonzero().squeeze(-1)
        last = ((packed.last_tokens >= start) & (packed.last_tokens < end)).nonzero().squeeze(-1)
        return replace(
            packed,
            input_ids=ids[:, start:end],
            filler=min(share, max(0, end - length)),
            position_ids=positions[:, start:end],
            layout=layout,
            predictors=packed.predictors[own] - start,
            targets=packed.targets[own],
            cells=packed.cells[own],
            last_tokens=packed.last_tokens[last] - start,
            nonempty_rows=packed.nonempty_rows[last],
        )

    def whole(self, values: Tensor) -> Tensor:
        """Rows of values, 0 where a token is not of this rank's part → the same with those of all parts, on every rank.

        The gradient goes to this rank's own alone.
        """
        others = self.add_up(values.detach().clone())
        return values + (others - values.detach())  # exact: one of the two is 0 everywhere

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over the ranks that share, in place; without a gradient."""
        dist.all_reduce(values, group=self.group)
        return values

    # ---- attention ---------------------------------------------------------------------------------------------------

    def by_heads(self, tokens: Tensor) -> Tensor:
        """`[T / s, heads, D]` of this rank's tokens → `[T, heads / s, D]`: all tokens, this rank's heads.

        Fewer heads than ranks (of keys and values) are repeated first.
        """
        if tokens.shape[1] < self.size:
            tokens = tokens.repeat_interleave(self.size // tokens.shape[1], dim=1)
        by_rank = tokens.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
        return _Trade.apply(by_rank, self.group).flatten(0, 1)

    def by_tokens(self, heads: Tensor) -> Tensor:
        """The inverse: `[T, heads / s, D]` → `[T / s, heads, D]`."""
        by_rank = heads.unflatten(0, (self.size, -1)).contiguous()
        return _Trade.apply(by_rank, self.group).transpose(0, 1).flatten(1, 2)


class _Trade(torch.autograd.Function):
    """`x[s, …]`: the r-th piece goes to rank r, and the r-th of the result comes from it. The gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        traded = torch.empty_like(x)
        dist.all_to_all_single(traded, x, group=group)
        return traded

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        traded = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(traded, gradient.contiguous(), group=ctx.group)
        return traded, None


def _timeout() -> Any:
    """That of the group of all ranks; gloo is part of it on every device."""
    everyone = dist.group.WORLD
    assert everyone is not None
    return everyone._get_backend(torch.device("cpu")).options._timeout
