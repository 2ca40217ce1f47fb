"""vLLM as a rollout engine: what the slot holds of it. The engine itself computes in a process of its own (`core`)."""

from __future__ import annotations

import logging
import os
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quadriga.config.vllm import argument_problems, require_usable
from quadriga.errors import ConfigError, ResourceError, WorkerError
from quadriga.rollout.interface import Completion, Limits, Request, RolloutEngine, WeightsEcho, check_request
from quadriga.rollout.vllm.messages import Clear, Load, Open, Placed, Ready, Sleep, Step
from quadriga.rollout.vllm.process import EngineGone, EngineProcess

logger = logging.getLogger(__name__)

START_S = 600.0
"""An engine must be up within; on a GPU vLLM compiles and captures graphs."""
ANSWER_S = 300.0
"""It must answer within: a step, new weights, sleep. What takes longer hangs, and is replaced."""
REPLACEMENTS = 3
"""So often in the life of an engine."""
CPU_BLOCK = 128
"""Tokens of a cache block of vLLM on a CPU."""


@dataclass
class _Asked:
    """A request that is under way."""

    request: Request
    missing: set[int]
    began: float


class VllmEngine(RolloutEngine):
    """vLLM behind the contract. Its process dies with this one; when it dies or hangs by itself, a new one takes its place,
    takes the weights that lie in the memory both share, and generates what was missing. A sample's random numbers depend on
    neither process nor time.

    Args:
        module: the causal LM, for its configuration alone.
        eos_token_ids: tokens that end a response.
        tokenizer: needed for stop strings only.
        max_num_seqs: samples decoded together.
        max_num_batched_tokens: prompt tokens of one pass.
        max_model_len: longest prompt and response together; None: what the model was made for.
        device: `cpu` or `cuda`.
        memory_fraction: on a GPU the share of its memory for the engine; on a CPU the cache's share of the free memory.
        enforce_eager: without compilation and CUDA graphs; on a CPU always.
        enable_chunked_prefill: long prompts in several steps.
        recompute_on_update: when new weights come, samples in the middle compute their keys and values anew.
        trust_remote_code: of the model.
        engine_kwargs: more arguments of vLLM's engine.
        answer_s: an answer of the process must come within so many seconds, else it is replaced.
    """

    def __init__(
        self,
        module: Any,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Any = None,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        device: str = "cpu",
        memory_fraction: float = 0.5,
        enforce_eager: bool = False,
        enable_chunked_prefill: bool = True,
        recompute_on_update: bool = False,
        trust_remote_code: bool = False,
        engine_kwargs: Mapping[str, Any] | None = None,
        answer_s: float = ANSWER_S,
    ) -> None:
        require_usable()
        extra = dict(engine_kwargs or {})
        if wrong := argument_problems(extra):
            raise ConfigError(*wrong[0])
        self._config = _config_of(module)
        self._capacity, self._answer_s = max_num_seqs, answer_s
        on_cpu = device == "cpu"
        arguments: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "async_scheduling": False,
            "disable_log_stats": True,
            "dtype": "float32" if on_cpu else "bfloat16",
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max(max_num_batched_tokens, max_num_seqs),
            "max_model_len": max_model_len,
            "enforce_eager": enforce_eager or on_cpu,
            "enable_chunked_prefill": enable_chunked_prefill,
            "trust_remote_code": trust_remote_code,
        }
        if not enable_chunked_prefill and max_model_len is not None:
            arguments["max_num_batched_tokens"] = max(arguments["max_num_batched_tokens"], max_model_len)
        if on_cpu:
            longest = max_model_len or self._config.get_text_config().max_position_embeddings
            arguments["kv_cache_memory_bytes"] = cpu_cache_bytes(self._config, max_num_seqs, longest, memory_fraction)
        else:
            arguments |= {"gpu_memory_utilization": memory_fraction, "enable_sleep_mode": True}
        self._open = Open("", arguments | extra, on_cpu, tuple(eos_token_ids), tokenizer, recompute_on_update)
        self._shared = os.memfd_create("weights of the rollout engine")
        self._version = 0
        self._load: Load | None = None
        self._asleep = False
        self._asked: dict[str, _Asked] = {}
        self._outbox: list[Request] = []
        self._aborted: set[str] = set()
        self.replaced = 0
        """Processes that died or hung and were replaced."""
        self.start_s = 0.0
        """Seconds that the newest process took to be ready."""
        try:
            self._process, ready = self._start()
        except EngineGone as gone:
            raise WorkerError(
                f"vLLM's engine process {gone}", "the lines above are its own; see docs/engines.md"
            ) from None
        self._close = weakref.finalize(self, _end, [self._process], self._shared)
        self._limits = Limits(ready.context_tokens, ready.cache_tokens, ready.vocab_size, tokenizer is not None)

    @property
    def version(self) -> int:
        return self._version

    @property
    def idle(self) -> bool:
        return not self._asked

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def longest(self) -> int:
        return min(self._limits.context_tokens, self._limits.cache_tokens)

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    def check(self, request: Request) -> None:
        check_request(request, self._limits)

    def submit(self, request: Request) -> None:
        self.check(request)
        if self._asleep:
            raise WorkerError("the rollout engine is asleep", "call wake before submit")
        if self._load is None or request.version not in (None, self._version):
            held = "no weights yet" if self._load is None else f"weights of version {self._version}"
            raise WorkerError(
                f"the rollout engine holds {held}, but {request.version if self._load else 'some'} were asked for",
                "call update_weights after every optimiser step, before submit",
            )
        self._asked[request.request_id] = _Asked(request, set(request.sample_indices), time.monotonic())
        self._outbox.append(request)

    def step(self) -> list[Completion]:
        if self.idle:
            return []
        aborted, self._aborted = self._aborted, set()
        try:
            requests, self._outbox = self._outbox, []
            finished = self._process.ask(Step(requests, sorted(aborted)), self._answer_s).finished
        except EngineGone as gone:
            self._replace(gone)
            self._aborted |= aborted
            return []
        for completion in finished:
            asked = self._asked[completion.request_id]
            asked.missing.remove(completion.sample_index)
            if not asked.missing:
                del self._asked[completion.request_id]
        return finished

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> WeightsEcho:
        """Take `weights` by name; see `RolloutEngine`. None is a WorkerError: this engine shares no module."""
        if weights is None:
            raise WorkerError("vLLM has weights of its own", "give update_weights the weights by name")
        self._load = self._put(version, weights)
        self._version = version
        try:
            return self._process.ask(self._load, self._answer_s)
        except EngineGone as gone:
            return self._replace(gone)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._aborted.update(request_ids)

    def clear(self) -> None:
        self._asked.clear()
        self._outbox.clear()
        self._aborted.clear()
        self._order(Clear())

    def sleep(self) -> None:
        if not self.idle:
            raise WorkerError(
                "sleep was called in the middle of a generation", "read generate to its end, or close it, first"
            )
        if not self._asleep:
            self._asleep = True
            self._order(Sleep())

    def wake(self) -> None:
        if self._asleep:
            self._asleep = False
            self._order(Sleep(wake=True))

    def statistics(self) -> dict[str, float]:
        """`replaced`: processes that died or hung and were replaced; `start_s`: how long the newest took to be ready."""
        return {"replaced": float(self.replaced), "start_s": self.start_s}

    def close(self) -> None:
        """End the process. The end of this object, or of the slot's process, does the same."""
        self._close()

    # ---- inside ----

    def _start(self) -> tuple[EngineProcess, Ready]:
        """A process that is ready to take weights."""
        began = time.monotonic()
        process = EngineProcess(self._shared, torch.get_num_threads())
        try:
            with tempfile.TemporaryDirectory(prefix="quadriga-vllm-") as folder:
                self._config.save_pretrained(folder)
                ready = process.ask(replace(self._open, model=folder), START_S)
        except BaseException as error:
            words = process.last_words()
            process.close()
            if isinstance(error, EngineGone):
                raise EngineGone(f"{error} while it started; it said last:\n{words}") from None
            raise
        self.start_s = time.monotonic() - began
        return process, ready

    def _order(self, order: Any) -> None:
        try:
            self._process.ask(order, self._answer_s)
        except EngineGone as gone:
            self._replace(gone)

    def _replace(self, gone: EngineGone) -> WeightsEcho:
        """A new process in place of one that is gone, with the same weights and everything that is not finished."""
        words = self._process.last_words()
        self._process.close()
        if self.replaced >= REPLACEMENTS:
            raise WorkerError(
                f"vLLM's engine process {gone}; {self.replaced} were replaced before it. It said last:\n{words}",
                "look for what kills it (dmesg tells of the kernel's), or set actor_rollout_ref.rollout.name=native",
            )
        self.replaced += 1
        logger.warning("vLLM's engine process %s (pid %d); a new one takes its place. %s", gone, self.pid, words)
        try:
            self._process, _ = self._start()
            self._close.detach()
            self._close = weakref.finalize(self, _end, [self._process], self._shared)
            echo = WeightsEcho(0, 0)
            if self._load is not None:
                echo = self._process.ask(self._load, self._answer_s)
            if self._asleep:
                self._process.ask(Sleep(), self._answer_s)
        except EngineGone as again:
            return self._replace(again)
        self._outbox = [self._rest(asked) for asked in self._asked.values()]
        return echo

    def _rest(self, asked: _Asked) -> Request:
        """What is missing of a request, with the time that is left for it."""
        left = asked.request.deadline_s
        if left is not None:
            left = max(0.0, left - (time.monotonic() - asked.began))
        return replace(asked.request, sample_indices=tuple(sorted(asked.missing)), deadline_s=left)

    def _put(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> Load:
        """Write weights into the shared memory."""
        placed, offset = [], 0
        try:
            for name, weight in weights:
                raw = weight.detach().to("cpu").contiguous()
                placed.append(Placed(name, raw.dtype, tuple(raw.shape), offset))
                view = raw.view(-1).view(torch.uint8).numpy().data
                while view:
                    written = os.pwrite(self._shared, view, offset)
                    view, offset = view[written:], offset + written
        except OSError as error:
            raise ResourceError(
                f"there is no memory for a copy of the weights, {offset:,} bytes in: {error}",
                "an engine beside the trainer takes its weights through host memory: give the node more of it",
            ) from None
        return Load(version, placed, offset)


def cpu_cache_bytes(config: Any, sequences: int, tokens: int, fraction: float) -> int:
    """Bytes of a cache in float32 for `sequences` of `tokens`, but not over its share of the memory that is free now."""
    import psutil

    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    blocks = sequences * (-(-tokens // CPU_BLOCK) + 1)
    wanted = blocks * CPU_BLOCK * text.num_hidden_layers * 2 * heads * width * 4
    free = psutil.virtual_memory().available
    return min(wanted, int(free * fraction))


def _config_of(module: Any) -> Any:
    """A copy of the module's configuration, with the name of a class, which is how vLLM finds its own."""
    import copy

    config = copy.deepcopy(module.config)
    config.architectures = config.architectures or [type(module).__name__.removeprefix("FSDP")]
    return config


def _end(processes: list[EngineProcess], shared: int) -> None:
    for process in processes:
        process.close()
    os.close(shared)
