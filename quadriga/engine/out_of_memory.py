"""What running out of memory looks like, and the smaller budget to go on with."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quadriga.accelerator import device_module, empty_cache, free_memory
from quadriga.errors import WorkerError

logger = logging.getLogger(__name__)

_MESSAGES = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MESSAGES)


AUTO = "auto"
"""The token budget that the engine finds by itself."""
FIRST_AUTO, MAX_AUTO = 16384, 65536
"""What `AUTO` is before anything was measured, and at most: larger micro-batches are no faster."""
FIXED_AUTO = 32768
"""What `AUTO` is where it must not be measured."""
_SHARE = 0.8
"""Part of the free memory that `AUTO` fills."""


class TokenBudget:
    """The token budget of micro-batches: what is asked for, or less after it proved too large.

    Args:
        fixed: it must depend on nothing that is measured (`AUTO` stays what it is, and too large is an error): how a
            mini-batch is cut decides in which order its gradient is summed.
        auto: what `AUTO` is before anything was measured.
    """

    def __init__(self, fixed: bool = False, auto: int = FIRST_AUTO) -> None:
        self.fixed = fixed
        self.limit: int | None = None
        self.auto = auto
        self.measured = False

    def of(self, max_tokens: int | str) -> int:
        wanted = self.auto if max_tokens == AUTO else int(max_tokens)
        return wanted if self.limit is None else min(self.limit, wanted)

    @contextmanager
    def measuring(self, max_tokens: int | str, device: torch.device, largest_micro_batch: int) -> Iterator[None]:
        """Around a training pass: the first one tells how much memory a token takes, and so what `AUTO` is."""
        wanted = max_tokens == AUTO and device.type != "cpu" and not self.measured and not self.fixed
        if not (wanted and torch.is_grad_enabled() and largest_micro_batch >= FIRST_AUTO // 4):
            yield
            return
        memory = device_module(device)
        before = memory.memory_allocated(device)
        memory.reset_peak_memory_stats(device)
        yield
        used = memory.max_memory_allocated(device) - before
        free = free_memory(device) + memory.memory_reserved(device) - before
        tokens = int(_SHARE * free * largest_micro_batch / max(1, used)) // 1024 * 1024
        self.auto, self.measured = min(MAX_AUTO, max(FIRST_AUTO, tokens)), True

    def halve(self, largest_micro_batch: int, longest_row: int, error: str) -> None:
        """Half of the micro-batch that did not fit. WorkerError when it was a single row."""
        if largest_micro_batch <= longest_row:
            raise WorkerError(
                f"out of memory in a micro-batch that holds a single row of {longest_row} tokens: {error}",
                "shorten data.max_response_length, set model.enable_gradient_checkpointing=True, use "
                "fsdp_config.optimizer_offload, or spread the model over more devices",
            )
        if self.fixed:
            raise WorkerError(
                f"out of memory in a micro-batch of {largest_micro_batch} tokens: {error}; with trainer.deterministic=exact "
                "it is not cut smaller by itself, since that would change the bits of the gradient",
                f"set actor_rollout_ref.actor.ppo_max_token_len_per_gpu={max(longest_row, largest_micro_batch // 2)}",
            )
        self.limit = max(longest_row, largest_micro_batch // 2)
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
    empty_cache()
