"""The process of the engine: vLLM's, stepped by the slot that started it. `python -m quadriga.rollout.vllm.core SOCKET SHARED LIFE`.

It ends with the slot, however that ends: a thread waits for the end of the pipe whose other end only the slot holds.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

from quadriga.errors import ConfigError, QuadrigaError, WorkerError
from quadriga.rollout.interface import Completion, Request, SamplingParams
from quadriga.rollout.native.sequence import Sequence
from quadriga.rollout.native.stop_strings import holds_stop_string
from quadriga.rollout.vllm.messages import Clear, Done, Failed, Load, Open, Ready, Sleep, Step, Stepped

TURN_S = 0.02
"""A turn ends after so long, or with the first sample that is finished: the slot may want something else."""


class Core:
    """vLLM's engine, one turn at a time."""

    def __init__(self, order: Open, shared: int) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.sample.sampler import Sampler

        from quadriga.rollout.vllm.sampling import TwoLogProbs
        from quadriga.rollout.vllm.weights import keep_weights_replaceable, require_replaceable

        self._order, self._shared = order, shared
        if order.on_cpu:
            keep_weights_replaceable()
        arguments = EngineArgs(model=order.model, **order.arguments)
        self._llm: Any = LLMEngine.from_engine_args(arguments)
        self._core = self._llm.engine_core
        runner = self._llm.model_executor.driver_worker.model_runner
        if type(runner.sampler) is not Sampler:
            raise ConfigError(
                f"this vLLM samples with {type(runner.sampler).__name__}, whose log-probs are not known to Quadriga",
                "use a tested release of vLLM (quadriga doctor tells which)",
            )
        self._sampler = runner.sampler = TwoLogProbs()
        self._model = runner.model
        config = self._llm.model_config.hf_text_config
        require_replaceable(self._model, config)
        self._live: dict[str, Sequence] = {}
        self._aborted: set[str] = set()
        self._numbers = itertools.count()
        self._version, self._updates, self._asleep = 0, 0, False
        cache = self._llm.vllm_config.cache_config
        self.ready = Ready(
            int(config.vocab_size), int(self._llm.model_config.max_model_len), cache.num_gpu_blocks * cache.block_size
        )
        self._probe()

    # ---- what the slot orders ----

    def turn(self, order: Step) -> Stepped:
        """Take in, compute for a moment, give out."""
        for request in order.requests:
            self._submit(request)
        finished = self._give_up(set(order.aborted))
        until = time.monotonic() + TURN_S
        while self._live and not finished:
            finished = self._collect()
            if time.monotonic() >= until:
                break
        return Stepped(finished)

    def load(self, order: Load) -> Any:
        """Take new weights. Samples in the middle go on under them; no later request meets what older ones have cached."""
        from quadriga.rollout.vllm.weights import load

        if self._asleep and not self._order.on_cpu:
            self._llm.wake_up(["weights"])
        for sample in self._live.values():
            sample.close_run(self._version, len(sample.tokens))
        echo = load(self._model, order, self._shared)
        self._version, self._updates = order.version, self._updates + 1
        if not self._live or self._order.recompute_on_update:
            self._llm.reset_prefix_cache(reset_running_requests=bool(self._live))
        return echo

    def clear(self) -> Done:
        self._drop(list(self._live))
        return Done()

    def sleep(self, order: Sleep) -> Done:
        """Give the device's memory back, or take it again. On a CPU vLLM keeps its memory."""
        if self._asleep != (not order.wake) and not self._order.on_cpu:
            if order.wake:
                self._llm.wake_up()
            else:
                self._llm.sleep(1)
        self._asleep = not order.wake
        return Done()

    # ---- inside ----

    def _probe(self) -> None:
        """ConfigError if vLLM cannot compute this model on this device; some of that it finds only in its first step."""
        try:
            self._submit(Request("probe", [0], SamplingParams(max_new_tokens=2, ignore_eos=True)))
            while self._live:
                self._collect()
        except Exception as error:
            raise ConfigError(
                f"vLLM cannot generate with {type(self._model).__name__} on this device: {error}",
                "set actor_rollout_ref.rollout.name=native, which generates with the model's own code",
            ) from error
        self._llm.reset_prefix_cache()

    def _submit(self, request: Request) -> None:
        from vllm.inputs import tokens_input

        from quadriga.rollout.vllm.sampling import in_words_of_vllm

        deadline = math.inf if request.deadline_s is None else time.monotonic() + request.deadline_s
        for index in request.sample_indices:
            sample = Sequence(request, index, deadline)
            number = str(next(self._numbers))
            prompt = tokens_input(list(map(int, request.prompt_ids)), cache_salt=f"weights {self._updates}")
            params = in_words_of_vllm(sample, self._order.eos_token_ids)
            asked = self._llm.input_processor.process_inputs(number, prompt, params, supported_tasks=("generate",))
            self._core.add_request(asked)
            self._live[number] = sample
        self._note_needs()

    def _collect(self) -> list[Completion]:
        """One step of vLLM; the samples that it finishes."""
        finished, stopped = [], []
        for output in self._core.get_output().outputs:
            if (sample := self._live.get(output.request_id)) is None:
                continue  # it was given up a moment ago
            if output.new_token_ids:
                sample.tokens += output.new_token_ids
                told = output.new_logprobs.logprobs
                sample.log_probs += told[:, 0].tolist()
                sample.full_log_probs += told[:, 1].tolist()
                if not math.isfinite(sum(told[:, 1].tolist())):
                    raise WorkerError(
                        f"the model's logits for request {sample.request.request_id} are not finite",
                        "the weights have diverged: go back to an earlier checkpoint and lower the learning rate",
                    )
            params = sample.request.params
            reason = None if output.finish_reason is None else str(output.finish_reason)
            if params.stop_strings and reason in (None, "length") and self._holds_stop(sample):
                stopped += [output.request_id] if reason is None else []
                reason = "stop_string"
            if reason is None:
                continue
            if reason not in ("stop", "length", "stop_string"):
                raise WorkerError(
                    f"vLLM ended request {sample.request.request_id} with {reason!r}",
                    "this is a fault of the engine, not of your configuration: please report it",
                )
            del self._live[output.request_id]
            finished.append(sample.completion(reason, self._version))
        if stopped:
            self._core.abort_requests(stopped)
        if finished:
            self._note_needs()
        return finished

    def _holds_stop(self, sample: Sequence) -> bool:
        return holds_stop_string(self._order.tokenizer, sample.request.params, sample.tokens)

    def _give_up(self, aborted: set[str]) -> list[Completion]:
        """Take out what was aborted or is past its deadline, as it is."""
        now = time.monotonic()
        over = {n: s for n, s in self._live.items() if s.request.request_id in aborted or s.deadline <= now}
        self._drop(over)
        reasons = ("aborted" if s.request.request_id in aborted else "deadline" for s in over.values())
        return [s.completion(reason, self._version) for s, reason in zip(over.values(), reasons, strict=True)]

    def _drop(self, numbers: Iterable[str]) -> None:
        numbers = list(numbers)
        if not numbers:
            return
        self._core.abort_requests(numbers)
        for number in numbers:
            del self._live[number]
        self._note_needs()

    def _note_needs(self) -> None:
        from quadriga.rollout.vllm.sampling import alters

        self._sampler.alters = any(alters(sample.request.params) for sample in self._live.values())


def serve(connection: Connection, shared: int) -> None:
    """Answer orders, one after the other, until the slot hangs up."""
    core: Core | None = None
    while True:
        try:
            raw = connection.recv_bytes()
        except (EOFError, OSError):
            return  # the slot has hung up
        try:
            order = pickle.loads(raw)
            if isinstance(order, Open):
                core = Core(order, shared)
                answer: Any = core.ready
            else:
                assert core is not None
                answer = _obey(core, order)
        except QuadrigaError as error:
            answer = Failed(type(error).__name__, error.what, error.fix)
        except Exception as error:
            answer = Failed(type(error).__name__, str(error))
        connection.send(answer)


def _obey(core: Core, order: Any) -> Any:
    match order:
        case Step():
            return core.turn(order)
        case Load():
            return core.load(order)
        case Clear():
            return core.clear()
        case Sleep():
            return core.sleep(order)
    raise TypeError(f"no such order: {type(order).__name__}")


def _end_with(life: int) -> None:
    """Wait for the end of the pipe, then end this process and those that it started."""
    while os.read(life, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    socket, shared, life = map(int, sys.argv[1:])
    threading.Thread(target=_end_with, args=(life,), name="life", daemon=True).start()
    try:
        serve(Connection(socket), shared)
    except BaseException:
        traceback.print_exc()  # before the end, which would swallow it
        sys.stderr.flush()
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
