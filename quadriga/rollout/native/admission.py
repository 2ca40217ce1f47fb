"""Whether a request can ever run."""

from __future__ import annotations

from dataclasses import dataclass

from quadriga.errors import ConfigError, DataError
from quadriga.rollout.interface import Request


@dataclass(frozen=True)
class Limits:
    context_tokens: int
    """Longest sequence."""
    cache_tokens: int
    """Size of the whole cache."""
    vocab_size: int
    has_tokenizer: bool


def check_request(request: Request, limits: Limits) -> None:
    """DataError or ConfigError that says why `request` cannot run within `limits`."""
    name, prompt, params = f"request {request.request_id}", len(request.prompt_ids), request.params
    if not prompt or not request.sample_indices:
        raise DataError(f"{name} has no {'samples' if prompt else 'prompt tokens'}", "ask for at least one")
    low, high = min(request.prompt_ids), max(request.prompt_ids)
    if low < 0 or high >= limits.vocab_size:
        raise DataError(
            f"{name}: token {low if low < 0 else high} is outside the vocabulary of {limits.vocab_size}",
            "use the tokenizer that belongs to the model",
        )
    longest = prompt + params.max_new_tokens
    if longest > limits.context_tokens:
        raise DataError(
            f"{name}: a prompt of {prompt} tokens and max_new_tokens={params.max_new_tokens} do not fit into a context "
            f"of {limits.context_tokens} tokens",
            "shorten the prompt (data.max_prompt_length) or the response (data.max_response_length)",
        )
    if longest > limits.cache_tokens:
        raise ConfigError(
            f"{name} may grow to {longest} tokens, but the whole KV cache holds {limits.cache_tokens}",
            "raise actor_rollout_ref.rollout.gpu_memory_utilization or shorten data.max_response_length",
        )
    if params.stop_strings and not limits.has_tokenizer:
        raise ConfigError(f"{name} has stop_strings, but the engine has no tokenizer", "give it one: tokenizer=…")
