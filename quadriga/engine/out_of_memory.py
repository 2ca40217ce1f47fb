"""What running out of memory looks like, and the smaller budget to go on with."""

from __future__ import annotations

import gc
import logging

import torch

from quadriga.errors import WorkerError

logger = logging.getLogger(__name__)

_MESSAGES = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MESSAGES)


class TokenBudget:
    """The token budget of micro-batches: what is asked for, or less after it proved too large."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self.halvings = 0

    def of(self, max_tokens: int) -> int:
        return max_tokens if self.limit is None else min(self.limit, max_tokens)

    def halve(self, largest_micro_batch: int, longest_row: int, error: str) -> None:
        """Half of the micro-batch that did not fit. WorkerError when it was a single row."""
        if largest_micro_batch <= longest_row:
            raise WorkerError(
                f"out of memory in a micro-batch that holds a single row of {longest_row} tokens: {error}",
                "shorten data.max_response_length, set model.enable_gradient_checkpointing=True, use "
                "fsdp_config.optimizer_offload, or spread the model over more devices",
            )
        self.limit = max(longest_row, largest_micro_batch // 2)
        self.halvings += 1
        logger.warning(
            "out of memory in a micro-batch of %d tokens (%s); going on with at most %d tokens. "
            "Set ppo_max_token_len_per_gpu=%d to begin with that.",
            largest_micro_batch,
            error,
            self.limit,
            self.limit,
        )


def give_back_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
