"""Weights and optimiser state in host memory while they are not used, so that other models can use the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quadriga.config.schema_models import FSDPConfig
from quadriga.models.token_model import TokenModel


class Offload:
    """Brings weights and optimiser state to the device and back; does nothing where they are not to be offloaded."""

    def __init__(
        self, model: TokenModel, optimizer: torch.optim.Optimizer | None, device: torch.device, config: FSDPConfig
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        has_device = device.type != "cpu"
        self.offloads_weights = config.param_offload and has_device
        self.offloads_optimizer = config.optimizer_offload and has_device
        self._weights_users = 0
        if self.offloads_weights:
            self._move_weights("cpu")

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

    @contextmanager
    def optimizer_on_device(self) -> Iterator[None]:
        if not self.offloads_optimizer:
            yield
            return
        self._move_optimizer(self.device)
        try:
            yield
        finally:
            self._move_optimizer("cpu")

    def _move_weights(self, where: torch.device | str) -> None:
        self.model.to(where)
        if where == "cpu":
            torch.cuda.empty_cache()

    def _move_optimizer(self, where: torch.device | str) -> None:
        if self.optimizer is None:
            return
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(where)
        if where == "cpu":
            torch.cuda.empty_cache()
