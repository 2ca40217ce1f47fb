"""Gradients: their norm over all shards, clipping, 16 bits, and what happens when one is not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from quadriga.engine.sharding import local, rank, sum_over_ranks
from quadriga.errors import WorkerError
from quadriga.protocol import DataProto


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """2-norm of the whole gradient: over all parameters and all ranks' shards of them. The same on every rank."""
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    if grads[0].dtype == torch.bfloat16:  # a sum of 16 bits would be one of three digits
        squared = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32).square() for g in grads]).sum()
    else:
        squared = torch.nn.utils.get_total_norm(grads, foreach=True).float().square()
    return (sum_over_ranks(squared) / copies(parameters)).sqrt()


def copies(parameters: Sequence[nn.Parameter]) -> int:
    """How often each gradient is there among the ranks: more than once with hybrid sharding."""
    from torch.distributed.tensor import DTensor

    kind = next(iter(parameters))
    if not isinstance(kind, DTensor):
        return 1
    replicated = zip(kind.device_mesh.shape, kind.placements, strict=True)
    return math.prod(size for size, placement in replicated if placement.is_replicate())


def scale_gradients(parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)


def keep_narrow(parameters: Sequence[nn.Parameter]) -> None:
    """From now on each gradient becomes bfloat16 as soon as it is there: over all layers it never is float32."""
    for parameter in parameters:
        if not getattr(parameter, "_post_accumulate_grad_hooks", None):
            parameter.grad_dtype = None  # it need not be the weight's
            parameter.register_post_accumulate_grad_hook(_narrow)


def _narrow(parameter: Tensor) -> None:
    gradient = parameter.grad
    if gradient is not None and gradient.dtype != torch.bfloat16:
        parameter.grad = gradient.to(torch.bfloat16)


logger = logging.getLogger(__name__)


class NonFiniteGuard:
    """Counts steps with a non-finite gradient.

    Args:
        max_in_a_row: stop at so many consecutive ones.
        dump_dir: where the mini-batch that caused the last of them is written.
    """

    def __init__(self, max_in_a_row: int, dump_dir: str | Path) -> None:
        self.max_in_a_row, self.dump_dir = max_in_a_row, Path(dump_dir)
        self.total, self.in_a_row = 0, 0

    def saw_finite(self) -> None:
        self.in_a_row = 0

    def saw_non_finite(self, norm: float, data: DataProto, step: int) -> None:
        """Count it. WorkerError, naming the dump, when it was one too many."""
        self.total += 1
        self.in_a_row += 1
        logger.warning(
            "the gradient's norm is %s in optimiser step %d: the step is skipped (%d in a row, %d in all)",
            norm,
            step,
            self.in_a_row,
            self.total,
        )
        if self.in_a_row < self.max_in_a_row:
            return
        path = self._dump(data, step)
        raise WorkerError(
            f"the gradient was not finite in {self.in_a_row} optimiser steps in a row (norm {norm} in step {step}); the "
            f"mini-batch of this rank is in {path}",
            "look for NaN or huge values in its columns (DataProto.load_from_disk), lower the learning rate, or resume "
            "from an earlier checkpoint; TrainingEngine.train_mini_batch on the dump repeats the step",
        )

    def _dump(self, data: DataProto, step: int) -> Path:
        self.dump_dir.mkdir(parents=True, exist_ok=True)
        path = self.dump_dir / f"nonfinite-step{step}-rank{rank()}.dataproto"
        tensors = DataProto(batch=data.batch.cpu(), meta_info={"optimizer_step": step, "rank": rank()})
        tensors.save_to_disk(path)
        return path
