"""A proof, when the engine starts, that it computes what the module's own forward pass computes.

Architectures differ in more ways than a list of names could say. So two prompts are continued by a few tokens, and a
module whose own attention gives other log-probs for them is refused.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quadriga.errors import ConfigError, WorkerError
from quadriga.rollout.interface import Request, SamplingParams
from quadriga.rollout.native.geometry import UNSUPPORTED_FIX

if TYPE_CHECKING:
    from quadriga.rollout.native.engine import NativeEngine

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest difference of a log-prob; other dtypes: 0.2. A wrong mask, scale or position is far above."""


def check_module(engine: NativeEngine) -> None:
    """ConfigError if `engine` gives other log-probs than its module; a `Program` that does is not used."""
    allowed = TOLERANCE.get(engine.shape.dtype, 0.2)
    name = type(engine.module).__name__
    try:
        gap = _largest_gap(engine)
    except WorkerError:  # logits that are not finite
        if not engine.computes_by_program:
            raise
        gap = math.inf
    if not gap <= allowed and engine.computes_by_program:
        logging.getLogger(__name__).warning(
            "the program for CPUs differs by %.2g from %s itself, which computes instead, more slowly", gap, name
        )
        engine.use_program = False
        gap = _largest_gap(engine)
    if not gap <= allowed:
        raise ConfigError(
            f"the native engine gives log-probs that differ by {gap:.2g} from those of {name} itself", UNSUPPORTED_FIX
        )


def _largest_gap(engine: NativeEngine) -> float:
    """Difference of a log-prob between the engine and the module, in a few tokens of two prompts."""
    module, name = engine.module, type(engine.module).__name__
    cached = engine.scheduler.tables.shape[1] * engine.shape.block_size
    room = min(engine.shape.block_size + 5, cached - 4, engine._limits.context_tokens - 3)
    vocab = engine.table.vocab_size
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    prompts = [[(7919 * i + row) % vocab for i in range(length)] for row, length in enumerate((room, 3)) if length > 0]
    requests = [Request(f"probe{i}", ids, params, sample_indices=(0, 1)) for i, ids in enumerate(prompts)]
    try:
        completions = list(engine.generate(requests))
    except (TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{name} cannot be called with paged attention: {error}", UNSUPPORTED_FIX) from error
    kinds = getattr(module.config.get_text_config(), "layer_types", None) or ()
    if "sliding_attention" in kinds and engine.windows == {None}:
        raise ConfigError(f"{name} has sliding windows that its attention is not told of", UNSUPPORTED_FIX)
    gaps = [torch.zeros(1)]
    for completion in completions:
        prompt = prompts[int(completion.request_id.removeprefix("probe"))]
        own = _own_log_probs(module, prompt, completion.token_ids)
        gaps.append((own - torch.tensor(completion.full_log_probs)).abs())
    return torch.cat(gaps).max().item()


@torch.no_grad()
def _own_log_probs(module: Any, prompt: list[int], response: list[int]) -> Tensor:
    """Log-probs of `response` by the module's own forward pass, with its plainest attention."""
    before, training = module.config._attn_implementation, module.training
    module.config._attn_implementation = "eager"
    module.eval()
    try:
        ids = torch.tensor([prompt + response], device=next(module.parameters()).device)
        logits = module(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    finally:
        module.config._attn_implementation = before
        module.train(training)
    return logits.float().log_softmax(-1).cpu().gather(1, torch.tensor(response)[:, None]).squeeze(1)
