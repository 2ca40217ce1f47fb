"""What may be asked of the sampler, checked when it is written down."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quadriga.errors import ConfigError


@dataclass(frozen=True)
class SamplingParams:
    """How one prompt is continued. An impossible value is a ConfigError that names the key.

    Order of the transforms: repetition penalty, stop tokens barred until `min_new_tokens`, temperature, top-k, top-p
    of what top-k left, min-p. Tokens as likely as the last one kept are kept too.
    """

    temperature: float = 1.0
    """Divisor of the logits; 0 means greedy."""
    top_p: float = 1.0
    """Keep the likeliest tokens up to this mass; 1: all."""
    top_k: int = -1
    """Keep the k likeliest tokens; -1 or 0: all."""
    min_p: float = 0.0
    """Keep tokens at least this likely, relative to the likeliest; 0: all."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in the prompt or the response; 1: none."""
    do_sample: bool = True
    """False: greedy."""
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    """No stop token is sampled before this many tokens."""
    ignore_eos: bool = False
    """Do not stop at the model's end tokens (`stop_token_ids` still stop)."""
    stop_token_ids: tuple[int, ...] = ()
    """More tokens that end the response; the stop token is its last token."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end the response; needs an engine with a tokenizer. The tokens that hold the text are kept."""
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(int(t) for t in self.stop_token_ids))
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "0 or more"
        )
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0, at most 1")
        _require(self.top_k >= -1, "top_k", self.top_k, "-1 (all) or a count")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        penalty = self.repetition_penalty
        _require(math.isfinite(penalty) and penalty > 0, "repetition_penalty", penalty, "above 0")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "1 or more")
        fits = 0 <= self.min_new_tokens <= self.max_new_tokens
        _require(fits, "min_new_tokens", self.min_new_tokens, f"from 0 to max_new_tokens={self.max_new_tokens}")
        _require(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "token ids")
        _require(all(self.stop_strings), "stop_strings", self.stop_strings, "texts of at least one character")

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0

    @property
    def scale_temperature(self) -> float:
        """Divisor of the logits in every log-prob; greedy tokens are scored at temperature 1."""
        return 1.0 if self.greedy else self.temperature


def _require(holds: bool, key: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{key}={value!r} cannot be sampled with", f"set {key} to {wanted}")
