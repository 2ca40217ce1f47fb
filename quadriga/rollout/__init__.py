"""Generation: prompts in, completions with the log-prob of every sampled token out.

from quadriga.rollout import Request, SamplingParams, create_engine
engine = create_engine("native", module=model, eos_token_ids=[tokenizer.eos_token_id])
request = Request("r0", prompt_ids=tokenizer("Two and two is").input_ids, params=SamplingParams(max_new_tokens=16))
for completion in engine.generate([request]):
    print(tokenizer.decode(completion.token_ids), sum(completion.log_probs))
"""

from __future__ import annotations

from quadriga.rollout.interface import (
    Completion,
    Request,
    RolloutEngine,
    SamplingParams,
    WeightsEcho,
    create_engine,
    register_engine,
)

__all__ = [
    "Completion",
    "Request",
    "RolloutEngine",
    "SamplingParams",
    "WeightsEcho",
    "create_engine",
    "register_engine",
]
