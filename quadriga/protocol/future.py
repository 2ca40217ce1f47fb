"""DataProtos that are not here yet: results of remote calls, and rows held by the other ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from quadriga.errors import WorkerError
from quadriga.protocol.columns import require, tensor_bytes

if TYPE_CHECKING:
    from quadriga.protocol.data_proto import DataProto


@dataclass
class DataProtoFuture:
    """The result of a non-blocking call on a worker group.

    It can be given to another group before it is ready; the receiving side calls `get`.

    Args:
        collect_fn: makes one value out of the list of worker results.
        futures: Ray object references, one a worker.
        dispatch_fn: applied to the collected value, e.g. to take this receiver's chunk.
        timeout_s: deadline of `get` in seconds unless the call names its own; None waits for ever.
        fetch: how to wait, `fetch(futures, timeout_s=…) -> results`; a worker group passes its own, which has its
            deadline and names the worker that failed. It stays behind when the future travels to another process.
    """

    collect_fn: Callable[[list], Any]
    futures: list
    dispatch_fn: Callable[[Any], Any] | None = None
    timeout_s: float | None = None
    fetch: Callable[..., list] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "fetch": None}

    @staticmethod
    def concat(data: Sequence[Any], timeout_s: float | None = None) -> DataProtoFuture:
        """A future for the concatenation of the DataProtos behind Ray object references."""
        return DataProtoFuture(collect_fn=_concat, futures=list(data), timeout_s=timeout_s)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """One future for each of `chunks` equal parts; nothing is fetched now."""
        return [
            DataProtoFuture(
                collect_fn=self.collect_fn,
                futures=self.futures,
                dispatch_fn=partial(_take_chunk, index=index, chunks=chunks, after=self.dispatch_fn),
                timeout_s=self.timeout_s,
                fetch=self.fetch,
            )
            for index in range(chunks)
        ]

    def get(self, timeout_s: float | None = None) -> Any:
        """Wait for all workers and collect. WorkerError when the deadline passes; a worker's own exception surfaces."""
        deadline_s = self.timeout_s if timeout_s is None else timeout_s
        if self.fetch is not None:
            output = self.collect_fn(self.fetch(self.futures, timeout_s=deadline_s))
            return output if self.dispatch_fn is None else self.dispatch_fn(output)
        import ray

        try:
            results = ray.get(self.futures, timeout=deadline_s)
        except ray.exceptions.GetTimeoutError as timeout:
            _, pending = ray.wait(self.futures, num_returns=len(self.futures), timeout=0, fetch_local=False)
            raise WorkerError(
                f"{len(pending)} of {len(self.futures)} worker results were not ready after {deadline_s} s: "
                f"{', '.join(str(ref) for ref in pending)}",
                "raise the deadline, or look in the logs of the workers for what they wait for",
            ) from timeout
        output = self.collect_fn(results)
        return output if self.dispatch_fn is None else self.dispatch_fn(output)


def _concat(parts: list) -> Any:
    return type(parts[0]).concat(parts)


def _take_chunk(data: Any, index: int, chunks: int, after: Callable[[Any], Any] | None) -> Any:
    return (data if after is None else after(data)).chunk(chunks)[index]


def all_gather_data_proto(data: DataProto, process_group: Any) -> None:
    """Replace the rows of `data`, in place, by those of all ranks of `process_group`, in rank order.

    Every rank must hold the same columns; the number of rows may differ. meta_info is left alone. Tensors travel as
    raw bytes, so every dtype works with every backend; they end on the device they came from.
    """
    import torch.distributed as dist

    world_size = dist.get_world_size(process_group)
    data.batch, data.elsewhere = data.fetch().batch, {}
    columns = {} if data.batch is None else dict(data.batch.items())
    for key, value in columns.items():
        dense = isinstance(value, torch.Tensor) and not value.is_nested
        require(dense, f"batch['{key}'] is not a dense tensor and cannot be gathered")
    shapes = {key: (str(value.dtype), tuple(value.shape[1:])) for key, value in columns.items()}
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, (len(data), shapes, data.non_tensor_batch), group=process_group)

    rows = [entry[0] for entry in gathered]
    for rank, entry in enumerate(gathered):
        require(
            entry[1] == shapes and entry[2].keys() == data.non_tensor_batch.keys(),
            f"all ranks must hold the same columns: rank {rank} has {entry[1]} and {sorted(entry[2])}, "
            f"this one {shapes} and {sorted(data.non_tensor_batch)}",
        )
    if data.batch is not None:
        merged = {key: _all_gather_rows(value, rows, process_group) for key, value in sorted(columns.items())}
        data.batch = TensorDict({key: merged[key] for key in columns}, batch_size=[sum(rows)])
    data.non_tensor_batch = {
        key: np.concatenate([entry[2][key] for entry in gathered], axis=0) for key in data.non_tensor_batch
    }
    data.check_consistency()


def _all_gather_rows(column: torch.Tensor, rows: list[int], process_group: Any) -> torch.Tensor:
    """`column` of every rank, concatenated; `rows[r]` is the number of rows of rank r."""
    import torch.distributed as dist

    # A group of an accelerator alone cannot carry what lies on the CPU.
    accelerated = "gloo" not in dist.get_backend(process_group)
    wire_device = torch.accelerator.current_accelerator() if accelerated else torch.device("cpu")
    row_shape = column.shape[1:]
    row_bytes = row_shape.numel() * column.dtype.itemsize
    # Collectives want equal sizes: every rank sends the longest rank's number of bytes, the excess is cut off again.
    sent = torch.zeros(max(rows) * row_bytes, dtype=torch.uint8, device=wire_device)
    mine = tensor_bytes(column)
    sent[: mine.numel()] = mine.to(wire_device)
    received = [torch.empty_like(sent) for _ in rows]
    dist.all_gather(received, sent, group=process_group)
    joined = torch.cat([part[: count * row_bytes] for part, count in zip(received, rows, strict=True)])
    return joined.to(column.device).view(column.dtype).view(sum(rows), *row_shape)
