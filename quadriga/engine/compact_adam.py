"""AdamW whose two moments take 2 bytes a weight instead of 8, or 4: `adamw_8bit` and `adamw_bf16`.

Both round at random, up or down with the chances that make the mean exact. A second moment moves by a thousandth a step;
rounded to the nearest of a coarse grid it would never move at all.

The grid of both is that of float32 with fewer bits of the fraction, so it is the same for all values at all times, and what
was rounded once is rounded again only as far as it has moved. `adamw_8bit` keeps 3 bits of the fraction (8 steps an octave)
and, for each block of 256 weights, the lowest step that its codes begin at: the second moments of a block may span 32
octaves, the signed first moments 16. What lies below is the lowest code (second moment: too small a divisor would blow up
its weight) or 0.

The draws depend on the parameter, the shard of it and its step alone: a resumed run goes on with the same bits, and copies of
a shard on several ranks (`fsdp_size`) stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.engine.sharding import local, shard_number

BLOCK = 256
"""Weights that share a base, neighbours in a row of the weight: no block reaches over two ranks' shards."""
DROPPED_BITS = 20
"""Of float32's 23 bits of fraction: 8 codes an octave remain."""
CHUNK = {"cpu": 1 << 18, "accelerator": 1 << 26}
"""Weights that are done at a time: on a CPU they stay in the cache, on a GPU the temporary tensors stay small."""
SMALL = 2
"""Parameters of fewer dimensions (norms, biases) keep float32 moments: they are few, and every model is sensitive to them."""


class CompactAdamW(torch.optim.Optimizer):
    """AdamW with moments of 8 or 16 bits. Its state is plain tensors, sharded like the weights they belong to.

    Args:
        groups: parameters and their weight decay.
        bits: 8, 16, or 32 (float32 moments, for what inherits from this class).
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        bits: int,
        eps: float = 1e-8,
    ) -> None:
        self.bits = bits
        super().__init__(list(groups), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._numbers = {parameter: number for number, parameter in enumerate(parameters)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of all parameters with a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self.new_state(parameter))
                state["step"] += 1
                self.update(parameter, state, group)

    def new_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """All zero."""
        state = {"step": torch.zeros(())}
        bits = 32 if parameter.ndim < SMALL else self.bits
        for name in ("exp_avg", "exp_avg_sq"):
            if bits == 8:
                state[name] = torch.zeros_like(parameter, dtype=torch.uint8, memory_format=torch.contiguous_format)
                state[f"{name}_base"] = _bases(parameter)
            else:
                kind = torch.bfloat16 if bits == 16 else torch.float32
                state[name] = torch.zeros_like(parameter, dtype=kind, memory_format=torch.contiguous_format)
        return state

    def update(self, parameter: nn.Parameter, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        (beta1, beta2), lr, step = group["betas"], group["lr"], int(state["step"])
        size, root = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
        for weight, gradient, first, second in self._chunks(parameter, state):
            m, v = first.read(), second.read()
            m.lerp_(gradient, 1 - beta1)
            v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            weight.mul_(1 - lr * group["weight_decay"])
            weight.addcdiv_(m, (v.sqrt() / root).add_(group["eps"]), value=-size)
            noise = first.noise()
            first.write(m, noise)
            second.write(v, noise)

    def _chunks(
        self, parameter: nn.Parameter, state: dict[str, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, _Moment, _Moment]]:
        """Some rows at a time: weight, gradient (float32) and the places of both moments."""
        weight = local(parameter.detach())
        generator = self._generator(parameter, state, weight.device)
        parts = {name: local(value) for name, value in state.items() if name != "step"}
        rows = weight.shape[0] if weight.ndim else 1
        each = max(1, CHUNK["cpu" if weight.device.type == "cpu" else "accelerator"] * rows // max(1, weight.numel()))
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        for start in range(0, rows if weight.numel() else 0, each):
            part = slice(start, start + each)
            w, g, *tensors = (x.view(1) if x.ndim == 0 else x[part] for x in (weight, gradient, *parts.values()))
            named = dict(zip(parts, tensors, strict=True))
            yield (
                w,
                g.float(),
                _Moment(named["exp_avg"], named.get("exp_avg_base"), True, generator),
                _Moment(named["exp_avg_sq"], named.get("exp_avg_sq_base"), False, generator),
            )

    def _generator(self, parameter: nn.Parameter, state: dict[str, Tensor], device: torch.device) -> torch.Generator:
        place = self._numbers[parameter] * 65_537 + shard_number(parameter)
        return torch.Generator(device).manual_seed((place * 1_000_033 + int(state["step"])) % (1 << 62))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's own would turn every moment into the weights' type. Hyper-parameters are taken as they come."""
        for group, stored in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in stored.items() if name != "params"})
            for parameter, number in zip(group["params"], stored["params"], strict=True):
                if number in state_dict["state"]:
                    self.state[parameter] = dict(state_dict["state"][number])


class _Moment:
    """The place where some rows of a moment are kept: float32, bfloat16, or codes with a base for each block."""

    def __init__(self, kept: Tensor, base: Tensor | None, signed: bool, generator: torch.Generator) -> None:
        self.kept, self.base, self.signed, self.generator = kept, base, signed, generator

    def read(self) -> Tensor:
        """A float32 copy; the very tensor where it is float32 itself."""
        if self.base is None:
            return self.kept.float()
        return decode(self.kept, self.base, self.signed)

    def noise(self) -> Tensor:
        """31 random bits for each value, enough for both moments."""
        if self.kept.dtype == torch.float32:
            return self.kept
        shape, device = self.kept.shape, self.kept.device
        return torch.empty(shape, dtype=torch.int32, device=device).random_(generator=self.generator)

    def write(self, values: Tensor, noise: Tensor) -> None:
        if self.kept.dtype == torch.float32:
            return  # `values` is `kept`
        noise = noise if self.signed else noise >> 11  # led by other bits: the two moments must not err together
        if self.base is None:
            self.kept.copy_(round_at_random(values, noise, 16))
        else:
            codes, base = encode(values, noise, self.signed)
            self.kept.copy_(codes)
            self.base.copy_(base)


def round_at_random(values: Tensor, noise: Tensor, dropped_bits: int) -> Tensor:
    """float32 `values` without the last bits of their fraction, up or down by chance such that the mean is exact.

    noise: int32, of which the last `dropped_bits` bits are random.
    """
    # Floats of one sign are in the order of their bits, and what carries out of the fraction goes into the exponent: so
    # adding to the bits moves a value up by a share of one step, also from one octave into the next.
    below = (1 << dropped_bits) - 1
    bits = values.view(torch.int32) + (noise & below)
    return (bits & ~below).view(torch.float32)


def encode(values: Tensor, noise: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes (uint8, of `values`' shape `[rows, …]`) and bases (int32 `[rows, blocks]`) of float32 values, at random.

    A code's last 7 (signed) or 8 bits are 0 for 0, or the value's step on the grid less the block's base.
    """
    most = 127 if signed else 255
    bits = values.abs().view(torch.int32) + (noise & ((1 << DROPPED_BITS) - 1))
    steps = _blocks((bits >> DROPPED_BITS).clamp_(max=2039))  # 2039: the largest finite
    base = (steps.amax(-1, keepdim=True) - most).clamp_(min=0)
    codes = steps - base
    codes = codes.clamp_(min=0) if signed else torch.where(steps > 0, codes.clamp_(min=1), 0)
    codes = _unblocked(codes, values.shape)
    if signed:
        codes = codes + 128 * (values < 0)
    return codes.to(torch.uint8), base.squeeze(-1).to(torch.int32)


def decode(codes: Tensor, base: Tensor, signed: bool) -> Tensor:
    """The float32 values of `encode`'s codes."""
    numbers = codes.to(torch.int32)
    steps = _blocks(numbers & 127 if signed else numbers)
    steps = torch.where(steps > 0, steps + base.to(torch.int32).unsqueeze(-1), 0)
    values = _unblocked(steps << DROPPED_BITS, codes.shape).contiguous().view(torch.float32)
    return torch.where(numbers >= 128, -values, values) if signed else values


def _blocks(values: Tensor) -> Tensor:
    """`[rows, …]` → `[rows, blocks, BLOCK]`, the last block filled up with 0."""
    flat = values.flatten(1)
    if missing := -flat.shape[1] % BLOCK:
        flat = F.pad(flat, (0, missing))
    return flat.unflatten(1, (-1, BLOCK))


def _unblocked(blocks: Tensor, shape: torch.Size) -> Tensor:
    return blocks.flatten(1)[:, : shape[1:].numel()].view(shape)


def _bases(parameter: nn.Parameter) -> Tensor:
    """A base for each block of each row, all 0; sharded by rows as the parameter is."""
    from torch.distributed.tensor import DTensor

    blocks = -(-parameter.shape[1:].numel() // BLOCK)
    own = local(parameter.detach())
    bases = torch.zeros(own.shape[0], blocks, dtype=torch.int32, device=own.device)
    if not isinstance(parameter, DTensor):
        return bases
    whole = torch.Size((parameter.shape[0], blocks))
    return DTensor.from_local(
        bases, parameter.device_mesh, parameter.placements, run_check=False, shape=whole, stride=(blocks, 1)
    )
