"""Weights and optimiser state in host memory while they are not used, and optimiser steps that need little memory.

An offloaded state never lies on the device as a whole: the step goes over buckets of parameters, and while one is computed
the next one's state comes and the last one's goes back, through pinned memory on streams of their own. Gradients kept in
16 bits become float32 a bucket at a time, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from quadriga.accelerator import device_module, empty_cache
from quadriga.config.schema_models import FSDPConfig
from quadriga.engine.sharding import like, local
from quadriga.models.token_model import TokenModel

BUCKET = 64 << 20
"""Weights of a bucket, over all ranks that share them. Three buckets are on the device at a time."""

State = dict[str, Any]


class Offload:
    """Brings weights and optimiser state to the device and back; does nothing where they are not to be offloaded.

    Attributes:
        most_on_device: bytes of offloaded optimiser state that were on the device at once, so far.
    """

    def __init__(
        self, model: TokenModel, optimizer: torch.optim.Optimizer | None, device: torch.device, config: FSDPConfig
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        has_device = device.type != "cpu"
        self.offloads_weights = config.param_offload and has_device
        self.offloads_optimizer = config.optimizer_offload and has_device
        self.narrow_gradients = config.grad_dtype == "bfloat16"
        self.bucket = BUCKET
        self.most_on_device = self._on_device = 0
        self._weights_users = 0
        self._coming, self._going = (device_module(device).Stream() if has_device else None for _ in range(2))
        if self.offloads_weights:
            self._move_weights("cpu")

    # ---- weights -----------------------------------------------------------------------------------------------------

    @contextmanager
    def weights_on_device(self) -> Iterator[None]:
        """May be nested; the weights leave the device with the outermost."""
        if not self.offloads_weights:
            yield
            return
        if self._weights_users == 0:
            self._move_weights(self.device)
        self._weights_users += 1
        try:
            yield
        finally:
            self._weights_users -= 1
            if self._weights_users == 0:
                self._move_weights("cpu")

    def _move_weights(self, where: torch.device | str) -> None:
        self.model.to(where)
        if where == "cpu":
            empty_cache()

    # ---- the optimiser's step ----------------------------------------------------------------------------------------

    def step(self) -> None:
        """`optimizer.step()`. In buckets, the gradients are gone after it."""
        assert self.optimizer is not None
        if not (self.offloads_optimizer or self.narrow_gradients):
            self.optimizer.step()
            return
        buckets = list(self._buckets(self.optimizer))
        moved = self._bring(buckets[0]) if buckets else {}
        for number, bucket in enumerate(buckets):
            here, moved = moved, {}
            if number + 1 < len(buckets):
                moved = self._bring(buckets[number + 1])
            homes = self._put(here)
            for parameter in bucket:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to(parameter.dtype)
            with _only(self.optimizer, bucket):
                self.optimizer.step()
            for parameter in bucket:
                parameter.grad = None
            self._send_back(bucket, homes)
        if self._going is not None:
            self._going.synchronize()  # a checkpoint may read the host's copy now

    def _buckets(self, optimizer: torch.optim.Optimizer) -> Iterator[list[nn.Parameter]]:
        """Parameters in order, cut by the sizes of the whole tensors: the same on every rank."""
        bucket: list[nn.Parameter] = []
        size = 0
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if bucket and size + parameter.numel() > self.bucket:
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += parameter.numel()
        if bucket:
            yield bucket

    def _bring(self, bucket: list[nn.Parameter]) -> dict[nn.Parameter, State]:
        """Begin to copy the bucket's state to the device; the copies, which `_put` makes the optimiser's."""
        assert self.optimizer is not None
        if not self.offloads_optimizer:
            return {}
        copies: dict[nn.Parameter, State] = {}
        pairs: list[tuple[Tensor, Tensor]] = []
        for parameter in bucket:
            for name, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and self._must_come(value):
                    there = torch.empty_like(local(value), device=self.device)
                    pairs.append((there, local(value)))
                    copies.setdefault(parameter, {})[name] = like(value, there)
        self._count(sum(there.nbytes for there, _ in pairs))
        with self._on(self._coming):
            for there, here in pairs:
                there.copy_(here, non_blocking=True)
        return copies

    def _put(self, copies: dict[nn.Parameter, State]) -> dict[nn.Parameter, State]:
        """Make the copies the optimiser's state, once they have arrived; what was there before."""
        assert self.optimizer is not None
        if self._coming is not None:
            device_module(self.device).current_stream().wait_stream(self._coming)
        homes: dict[nn.Parameter, State] = {}
        for parameter, values in copies.items():
            state = self.optimizer.state[parameter]
            homes[parameter] = {name: state[name] for name in values}
            state.update(values)
        return homes

    def _send_back(self, bucket: list[nn.Parameter], homes: dict[nn.Parameter, State]) -> None:
        """Begin to copy the bucket's state to where it was before, or to a new place in host memory."""
        assert self.optimizer is not None
        if not self.offloads_optimizer:
            return
        sent = 0
        with self._on(self._going):
            for parameter in bucket:
                state, home = self.optimizer.state.get(parameter, {}), homes.get(parameter, {})
                for name, value in state.items():
                    if name not in home and not (isinstance(value, Tensor) and self._is_new(value)):
                        continue
                    own = local(value)
                    kept = home.get(name)
                    if kept is None:  # the first step has made it, on the device
                        pinned = self._going is not None
                        kept = like(value, torch.empty_like(own, device="cpu", pin_memory=pinned))
                    else:
                        sent += own.nbytes
                    local(kept).copy_(own, non_blocking=True)
                    if self._going is not None:
                        own.record_stream(self._going)
                    state[name] = kept
        self._count(-sent)

    def _must_come(self, value: Tensor) -> bool:
        """Not what is there already, after a checkpoint was loaded, nor a counter that its optimiser keeps on the host."""
        if self.device.type == "cpu":
            return value.ndim > 0
        return local(value).device.type != self.device.type and (value.ndim > 0 or value.is_pinned())

    def _is_new(self, value: Tensor) -> bool:
        return local(value).device.type == self.device.type and self.device.type != "cpu"

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        """Copies inside run on `stream`, after what the device has been told so far."""
        if stream is None:
            return nullcontext()
        module = device_module(self.device)
        stream.wait_stream(module.current_stream())
        return module.stream(stream)

    def _count(self, change: int) -> None:
        self._on_device += change
        self.most_on_device = max(self.most_on_device, self._on_device)


@contextmanager
def _only(optimizer: torch.optim.Optimizer, bucket: list[nn.Parameter]) -> Iterator[None]:
    """Inside it, the optimiser has no other parameters than those."""
    groups, chosen = optimizer.param_groups, {id(parameter) for parameter in bucket}
    parts = [group | {"params": [p for p in group["params"] if id(p) in chosen]} for group in groups]
    optimizer.param_groups = [part for part in parts if part["params"]]
    try:
        yield
    finally:
        optimizer.param_groups = groups
