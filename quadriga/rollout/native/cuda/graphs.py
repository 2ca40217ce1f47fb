"""The decode step as CUDA graphs, one for each size of batch.

A step for one token a row is hundreds of kernels of a few microseconds each. Python takes longer to launch them than the
device to run them; a graph launches all of them with one call. The price: a graph has fixed shapes and addresses. Shapes
are met by padding the rows to a size that has a graph, addresses by keeping what a step reads in tables that stay where
they are (`DeviceSlots`, `CudaKVCache`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def bucket_of(rows: int) -> int:
    """The size of batch that `rows` are padded to: powers of two up to 16, then four sizes to every doubling.

    Up to 16 rows a step takes the time to read the weights, whatever the rows are. Beyond that padding costs: with four sizes to
    a doubling less than a fifth of the rows is padding, and up to 1,024 rows there are 29 graphs, each of which takes far
    longer to capture than a step takes to run.
    """
    if rows <= 16:
        return 1 << (rows - 1).bit_length()
    step = 1 << ((rows - 1).bit_length() - 3)
    return -(-rows // step) * step


class DecodeGraphs:
    """Runs `forward(slots[B]) -> logits[B, V]` for any number of rows, by replay of a graph captured when first needed.

    Where there is not enough memory to capture a size, larger batches are done in several parts from then on.

    Args:
        forward: the step, without host synchronisation; what it reads besides `slots` must keep its address.
        max_rows: most rows of a step.
        eager: call `forward` itself, never capture.
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], max_rows: int, device: torch.device, eager: bool) -> None:
        self._forward, self._device, self._eager = forward, device, eager
        self.max_bucket = max_rows
        self.captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._pool: Any = None

    def parts(self, rows: int) -> list[tuple[int, int]]:
        """`(first row, rows)` of the calls of `run` that a step of `rows` takes."""
        return [(start, min(self.max_bucket, rows - start)) for start in range(0, rows, self.max_bucket)]

    def padded(self, rows: int) -> int:
        return min(self.max_bucket, bucket_of(rows))

    def run(self, slots: Tensor) -> Tensor:
        """Logits for `slots`, which is padded already; valid until the next call."""
        rows = slots.shape[0]
        if self._eager:
            return self._forward(slots)
        if rows not in self.captured:
            self._capture(rows)
        graph, static_slots, logits = self.captured[rows]
        static_slots.copy_(slots)
        graph.replay()
        return logits

    def prepare(self, rows: int) -> bool:
        """Capture the graph for `rows`; False, and smaller batches from now on, if memory does not suffice."""
        if self._eager or rows in self.captured:
            return True
        try:
            self._capture(rows)
            return True
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
        torch.cuda.empty_cache()
        if rows <= 1:
            raise torch.OutOfMemoryError(f"not even one row can be decoded: {reason}")
        self.max_bucket = max(1, rows // 2)
        logger.warning(
            "no memory to capture decoding of %d rows (%s): going on with %d at a time. "
            "Lower rollout.max_num_seqs or gpu_memory_utilization to avoid it.",
            rows,
            reason,
            self.max_bucket,
        )
        return False

    def _capture(self, rows: int) -> None:
        slots = torch.full((rows,), -1, dtype=torch.int64, device=self._device)  # all padding: nothing is written
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # compiles kernels and makes workspaces outside of the capture
            self._forward(slots)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # One pool of memory for all graphs: only one of them runs at a time, and its logits are used before the next does.
        # Other threads, such as those that watch collectives, may ask the device things meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._forward(slots)
        self._pool = graph.pool()
        self.captured[rows] = (graph, slots, logits)
