"""New weights for vLLM's model, in place, through its own loader, and the proof that it holds them. For the engine process."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quadriga.errors import ConfigError, WorkerError
from quadriga.rollout.interface import WeightsEcho
from quadriga.rollout.vllm.messages import Load
from quadriga.rollout.weights import checksum

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALL = (1 << 64) - 1


def keep_weights_replaceable() -> None:
    """On a CPU vLLM repacks the matrices and forgets them; computing with them as they are lets new ones take their place."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False


def require_replaceable(model: Any, config: Any) -> None:
    """ConfigError for a model that computes with something derived from its weights, which new ones would not change."""
    empty = [name for name, parameter in model.named_parameters() if not parameter.numel()]
    latent = getattr(config, "kv_lora_rank", None)
    if empty or latent:
        raise ConfigError(
            f"vLLM does not keep the weights of {type(model).__name__} as they were loaded "
            + (f"({empty[0]} is gone)" if empty else "(latent attention is folded into other matrices)")
            + ": new weights could not take their place",
            "set actor_rollout_ref.rollout.name=native",
        )


@torch.no_grad()
def load(model: Any, order: Load, shared: int) -> WeightsEcho:
    """Take the weights that lie in the shared memory of file descriptor `shared`.

    vLLM joins matrices and pads the vocabulary with zeros, but it changes no number: so the sum of the bits of all
    parameters must be that of what was sent. WorkerError where it is not, or where a parameter was not sent.

    Returns:
        The version, and the checksum of what was sent, to be compared with the trainer's.
    """
    dtype = next(model.parameters()).dtype
    sent = total = 0
    names: list[str] = []
    with mmap.mmap(shared, order.size, access=mmap.ACCESS_READ) as memory:

        def weights() -> Iterator[tuple[str, Tensor]]:
            nonlocal sent, total
            for placed in order.weights:
                size = torch.Size(placed.shape).numel() * placed.dtype.itemsize
                # A copy: vLLM may keep a tensor until its partners have come, and the mapping ends here.
                raw = bytearray(memory[placed.offset : placed.offset + size])
                weight = torch.frombuffer(raw, dtype=placed.dtype)
                weight = weight.view(placed.shape)
                total += checksum([(placed.name, weight)])
                sent += _sum_of_bits(weight.to(dtype))
                names.append(placed.name)
                yield placed.name, weight

        loaded = model.load_weights(weights())
    parameters = dict(model.named_parameters())
    if loaded is not None and (missing := sorted(parameters.keys() - loaded)):
        raise WorkerError(
            f"{len(missing)} weights of vLLM's model were not sent, the first is {missing[0]!r}",
            "send all weights of the model",
        )
    held = sum(_sum_of_bits(parameter) for parameter in parameters.values()) & _ALL
    if held != sent & _ALL:
        raise WorkerError(
            f"vLLM's {type(model).__name__} does not hold the weights of version {order.version}: the bits of its "
            f"parameters add up to {held:#x}, those of the {len(names)} weights that were sent to {sent & _ALL:#x}",
            "set actor_rollout_ref.rollout.name=native: vLLM's loader changes the weights of this model",
        )
    return WeightsEcho(order.version, total & _ALL)


def _sum_of_bits(weight: Tensor) -> int:
    return int(weight.contiguous().view(_BITS[weight.element_size()]).sum(dtype=torch.int64)) & _ALL
