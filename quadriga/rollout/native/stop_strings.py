"""Whether a sample's text ends with something it should stop at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.native.sequence import Sequence as Sample
from quadriga.rollout.native.slots import SlotTable

_MARGIN = 8
"""Tokens decoded beyond the length of the text looked for: room for tokens of no text, and parts of characters."""


class StopStrings:
    """Looks for stop strings in the last few tokens of a sample, every time it gets one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def ends(self, sequence: Sample, table: SlotTable) -> bool:
        """Whether a stop string is in the text, once the sample has its min_new_tokens."""
        params, count = sequence.request.params, int(table.count[sequence.slot])
        if count < params.min_new_tokens:
            return False
        reach = reach_of(params)
        tail = table.tokens[sequence.slot, max(0, count - reach) : count].tolist()
        return _holds(self.tokenizer, params, tail)


def holds_stop_string(tokenizer: Any, params: SamplingParams, tokens: Sequence[int]) -> bool:
    """Whether a stop string is in the text of the last tokens, once there are min_new_tokens."""
    if len(tokens) < params.min_new_tokens:
        return False
    return _holds(tokenizer, params, tokens[-reach_of(params) :])


def reach_of(params: SamplingParams) -> int:
    """Tokens at the end that a new stop string may lie in."""
    return max(len(text.encode()) for text in params.stop_strings) + _MARGIN


def _holds(tokenizer: Any, params: SamplingParams, tail: Sequence[int]) -> bool:
    text = tokenizer.decode(tail, skip_special_tokens=False)
    return any(stop in text for stop in params.stop_strings)
