"""What may be said in `actor_rollout_ref.rollout.engine_kwargs.vllm`, and what does not go together with `rollout.name=vllm`."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from quadriga.config.schema import Config
from quadriga.config.typed import Problems

ROLLOUT = "actor_rollout_ref.rollout"
KEY = f"{ROLLOUT}.engine_kwargs.vllm"

_LOG_PROBS = "both log-probs are recorded, of the whole distribution and of the one that was sampled from"
_ONE_DEVICE = "a slot has one device, and a model is not split over slots"
OWNED = {
    "model": "actor_rollout_ref.model.path",
    "tokenizer": "actor_rollout_ref.model.tokenizer_path",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "seed": f"{ROLLOUT}.seed",
    "max_num_seqs": f"{ROLLOUT}.max_num_seqs",
    "max_num_batched_tokens": f"{ROLLOUT}.max_num_batched_tokens",
    "max_model_len": f"{ROLLOUT}.max_model_len",
    "gpu_memory_utilization": f"{ROLLOUT}.gpu_memory_utilization",
    "enforce_eager": f"{ROLLOUT}.enforce_eager",
    "enable_chunked_prefill": f"{ROLLOUT}.enable_chunked_prefill",
    "enable_sleep_mode": f"{ROLLOUT}.free_cache_engine",
}
"""Arguments of vLLM that have a key of their own."""
FIXED = {
    "load_format": "the weights are the trainer's",
    "skip_tokenizer_init": "token ids go in and out",
    "generation_config": "what ends a response is not the engine's to say",
    "override_generation_config": "it changes what is sampled",
    "logprobs_mode": _LOG_PROBS,
    "max_logprobs": _LOG_PROBS,
    "async_scheduling": "new weights come between two steps",
    "*quantization*": "it changes the weights that are sampled from",
    "enable_lora": "an adapter is merged into the weights before they are sent",
    "speculative_config": "log-probs are those of the policy alone",
    "tensor_parallel_size": _ONE_DEVICE,
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size*": "every slot has an engine of its own",
    "distributed_executor_backend": "the engine computes in one process",
    "worker_cls": "the weights are handed over to vLLM's own worker",
    "*logit*": "it changes what is sampled",
    "temperature": "it changes what is sampled",
    "top_*": "it changes what is sampled",
    "min_p": "it changes what is sampled",
    "*_penalty": "it changes what is sampled",
}
"""Arguments that cannot be set, and why."""


def argument_problems(arguments: Collection[str]) -> list[tuple[str, str]]:
    """What is wrong with the names in `engine_kwargs.vllm`, and what to do about each."""
    wrong = []
    for name in arguments:
        if name in OWNED:
            wrong.append((f"{KEY}.{name} has a key of its own", f"set {OWNED[name]} instead"))
        elif why := next((why for known, why in FIXED.items() if fnmatchcase(name, known)), None):
            wrong.append((f"{KEY}.{name} cannot be set: {why}", f"remove {KEY}.{name}"))
    return wrong


def report_vllm(config: Config, problems: Problems) -> None:
    """Note what vLLM is not to be told, and what it cannot do."""
    rollout = config.actor_rollout_ref.rollout
    for what, fix in argument_problems(rollout.engine_kwargs.vllm):
        problems.add(what, fix)
    if rollout.name != "vllm":
        return
    if rollout.tensor_model_parallel_size > 1:
        problems.add(
            f"{ROLLOUT}.tensor_model_parallel_size={rollout.tensor_model_parallel_size} with {ROLLOUT}.name=vllm: a vLLM "
            "engine has one device here",
            f"set it to 1, or {ROLLOUT}.name=native, which shares a model out over neighbouring slots",
        )
    longest = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        problems.add(
            f"{ROLLOUT}.max_model_len={rollout.max_model_len} is shorter than a prompt of data.max_prompt_length="
            f"{rollout.prompt_length} and a response of data.max_response_length={rollout.response_length}",
            f"remove it, or set it to {longest} or more",
        )
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < longest:
        problems.add(
            f"{ROLLOUT}.enable_chunked_prefill=False takes a prompt in one step, but {ROLLOUT}.max_num_batched_tokens="
            f"{rollout.max_num_batched_tokens} is less than the {longest} tokens of the longest sequence",
            f"set {ROLLOUT}.max_num_batched_tokens={longest}, or {ROLLOUT}.enable_chunked_prefill=True",
        )
