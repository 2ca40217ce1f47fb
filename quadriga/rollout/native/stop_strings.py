"""Whether a sample's text ends with something it should stop at."""

from __future__ import annotations

from typing import Any

from quadriga.rollout.native.sequence import Sequence
from quadriga.rollout.native.slots import SlotTable

_MARGIN = 8
"""Tokens decoded beyond the length of the text looked for: room for tokens of no text, and parts of characters."""


class StopStrings:
    """Looks for stop strings in the last few tokens of a sample, every time it gets one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def ends(self, sequence: Sequence, table: SlotTable) -> bool:
        """Whether a stop string is in the text, once the sample has its min_new_tokens."""
        params, count = sequence.request.params, int(table.count[sequence.slot])
        if count < params.min_new_tokens:
            return False
        reach = max(len(text.encode()) for text in params.stop_strings) + _MARGIN
        tail = table.tokens[sequence.slot, max(0, count - reach) : count].tolist()
        text = self.tokenizer.decode(tail, skip_special_tokens=False)
        return any(stop in text for stop in params.stop_strings)
