"""How the rows of a mini-batch become micro-batches, and how a mini-batch is dealt out to ranks.

The result of a step does not depend on any of this (losses are normalised by global counts); its speed and memory do.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from quadriga.errors import DataError


def plan_micro_batches(
    lengths: Sequence[int], max_tokens: int, max_rows: int | None = None, at_least: int = 1
) -> list[list[int]]:
    """Row numbers of each micro-batch: at most `max_tokens` tokens and `max_rows` rows, a long row alone if need be.

    Rows are sorted by length, so that a micro-batch holds rows of similar length (attention does runs of equal lengths
    in one call), then cut into consecutive parts of about equal tokens. There are as few parts as the budget allows but
    not fewer than `at_least`, which is how ranks agree on a common number; with fewer rows than that some are empty.
    The longest come first: if memory does not suffice, that shows at once.
    """
    if max_tokens < 1 or (max_rows is not None and max_rows < 1):
        raise DataError(
            f"a micro-batch of at most {max_tokens} tokens and {max_rows} rows can hold nothing", "raise the budget"
        )
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    total, longest = sum(lengths), max(lengths, default=0)
    budget = max(max_tokens, longest)
    count = max(at_least, -(-total // budget))
    # An even share per part, raised until the cut needs no more than `count` parts or the budget is reached.
    while True:
        share = min(budget, max(longest, -(-total // count)))
        while True:
            parts = _cut(order, lengths, share, max_rows)
            if len(parts) <= count or share >= budget:
                break
            share = min(budget, share + max(1, share // 64))
        if len(parts) <= count:
            break
        count = len(parts)
    while len(parts) < count:
        parts = _split_largest(parts, lengths)
    return parts


def _cut(order: list[int], lengths: Sequence[int], max_tokens: int, max_rows: int | None) -> list[list[int]]:
    parts: list[list[int]] = []
    room, seats = 0, 0
    for row in order:
        if not parts or lengths[row] > room or seats == 0:
            parts.append([])
            room, seats = max_tokens, max_rows or len(order)
        parts[-1].append(row)
        room, seats = room - lengths[row], seats - 1
    return parts


def _split_largest(parts: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """One part more: the one with the most rows cut in two, or an empty one where none can be cut."""
    at = max(range(len(parts)), key=lambda i: (len(parts[i]), sum(lengths[r] for r in parts[i])), default=None)
    if at is None or len(parts[at]) < 2:
        return [*parts, []]
    middle = len(parts[at]) // 2
    return [*parts[:at], parts[at][:middle], parts[at][middle:], *parts[at + 1 :]]


def balance_over_ranks(lengths: Sequence[int], num_ranks: int, mini_batch_rows: int | None = None) -> list[int]:
    """An order of the rows in which equal consecutive shares, one a rank, have about equal numbers of tokens.

    Rank r gets rows `[r·n/ranks, (r+1)·n/ranks)` of the result and cuts them into consecutive mini-batches. Mini-batch k
    (rows `[k·m, (k+1)·m)` of the input) stays mini-batch k: it is dealt out over the ranks, longest rows first, each to
    the rank with the fewest tokens so far that has room.
    """
    rows = len(lengths)
    size = rows if mini_batch_rows is None else mini_batch_rows
    if size < 1 or rows % size or size % num_ranks:
        raise DataError(
            f"{rows} rows in mini-batches of {size} cannot be dealt out evenly to {num_ranks} ranks",
            f"make the rows a multiple of the mini-batch, and the mini-batch a multiple of {num_ranks}",
        )
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for start in range(0, rows, size):
        for share, dealt in zip(shares, _deal(range(start, start + size), lengths, num_ranks), strict=True):
            share.extend(dealt)
    return [row for share in shares for row in share]


def _deal(rows: range, lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0, rank) for rank in range(num_ranks)]
    for row in sorted(rows, key=lambda r: (-lengths[r], r)):
        tokens, rank = heapq.heappop(heap)
        hands[rank].append(row)
        if len(hands[rank]) < len(rows) // num_ranks:
            heapq.heappush(heap, (tokens + lengths[row], rank))
    return [sorted(hand) for hand in hands]
