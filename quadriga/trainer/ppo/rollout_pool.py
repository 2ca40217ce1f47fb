"""Rollout engines in a pool of their own: one that dies is replaced alone, and only its unfinished samples come again.

The trained state is in other processes, so nothing of it is lost with an engine. A new process takes the dead one's slot
and its weights are pushed again. Samples that had been fetched from the dead one are kept, the others are generated anew;
their random numbers depend on neither process nor time, so they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from quadriga.controller.calls import WorkersDied, WorkersLost
from quadriga.controller.dispatch import MODES, Dispatch
from quadriga.controller.single_calls import SingleCalls
from quadriga.errors import ResourceError
from quadriga.protocol import DataProto
from quadriga.rollout.interface import WeightsEcho
from quadriga.trainer.ppo.restarts import Restarts
from quadriga.workers.rollout_rows import FinishedSample
from quadriga.workers.weight_push import PushedWeights, require_held


class RolloutPool:
    """The engines of a run, called one by one.

    Args:
        group: their worker group, on Ray.
        push: `push(version)` puts the trained weights where engines find them.
        phase: `phase(name)` times what happens inside it.
        restarts: the deaths that are healed are counted there.
        alone: no other role lives in these processes. Else nobody is replaced, and a death is raised.
    """

    def __init__(
        self,
        group: Any,
        push: Callable[[int], PushedWeights],
        phase: Callable[[str], Any],
        restarts: Restarts,
        alone: bool,
    ) -> None:
        self._group, self._push, self._phase, self._restarts = group, push, phase, restarts
        self.heals = alone
        self._calls = SingleCalls(group)
        self._kept: dict[tuple[str, int], FinishedSample] = {}

    def hand_over_weights(self, version: int) -> list[WeightsEcho]:
        """Bring the trained weights to all engines. Returns what each of them, and the trainer, says it holds."""
        pushed = self._push(version)
        return [pushed.echo, *self._ask_all("take_weights", lambda rank: pushed)]

    def generate(self, request: DataProto) -> list[DataProto]:
        """The rows of each engine, padded as each likes; the last of them may be repeated to make the parts equal."""
        (parts,), *_ = MODES[Dispatch.DP_COMPUTE_PROTO].dispatch_fn(self._group, request)
        self._kept = {}
        asked: set[int] = set()

        def missing(rank: int) -> DataProto:
            columns = parts[rank].non_tensor_batch
            keys = [(uid, int(sample)) for uid, sample in zip(columns["uid"], columns["sample_index"])]
            finished = [self._kept[key] for key in keys if key in self._kept]
            parts[rank].meta_info = {**request.meta_info, "finished": finished}
            if rank in asked:
                self._restarts.samples_again += len(keys) - len(finished)
            asked.add(rank)
            return parts[rank]

        try:
            return self._ask_all("generate_sequences", missing, "gen", request.meta_info["version"])
        finally:
            self._kept = {}

    def keep(self, samples: Iterable[FinishedSample]) -> None:
        """Samples that have left their engine; called by another thread while `generate` waits."""
        self._kept.update({(s.uid, s.sample_index): s for s in samples})

    def stop_late(self) -> bool:
        """End the engines that have not answered, from any thread, so that they are replaced. False: it cannot be so."""
        return self.heals and self._calls.stop()

    # ---- inside ----

    def _ask_all(
        self, method: str, argument: Callable[[int], Any], phase: str | None = None, version: int | None = None
    ) -> list[Any]:
        """Every engine's answer to `method(argument(rank))`. One that dies on it is replaced and asked again.

        Args:
            version: of the weights that a new engine needs for it.
        """
        answers: dict[int, Any] = {}
        to_ask: Sequence[int] = range(self._group.world_size)
        while to_ask:
            for rank in to_ask:
                self._calls.start(rank, method, argument(rank))
            dead: dict[int, WorkersDied] = {}
            with self._phase(phase) if phase else nullcontext():
                while not dead and len(answers) < self._group.world_size:
                    for rank, answer in self._calls.answers().items():
                        (dead if isinstance(answer, WorkersDied) else answers)[rank] = answer
            if dead:
                self._replace(dead, version)
            to_ask = list(dead)
        return [answers[rank] for rank in range(self._group.world_size)]

    def _replace(self, dead: dict[int, WorkersDied], version: int | None) -> None:
        """New engines for those that died, with the weights of `version`. Where that fails, the death is raised."""
        death, ranks = next(iter(dead.values())), list(dead)
        if not self.heals or not self._restarts.left:
            raise death
        try:
            with self._phase("replace_rollout"):
                self._group.replace(ranks)
                self._ask(ranks, "join")
                self._ask(ranks, "init_model")
                if version is not None:
                    pushed = self._push(version)
                    require_held([pushed.echo, *self._ask(ranks, "take_weights", pushed)], version)
        except (WorkersLost, ResourceError) as error:
            raise death from error
        new = ", ".join(str(self._group.seats[rank]) for rank in ranks)
        again = " and generates the samples that are missing" if version is not None else ""
        self._restarts.count(death, f"{new} takes its place{again}")

    def _ask(self, ranks: Sequence[int], method: str, *args: Any) -> list[Any]:
        """The answers of some engines, while others are at their work; the first that dies is raised."""
        calls = SingleCalls(self._group)
        for rank in ranks:
            calls.start(rank, method, *args)
        answers: dict[int, Any] = {}
        while len(answers) < len(ranks):
            answers |= calls.answers()
        for answer in answers.values():
            if isinstance(answer, WorkersDied):
                raise answer
        return [answers[rank] for rank in ranks]
