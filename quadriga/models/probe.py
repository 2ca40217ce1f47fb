"""A proof, at load time, that a model computes the same packed as one sequence at a time.

Architectures differ in more ways than a list of names could say (recurrent layers that run across the bounds, logits
scaled in their own way, attention with extra arguments). So two short sequences go through the model both ways, and a
model that gives different log-probs is refused before any training starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quadriga.errors import DataError, QuadrigaError
from quadriga.models.attention import PACKED_ATTENTION
from quadriga.models.packing import pack_rows
from quadriga.models.token_model import PolicyModel

TOLERANCE = 1e-3
"""Largest difference of a log-prob between two ways to compute it; wrong scales are far above, rounding far below."""
LEAK_TOLERANCE = 1e-5
"""Largest change of a log-prob when another sequence changes: the same computation, so hardly any rounding."""

MAX_THREADS = 16
"""With more, reading the weights from memory is no faster."""


@torch.no_grad()
def check_packing(policy: PolicyModel, path: str) -> None:
    """DataError if the packed log-probs of `policy` are not those of its own forward pass, one sequence at a time."""
    model, was_training = policy.huggingface, policy.training
    if getattr(model, "_is_stateful", False):
        raise _unsupported(model, path, "its layers carry a state from token to token")
    policy.eval()
    ids = torch.arange(14).view(2, 7) * 7919 % model.get_input_embeddings().weight.shape[0]
    mask = torch.ones_like(ids)
    mask[1, :2] = 0  # the second sequence is shorter, padded on the left
    with _idle_cores():
        try:
            ours = _packed_log_probs(policy, ids, mask)
            changed = _packed_log_probs(policy, torch.stack([ids[0].flip(0), ids[1]]), mask)
        except (TypeError, AttributeError, RuntimeError) as error:
            why = error.what if isinstance(error, QuadrigaError) else str(error).splitlines()[0]
            raise _unsupported(model, path, f"its forward pass does not take packed sequences: {why}") from error
        own = torch.stack([_own_log_probs(model, row[keep.bool()])[-ours.shape[1] :] for row, keep in zip(ids, mask)])
    scale = max(1.0, own.abs().max().item())
    if not (ours - own).abs().max().item() <= TOLERANCE * scale:
        raise _unsupported(model, path, f"packed log-probs {ours.tolist()} differ from its own {own.tolist()}")
    if not (ours[1] - changed[1]).abs().max().item() <= LEAK_TOLERANCE * scale:
        raise _unsupported(model, path, "one packed sequence changes the log-probs of the next")
    policy.train(was_training)


@contextmanager
def _idle_cores() -> Iterator[None]:
    """A worker on a GPU has one thread for the host. Here the whole model runs on the host, and the cores have nothing else
    to do."""
    before = torch.get_num_threads()
    if os.environ.get("QUADRIGA_DEVICE", "cpu") != "cpu":
        share = (os.cpu_count() or 1) // int(os.environ.get("RAY_LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(before, min(share, MAX_THREADS)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _packed_log_probs(policy: PolicyModel, ids: Tensor, mask: Tensor) -> Tensor:
    packed = pack_rows(ids, mask, mask[:, 3:]).to(policy.huggingface.device)
    return packed.unpack(policy(packed)["log_probs"]).cpu()


def _own_log_probs(model: Any, ids: Tensor) -> Tensor:
    """Log-probs of `ids[1:]`, by the model's own forward pass with its plainest attention."""
    model.set_attn_implementation("eager")
    try:
        logits = model(input_ids=ids.unsqueeze(0).to(model.device), use_cache=False).logits[0, :-1]
    finally:
        model.set_attn_implementation(PACKED_ATTENTION)
    return logits.float().log_softmax(-1).cpu().gather(1, ids[1:, None]).squeeze(1)


def _unsupported(model: Any, path: str, why: str) -> DataError:
    return DataError(
        f"{type(model).__name__} ({path}) cannot be trained by Quadriga: {why}",
        "use a decoder-only model with softmax attention, such as Llama, Qwen2, Qwen3, Mistral, Gemma or GPT-2",
    )
