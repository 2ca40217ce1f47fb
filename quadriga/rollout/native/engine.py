"""The native engine: continuous batching around the training module itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from quadriga.errors import WorkerError
from quadriga.models.fused import fuse
from quadriga.rollout.interface import Completion, Limits, Progress, Request, RolloutEngine, WeightsEcho, check_request
from quadriga.rollout.native.blocks import BlockPool
from quadriga.rollout.native.geometry import cache_shape, context_length, fitting_blocks, vocab_size
from quadriga.rollout.native.kv_cache import KVCache
from quadriga.rollout.native.probe import check_module
from quadriga.rollout.native.runner import Runner, Work
from quadriga.rollout.native.sampler import Needs, needs_of, sample
from quadriga.rollout.native.scheduler import Scheduler
from quadriga.rollout.native.sequence import Sequence
from quadriga.rollout.native.slots import NOT_FINITE, SlotTable
from quadriga.rollout.native.stop_strings import StopStrings
from quadriga.rollout.weights import checksum, copy_weights

_REASONS = {1: "stop", 2: "length"}
REUSES_ON_CUDA = False
"""Whether known beginnings of prompts are taken from the cache on CUDA too. It is written for both; on CUDA no test has run it."""


class NativeEngine(RolloutEngine):
    """Generates with a Hugging Face causal LM in place: same module, same weights, another attention.

    Args:
        module: the causal LM, or a member's part of one (`sharded.ShardedModel`): then every call is made in step by all members.
        eos_token_ids: tokens that end a response.
        tokenizer: needed for stop strings only.
        max_num_seqs: samples decoded together.
        max_num_batched_tokens: prompt tokens of one pass.
        max_model_len: longest prompt and response together; None: what the model was made for.
        kv_cache_tokens: size of the cache; None: `max_num_seqs` sequences of `max_model_len`, if memory allows.
        memory_fraction: share of the free memory that the cache may take.
        block_size: tokens of a cache block.
        check: prove with a few tokens that the module's own forward pass gives the same log-probs.
        enforce_eager: on CUDA, decode without CUDA graphs.
        recompute_on_update: when new weights come, samples in the middle compute their keys and values anew.
        reuses_prefixes: prompts that begin with tokens whose keys and values are still in the cache compute only the rest.
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
        kv_cache_tokens: int | None = None,
        memory_fraction: float = 0.5,
        block_size: int = 32,
        check: bool = True,
        enforce_eager: bool = False,
        recompute_on_update: bool = False,
        reuses_prefixes: bool = True,
    ) -> None:
        self.module, self.recompute_on_update = module, recompute_on_update
        self._sharded = getattr(module, "sharded", None)
        self.clock: Callable[[], float] = time.monotonic
        """Deadlines pass by it."""
        self.shape = cache_shape(module, block_size)
        fuse(module, self.shape.device)
        context = context_length(module)
        tokens = min(max_model_len or context, context)
        on_cuda = self.shape.device.type == "cuda"
        slots = max_num_seqs, vocab_size(module), tuple(eos_token_ids), self.shape.device
        self.table: Any = device_slots(*slots, tokens // block_size + 1) if on_cuda else SlotTable(*slots)
        wanted = max_num_seqs * (tokens // block_size + 1) if kv_cache_tokens is None else kv_cache_tokens // block_size
        self.pool = BlockPool(fitting_blocks(self.shape, wanted, memory_fraction, self._sharded))
        self.scheduler = Scheduler(
            self.pool,
            block_size,
            max_num_seqs,
            tokens,
            max_num_batched_tokens,
            on_preempt=self.table.save,
            on_device=on_cuda,
            closes_gaps=not self.shape.by_kernel,
            reuses=reuses_prefixes and (REUSES_ON_CUDA or not on_cuda),
        )
        self.stop_strings = StopStrings(tokenizer)
        self._limits = Limits(tokens, self.pool.num_blocks * block_size, self.table.vocab_size, tokenizer is not None)
        self._version = 0
        self._updates = 0
        self._computed_with: list[tuple[int, int]] = []
        """Where the weights were and how often they had changed, when the cache was last begun with."""
        self.use_program = True
        """On a CPU: compute by `Program` where it knows the module."""
        self._needs = Needs()
        self._work = Work()
        self._aborted: set[str] = set()
        self._next_deadline = math.inf
        self._settled: list[Completion] = []
        """Samples that were found finished when new weights came; they come out of the next step."""
        self.runner: Runner | None = None
        self.cuda: Any = None
        """The steps on a CUDA device, `CudaSteps`; they take the place of `runner`."""
        if on_cuda:
            # Whether graphs can hold the collectives of a set was never tried: its members decode without.
            self.cuda = cuda_steps(self, enforce_eager or self._sharded is not None)
        self.asleep = True
        self.wake()
        self._unproven = check
        if self._sharded is None:  # shards get their first weights later
            self._prove()

    @property
    def version(self) -> int:
        return self._version

    @property
    def capacity(self) -> int:
        return len(self.scheduler.tables)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and response together that can run."""
        return min(self._limits.context_tokens, self._limits.cache_tokens)

    def check(self, request: Request) -> None:
        check_request(request, self._limits)

    def submit(self, request: Request) -> None:
        """Queue the samples of `request`; see `RolloutEngine`. WorkerError if the engine sleeps or has other weights."""
        self.check(request)
        if self.asleep:
            raise WorkerError("the rollout engine is asleep", "call wake before submit")
        if request.version is not None and request.version != self._version:
            raise WorkerError(
                f"the rollout engine holds weights of version {self._version}, but {request.version} was asked for",
                "call update_weights after every optimiser step, before submit",
            )
        if self.idle:
            self._begin()
        params = request.params
        self.table.reserve(params.max_new_tokens, len(params.stop_token_ids))
        deadline = math.inf if request.deadline_s is None else self.clock() + request.deadline_s
        self._next_deadline = min(self._next_deadline, deadline)
        members = [Sequence(request, i, deadline) for i in request.sample_indices]
        self.scheduler.submit(members[0].prompt, members)

    def step(self) -> list[Completion]:
        """Give up what is to be given up, then one token for every running sample and a piece of the waiting prompts."""
        over, self._settled = self._settled, []
        if self._aborted or self.clock() >= self._next_deadline:
            over = over + self._give_up()
            self._next_deadline = self.scheduler.next_deadline()
        if self.idle:
            return over
        return over + (self._step() if self.cuda is None else self.cuda.step(self._version))

    def look(self, seen: Mapping[tuple[str, int], int]) -> list[Progress]:
        """See `RolloutEngine`. On CUDA it waits for the steps that were started, so it is not for every step."""
        watched = [
            (sequence, seen[name])
            for sequence in self.scheduler.running
            if (name := (sequence.request.request_id, sequence.sample_index)) in seen
        ]
        if not watched:
            return []
        news = self.table.read([sequence.slot for sequence, _ in watched], [start for _, start in watched])
        return [Progress(s.request.request_id, s.sample_index, *new) for (s, _), new in zip(watched, news) if new[0]]

    def clear(self) -> None:
        if not self.idle:
            self.scheduler.withdraw(lambda sequence: True)
            self.scheduler.forget()  # a pass may have broken off halfway: then blocks hold less than was noted
        self._settled = []
        self._aborted.clear()
        self._next_deadline = math.inf
        if self.cuda is not None:
            self.cuda.forget()

    def update_weights(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> WeightsEcho:
        """Take `weights` by name (None: the module's own have changed in place); see `RolloutEngine`.

        Samples in the middle keep the keys and values of the old weights, or with `recompute_on_update` compute them anew.
        """
        if not self.idle:
            self._begin_new_weights()
        if self._sharded is not None:
            echo = self._sharded.echo(version) if weights is None else self._sharded.take(version, weights)
        elif weights is not None:
            copy_weights(self.module, weights)
        self._version = version
        self._updates += 1
        self.scheduler.forget()
        if not self.idle:
            self._begin()
        if self._sharded is None:
            return WeightsEcho(version, checksum(self.module.named_parameters()))
        if self.idle:
            self._prove()
        return echo

    def _prove(self) -> None:
        """Once, that the engine computes what its module computes."""
        if self._unproven:
            slept, self._unproven = self.asleep, False
            self.wake()
            check_module(self)
            self.scheduler.forget()
            if slept:
                self.sleep()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; their samples come out of the next step with what they have."""
        self._aborted.update(request_ids)

    def sleep(self) -> None:
        """Give the cache's memory back."""
        self._must_be_idle("sleep was called")
        self.asleep, self.runner = True, None
        self.scheduler.forget()
        if self.cuda is not None:
            self.cuda.runner.sleep()

    def wake(self) -> None:
        """Make the cache anew. On CUDA, graphs that were captured before stay good."""
        if not self.asleep:
            return
        self.asleep = False
        if self.cuda is not None:
            self.cuda.runner.wake()
        else:
            cache = KVCache(self.shape, self.pool.num_blocks)
            self.runner = Runner(self.module, cache, self.scheduler, self.table, self._work)

    @property
    def windows(self) -> set[int | None]:
        """Sliding windows that decoding was asked for so far; None: no window."""
        runner = self.runner if self.cuda is None else self.cuda.runner
        return runner.windows if runner is not None else set()

    @property
    def computes_by_program(self) -> bool:
        """Whether the last generation was computed by `Program` rather than by the module."""
        return self.runner is not None and self.runner.program is not None

    def statistics(self) -> dict[str, float]:
        """What generation cost since the engine was made.

        `wasted_rows`: share of the computed rows that were padding; `wasted_blocks`: share of the cache blocks read in
        place that belonged to nobody; `preemptions`: how often a sample lost its blocks; `cached_tokens` and `prompt_tokens`:
        tokens of prompts, and those of them that were found in the cache or computed by a request beside it.
        """
        return {
            "wasted_rows": self._work.padding / max(1, self._work.rows),
            "wasted_blocks": self._work.gaps / max(1, self._work.blocks),
            "preemptions": float(self.scheduler.preemptions),
            "prompt_tokens": float(self.scheduler.prompt_tokens),
            "cached_tokens": float(self.scheduler.cached_tokens),
        }

    # ---- one step ----------------------------------------------------------------------------------------------------

    def _step(self) -> list[Completion]:
        """One token for every running sample, and a piece of the waiting prompts."""
        assert self.runner is not None
        batch = self.scheduler.schedule()
        logits, slots = self.runner.run(batch)
        if starting := [s for prefill in batch.starting for s in prefill.members]:
            self.table.load(starting)
            self._needs = needs_of(s.request.params for s in (*self.scheduler.running, *starting))
        where = torch.from_numpy(slots).to(self.shape.device)
        codes = self.table.append(where, sample(logits, self.table, where, self._needs))
        self.scheduler.advance(batch)
        return self._collect(codes.tolist())

    def _collect(self, codes: list[int]) -> list[Completion]:
        """Take the finished samples out; `codes` of `SlotTable.append` follow `scheduler.running`."""
        finished = []
        for sequence, code in zip(self.scheduler.running, codes, strict=True):
            if code == NOT_FINITE:
                raise WorkerError(
                    f"the model's logits for request {sequence.request.request_id} are not finite",
                    "the weights have diverged: go back to an earlier checkpoint and lower the learning rate",
                )
            if code or (sequence.request.params.stop_strings and self.stop_strings.ends(sequence, self.table)):
                finished.append((sequence, _REASONS.get(code, "stop_string")))
        for sequence, _ in finished:
            self.table.save(sequence)
        self.scheduler.finish(sequence for sequence, _ in finished)
        return [sequence.completion(reason, self._version) for sequence, reason in finished]

    def _give_up(self) -> list[Completion]:
        """Take out what was aborted or is past its deadline, as it is."""
        finished = [] if self.cuda is None else self.cuda.settle(self._version)
        now, aborted, self._aborted = self.clock(), self._aborted, set()

        def is_over(sequence: Sequence) -> bool:
            return sequence.request.request_id in aborted or sequence.deadline <= now

        for sequence in filter(is_over, self.scheduler.running):
            self.table.save(sequence)
        over = self.scheduler.withdraw(is_over)
        reasons = ("aborted" if s.request.request_id in aborted else "deadline" for s in over)
        return [*finished, *(s.completion(reason, self._version) for s, reason in zip(over, reasons, strict=True))]

    def _begin(self) -> None:
        """Before a generation, and before one goes on with new weights.

        Weights that changed in place without anybody telling the engine, as when a trainer's module is borrowed, are found out.
        """
        weights = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in self.module.parameters()]
        if weights != self._computed_with:
            self.scheduler.forget()
        self._computed_with = weights
        if self.runner is not None:
            self.runner.begin(self._updates, self.use_program)
        self.scheduler.same_bits = self.computes_by_program

    def _begin_new_weights(self) -> None:
        """Note which of the tokens so far are by the weights that go, and give up their keys and values if asked to."""
        if self.cuda is not None:
            self._settled += self.cuda.settle(self._version)
        sampled = self.table.count.tolist()
        for sequence in self.scheduler.running:
            sequence.close_run(self._version, sampled[sequence.slot])
        for prefill in (*self.scheduler.prefilling, *self.scheduler.waiting):
            for sequence in prefill.members:  # one that was preempted has tokens too
                sequence.close_run(self._version, len(sequence.tokens))
        if self.recompute_on_update:
            self.scheduler.preempt_all()

    @property
    def idle(self) -> bool:
        return not self._settled and (self.scheduler.idle if self.cuda is None else self.cuda.idle)

    def _must_be_idle(self, event: str) -> None:
        if not self.idle:
            raise WorkerError(f"{event} in the middle of a generation", "read generate to its end, or close it, first")


def device_slots(*arguments: Any) -> SlotTable:
    from quadriga.rollout.native.slots import DeviceSlots

    return DeviceSlots(*arguments)


def cuda_steps(engine: NativeEngine, eager: bool) -> Any:
    """What runs `engine` on a CUDA device."""
    from quadriga.rollout.native.cuda.runner import CudaRunner
    from quadriga.rollout.native.cuda.steps import CudaSteps
    from quadriga.rollout.native.kv_cache import CudaKVCache

    cache = CudaKVCache(engine.shape, engine.pool.num_blocks)
    runner = CudaRunner(engine.module, cache, engine.scheduler, engine.table, engine._work, eager)
    return CudaSteps(runner, engine.scheduler, engine.table, engine.stop_strings)
