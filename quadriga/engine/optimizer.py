"""The optimiser of `optim.name`, the learning rate over time, and Muon."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from quadriga.config.schema_models import OptimConfig
from quadriga.engine.compact_adam import CompactAdamW
from quadriga.engine.sharding import full, like, local, own_rows
from quadriga.errors import ConfigError

MOMENT_BITS = {"adamw_8bit": 8, "adamw_bf16": 16}
WSD_DECAY_SHARE = 0.1
"""`wsd` (warm-up, stable, decay) decays over this last share of the steps."""


def make_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimConfig,
    matrices: Collection[nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """The optimiser of `config.name`. Biases and norms (one-dimensional parameters) are not decayed.

    Args:
        matrices: what `muon` treats as such: the parameters of the decoder layers.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for _, parameter in named_parameters:
        if parameter.requires_grad:
            (decayed if parameter.ndim > 1 else plain).append(parameter)
    if not decayed and not plain:
        raise ConfigError("the model has no weights to train", "unfreeze it, or give it a LoRA adapter")
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    beta1, beta2 = config.betas
    if config.name == "muon":
        return Muon(groups, config.lr, (beta1, beta2), matrices)
    if config.name in MOMENT_BITS:
        return CompactAdamW(groups, config.lr, (beta1, beta2), MOMENT_BITS[config.name])
    return torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), fused=True)


class Schedule:
    """The learning rate of `config`, set on the optimiser. Its unit is the trainer step, not the optimiser step.

    So the learning rate is the same for all mini-batches and epochs of a step, and does not depend on how a step is cut
    into mini-batches. It is a pure function of `step`, which is all there is to save.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int | None) -> None:
        self.optimizer, self.config, self.total_steps = optimizer, config, total_steps
        self.move_to(0)

    def advance(self) -> None:
        self.move_to(self.step + 1)

    def move_to(self, step: int) -> None:
        self.step = step
        self.learning_rate = self.config.lr * lr_factor(step, self.config, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate


def warmup_steps(config: OptimConfig, total_steps: int | None) -> int:
    if config.lr_warmup_steps >= 0:
        return config.lr_warmup_steps
    if config.lr_warmup_steps_ratio > 0 and total_steps is None:
        raise ConfigError(
            "optim.lr_warmup_steps_ratio is a share of all steps, and their number is not known",
            "set trainer.total_training_steps, or optim.lr_warmup_steps",
        )
    return int(config.lr_warmup_steps_ratio * (total_steps or 0))


def lr_factor(step: int, config: OptimConfig, total_steps: int | None) -> float:
    """Learning rate of trainer step `step` (from 0) as a share of `config.lr`.

    Warm-up is linear from `min_lr_ratio` and reaches 1 with its last step; then `constant` stays, `linear` and `cosine`
    fall and would reach `min_lr_ratio` one step after the last, `wsd` stays and falls linearly in the last tenth.
    """
    floor, warmup = config.min_lr_ratio, warmup_steps(config, total_steps)
    if step < warmup:
        return floor + (1 - floor) * (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return 1.0
    if total_steps is None:
        raise ConfigError(
            f"optim.lr_scheduler_type={config.lr_scheduler_type} ends with the last step, which is not known",
            "set trainer.total_training_steps, or use the constant schedule",
        )
    start = warmup
    if config.lr_scheduler_type == "wsd":
        start = max(warmup, total_steps - math.ceil(WSD_DECAY_SHARE * total_steps))
    progress = min(1.0, max(0.0, (step - start) / max(1, total_steps - start)))
    if config.lr_scheduler_type == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (1 - floor) * (1 - progress)


MOMENTUM = 0.95
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the Newton–Schulz iteration: five steps bring every singular value from above 0.001 to between about 0.7 and 1.2."""
USUAL_SIZE = 0.2
"""Root mean square of an AdamW update, in learning rates."""


class Muon(CompactAdamW):
    """The momentum of a weight matrix, turned into the nearest matrix that stretches all directions alike.

    The parameters in `matrices` (a stack of experts is many of them) are updated so; embeddings, head, norms and biases by
    AdamW with float32 moments and the same learning rate. An orthogonal update is scaled to the size that AdamW's updates
    usually have, so that a learning rate carries over from one to the other.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        matrices: Collection[nn.Parameter],
    ) -> None:
        self._matrices = {id(p) for p in matrices if p.ndim >= 2}
        super().__init__(groups, lr, betas, bits=32)

    def new_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if id(parameter) not in self._matrices:
            return super().new_state(parameter)
        momentum = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.contiguous_format)
        return {"step": torch.zeros(()), "momentum": momentum}

    def update(self, parameter: nn.Parameter, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        if id(parameter) not in self._matrices:
            super().update(parameter, state, group)
            return
        assert parameter.grad is not None
        weight, lr = local(parameter.detach()), group["lr"]
        momentum, gradient = local(state["momentum"]), local(parameter.grad).float()
        momentum.lerp_(gradient, 1 - MOMENTUM)
        ahead = gradient.lerp(momentum, MOMENTUM)
        rows, columns = parameter.shape[-2:]
        if parameter.ndim > 2:  # a stack of matrices, sharded by matrices
            update = orthogonal(ahead)
        else:
            update = orthogonal(full(like(parameter.detach(), ahead)))[own_rows(parameter)]
        weight.mul_(1 - lr * group["weight_decay"])
        weight.add_(update.to(weight.dtype), alpha=-lr * USUAL_SIZE * max(rows, columns) ** 0.5)


def orthogonal(matrices: Tensor) -> Tensor:
    """About U Vᵀ of the singular value decomposition U S Vᵀ of each of `matrices[…, rows, columns]`."""
    kind = torch.bfloat16 if matrices.device.type != "cpu" else torch.float32
    x = matrices.to(kind)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        product = x @ x.mT
        x = a * x + (b * product + c * product @ product) @ x
    return (x.mT if tall else x).float()
