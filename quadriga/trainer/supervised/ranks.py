"""How the processes of a supervised run share its rows, and agree."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from quadriga.controller.rendezvous import outlived_the_first
from quadriga.data.ragged import balance_over_ranks
from quadriga.engine.sharding import rank, world_size
from quadriga.errors import QuadrigaError
from quadriga.protocol import DataProto

T = TypeVar("T")


def share_of_rank(batch: DataProto, rows_per_example: int) -> DataProto:
    """This rank's examples, each of so many consecutive rows, such that all ranks have about equally many tokens."""
    ranks = world_size()
    if ranks == 1:
        return batch
    tokens = batch.batch["attention_mask"].sum(-1).view(-1, rows_per_example).sum(1).tolist()
    order = balance_over_ranks(tokens, ranks)
    share = len(order) // ranks
    return batch[_rows_of(order[rank() * share : (rank() + 1) * share], rows_per_example)]


def validation_share(batch: DataProto, rows_per_example: int) -> tuple[DataProto, list[int]]:
    """This rank's examples, at least one on every rank, and the rows of those that no other rank counts."""
    own = list(range(rank(), len(batch) // rows_per_example, world_size()))
    return batch[_rows_of(own or [0], rows_per_example)], list(range(len(own) * rows_per_example))


def same_on_all_ranks(value: T) -> T:
    """What rank 0 gives, on every rank."""
    if world_size() == 1:
        return value
    box: list[T] = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def together(work: Callable[[], T]) -> T:
    """What `work` gives on this rank, once it has gone well on all of them.

    What goes wrong is raised by the first rank that met it, and ends the others without a word: all of them read the same files,
    and their user needs to be told once.
    """
    problem, result = None, None
    try:
        result = work()
    except QuadrigaError as error:
        if world_size() == 1:
            raise
        problem = error
    if world_size() > 1:
        problems: list[str | None] = [None] * world_size()
        dist.all_gather_object(problems, None if problem is None else str(problem))
        if problem is not None and problems.index(str(problem)) == rank():
            raise problem
        if any(problems):
            outlived_the_first()
            sys.exit(1)
    return result  # type: ignore[return-value]


def wait_for_all_ranks() -> None:
    if world_size() > 1:
        dist.barrier()


def _rows_of(examples: list[int], rows_per_example: int) -> list[int]:
    return [example * rows_per_example + k for example in examples for k in range(rows_per_example)]
