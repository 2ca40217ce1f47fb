"""The native engine: continuous batching around the training module itself."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quadriga.errors import ConfigError, DataError, WorkerError
from quadriga.rollout.interface import Completion, Request, WeightsEcho
from quadriga.rollout.native.blocks import BlockPool
from quadriga.rollout.native.geometry import cache_shape, context_length, vocab_size
from quadriga.rollout.native.kv_cache import KVCache
from quadriga.rollout.native.runner import Runner
from quadriga.rollout.native.sampler import Needs, sample
from quadriga.rollout.native.scheduler import Scheduler
from quadriga.rollout.native.sequence import Sequence
from quadriga.rollout.native.slots import SlotTable
from quadriga.rollout.native.weights import checksum, copy_weights
from quadriga.rollout.sampling import SamplingParams

_REASONS = {1: "stop", 2: "length"}


class NativeEngine:
    """Generates with a Hugging Face causal LM in place: same module, same weights, another attention.

    Args:
        module: the causal LM.
        eos_token_ids: tokens that end a response.
        max_num_seqs: samples decoded together.
        max_num_batched_tokens: prompt tokens of one pass.
        max_model_len: longest prompt and response together; None: what the model was made for.
        kv_cache_tokens: size of the cache; None: `max_num_seqs` sequences of `max_model_len`, if memory allows.
        block_size: tokens of a cache block.
    """

    def __init__(
        self,
        module: Any,
        eos_token_ids: Iterable[int] = (),
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        kv_cache_tokens: int | None = None,
        block_size: int = 32,
    ) -> None:
        self.module = module
        self.shape = cache_shape(module, block_size)
        self.max_model_len = min(max_model_len or context_length(module), context_length(module))
        self.table = SlotTable(max_num_seqs, vocab_size(module), tuple(eos_token_ids), self.shape.device)
        self._version = 0
        self._aborted: set[str] = set()
        self._next_deadline = math.inf
        self._needs = Needs()
        blocks_per_sequence = self.max_model_len // block_size + 1
        num_blocks = max_num_seqs * blocks_per_sequence
        if kv_cache_tokens is not None:
            num_blocks = kv_cache_tokens // block_size
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            self.pool, block_size, max_num_seqs, self.max_model_len, max_num_batched_tokens, self.table.save
        )
        self.runner: Runner | None = None
        self.wake()

    @property
    def version(self) -> int:
        return self._version

    def generate(self, requests: Iterable[Request], expected_version: int | None = None) -> Iterator[Completion]:
        """Completions as they finish, in no fixed order. WorkerError if the weights are not `expected_version`."""
        if expected_version is not None and expected_version != self._version:
            raise WorkerError(
                f"the rollout engine holds weights of version {self._version}, but {expected_version} was asked for",
                "call update_weights after every optimiser step, before generate",
            )
        for request in requests:
            self._submit(request)
        try:
            while not self.scheduler.idle:
                yield from self._withdraw()
                if not self.scheduler.idle:
                    yield from self.step()
        finally:
            self.scheduler.withdraw(lambda sequence: True)

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> WeightsEcho:
        """Take `weights` by name (None: the module's own have changed in place); see `RolloutEngine`."""
        if not self.scheduler.idle:
            raise WorkerError(
                "new weights came while samples are being generated", "let generate end, or abort its requests first"
            )
        if weights is not None:
            copy_weights(self.module, weights)
        self._version = version
        return WeightsEcho(version, checksum(self.module.named_parameters()))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; their samples come out of `generate` with what they have."""
        self._aborted.update(request_ids)

    def sleep(self) -> None:
        """Give the cache's memory back. WorkerError in the middle of a generation."""
        if not self.scheduler.idle:
            raise WorkerError("the rollout engine was put to sleep in the middle of a generation", "let generate end")
        self.runner = None

    def wake(self) -> None:
        """Make the cache anew."""
        if self.runner is None:
            cache = KVCache(self.shape, self.pool.num_blocks)
            self.runner = Runner(self.module, cache, self.scheduler, self.table)

    # ---- one step ----------------------------------------------------------------------------------------------------

    def step(self) -> list[Completion]:
        """One token for every running sample, and a piece of the waiting prompts."""
        assert self.runner is not None
        batch = self.scheduler.schedule()
        logits, slots = self.runner.run(batch)
        if starting := [s for prefill in batch.starting for s in prefill.members]:
            self.table.load(starting)
            self._needs = needs_of([s.request.params for s in (*self.scheduler.running, *starting)])
        where = torch.from_numpy(slots).to(self.shape.device)
        sampled = sample(logits, self.table, where, self._needs)
        codes = self.table.append(where, sampled.tokens, sampled.log_probs, sampled.full_log_probs)
        self.scheduler.advance(batch)
        return self._collect(codes.tolist())

    def _collect(self, codes: list[int]) -> list[Completion]:
        """Take the finished samples out; `codes` follows `scheduler.running`."""
        finished = [(s, _REASONS[code]) for s, code in zip(self.scheduler.running, codes, strict=True) if code]
        return self._complete(finished)

    def _complete(self, finished: list[tuple[Sequence, str]]) -> list[Completion]:
        for sequence, _ in finished:
            if sequence.slot >= 0:
                self.table.save(sequence)
        self.scheduler.finish([sequence for sequence, _ in finished])
        return [
            Completion(
                s.request.request_id,
                s.request.uid,
                s.sample_index,
                s.tokens,
                s.log_probs,
                s.full_log_probs,
                reason,
                self._version,
            )
            for s, reason in finished
        ]

    def _withdraw(self) -> list[Completion]:
        """Take out what was aborted or is past its deadline, as it is."""
        now, aborted = time.monotonic(), self._aborted
        if not aborted and now < self._next_deadline:
            return []
        is_over = lambda s: s.request.request_id in aborted or s.deadline <= now  # noqa: E731
        for sequence in self.scheduler.running:
            if is_over(sequence):
                self.table.save(sequence)
        gone = self.scheduler.withdraw(is_over)
        self._aborted = set()
        reasons = ["aborted" if s.request.request_id in aborted else "deadline" for s in gone]
        return self._complete(list(zip(gone, reasons, strict=True)))

    def _submit(self, request: Request) -> None:
        """Queue `request`, or say why it can never run."""
        params, prompt = request.params, np.asarray(request.prompt_ids, np.int64)
        if prompt.ndim != 1 or not prompt.size:
            raise DataError(f"request {request.request_id}: its prompt has no tokens", "give at least one token")
        if prompt.min() < 0 or prompt.max() >= self.table.vocab_size:
            raise DataError(
                f"request {request.request_id}: token {int(prompt.max())} is outside the vocabulary of "
                f"{self.table.vocab_size}",
                "use the tokenizer that belongs to the model",
            )
        longest = prompt.size + params.max_new_tokens
        if longest > self.max_model_len:
            raise DataError(
                f"request {request.request_id}: a prompt of {prompt.size} tokens and max_new_tokens="
                f"{params.max_new_tokens} do not fit into the context of {self.max_model_len}",
                "shorten the prompt (data.max_prompt_length) or the response (data.max_response_length)",
            )
        if self.scheduler.blocks_for(longest - 1) > self.pool.num_blocks:
            raise ConfigError(
                f"request {request.request_id} may need {longest} tokens of cache, but only "
                f"{self.pool.num_blocks * self.shape.block_size} fit",
                "raise actor_rollout_ref.rollout.gpu_memory_utilization, or shorten data.max_response_length",
            )
        self.table.reserve(params.max_new_tokens, len(params.stop_token_ids))
        deadline = math.inf if request.deadline_s is None else time.monotonic() + request.deadline_s
        self._next_deadline = min(self._next_deadline, deadline)
        self.scheduler.submit(prompt, [Sequence(request, i, deadline) for i in request.sample_indices])


def needs_of(params: Iterable[SamplingParams]) -> Needs:
    """Which transforms of the sampler these parameters ask for."""
    params = set(params)
    return Needs(
        temperature=any(p.scale_temperature != 1 for p in params),
        greedy=any(p.greedy for p in params),
        truncation=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
        penalty=any(p.repetition_penalty != 1 for p in params),
        min_new=any(p.min_new_tokens > 0 for p in params),
    )
