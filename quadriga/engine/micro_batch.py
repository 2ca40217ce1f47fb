"""How the rows of a mini-batch become micro-batches.

The result of a step does not depend on any of this (losses are normalised by global counts); its speed and memory do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quadriga.errors import DataError


@dataclass(frozen=True)
class RowSizes:
    """What is known about rows before they are packed.

    Attributes:
        lengths: tokens of each row.
        same_prompt: rows with the same number share their prompt, which then counts once in a micro-batch. None: no
            sharing.
        prompt_lengths: tokens of each row's prompt; needed for sharing only.
        together: so many consecutive rows stay in one micro-batch: 2 for pairs that a loss compares.
    """

    lengths: Sequence[int]
    same_prompt: Sequence[int] | None = None
    prompt_lengths: Sequence[int] = ()
    together: int = 1

    def order(self) -> list[int]:
        """Longest first, rows of a prompt side by side."""
        if self.same_prompt is None:
            return sorted(range(len(self.lengths)), key=lambda row: (-self.lengths[row], row))
        longest: dict[int, int] = {}
        for group, length in zip(self.same_prompt, self.lengths, strict=True):
            longest[group] = max(length, longest.get(group, 0))
        group_of = self.same_prompt
        return sorted(
            range(len(self.lengths)), key=lambda row: (-longest[group_of[row]], group_of[row], -self.lengths[row], row)
        )

    def tokens(self, row: int, after: int | None) -> int:
        """Tokens that `row` adds to a micro-batch in which it comes after the row `after`."""
        if self.same_prompt is None or after is None or self.same_prompt[row] != self.same_prompt[after]:
            return self.lengths[row]
        return self.lengths[row] - self.prompt_lengths[row]

    def units(self) -> list[range]:
        """The rows that stay together, at least one each."""
        return [range(start, start + self.together) for start in range(0, len(self.lengths), self.together)]

    def total(self, rows: Sequence[int]) -> int:
        """Tokens of a micro-batch of these rows, in this order."""
        return sum(self.tokens(row, rows[i - 1] if i else None) for i, row in enumerate(rows))


def plan_micro_batches(
    sizes: RowSizes, max_tokens: int, max_rows: int | None = None, at_least: int = 1
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
    if sizes.together > 1:
        return _plan_units(sizes, max_tokens, max_rows, at_least)
    order = sizes.order()
    total, longest = sizes.total(order), max(sizes.lengths, default=0)
    budget = max(max_tokens, longest)
    count = max(at_least, -(-total // budget), len(_cut(order, sizes, budget, max_rows)))
    # An even share per part, raised until the cut needs no more parts than that.
    share = min(budget, max(longest, -(-total // count)))
    while len(parts := _cut(order, sizes, share, max_rows)) > count:
        share = min(budget, share + max(1, share // 64))
    while len(parts) < count:
        parts = _split_largest(parts)
    return parts


def _plan_units(sizes: RowSizes, max_tokens: int, max_rows: int | None, at_least: int) -> list[list[int]]:
    """`plan_micro_batches` with the rows that stay together as one."""
    units = sizes.units()
    as_rows = RowSizes([sizes.total(unit) for unit in units])
    max_units = None if max_rows is None else max(1, max_rows // sizes.together)
    parts = plan_micro_batches(as_rows, max_tokens, max_units, at_least)
    return [[row for unit in part for row in units[unit]] for part in parts]


def _cut(order: list[int], sizes: RowSizes, max_tokens: int, max_rows: int | None) -> list[list[int]]:
    parts: list[list[int]] = []
    room, seats, after = 0, 0, None
    for row in order:
        if not parts or seats == 0 or sizes.tokens(row, after) > room:
            parts.append([])
            room, seats, after = max_tokens, max_rows or len(order), None
        room, seats = room - sizes.tokens(row, after), seats - 1
        parts[-1].append(row)
        after = row
    return parts


def _split_largest(parts: list[list[int]]) -> list[list[int]]:
    """One part more: the one with the most rows cut in two, or an empty one where none can be cut."""
    at = max(range(len(parts)), key=lambda i: len(parts[i]), default=None)
    if at is None or len(parts[at]) < 2:
        return [*parts, []]
    middle = len(parts[at]) // 2
    return [*parts[:at], parts[at][:middle], parts[at][middle:], *parts[at + 1 :]]
