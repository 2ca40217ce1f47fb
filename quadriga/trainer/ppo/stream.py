"""The stream of groups that training takes from: prompts go in, groups come out, generated and scored.

Everything that is drawn from the dataset is drawn by the driver's own thread, in the order of its program. So which prompts a
step gets, and by which weights they are answered, depends on no timing; what does (who answers first) is put in order again
before anybody sees it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from quadriga.agents.episode import DONE, Episode
from quadriga.config.schema import AsyncTrainingConfig
from quadriga.data.loader import BatchLoader
from quadriga.errors import CheckpointError, QuadrigaError
from quadriga.protocol import DataProto
from quadriga.rewards.result import WRONG, RewardResult
from quadriga.rollout.interface import Request, SamplingParams
from quadriga.rollout.router import Router
from quadriga.rollout.service import Sample
from quadriga.trainer.ppo.episodes import Episodes
from quadriga.trainer.ppo.groups import Group, as_table, from_table, staleness
from quadriga.trainer.ppo.scoring import can_stream, scored_by_agent


@dataclass(frozen=True)
class Window:
    """When what may start: the whole difference between synchronous, ordered and free training.

    Args:
        ahead: steps that generation may run ahead of training; 0: a step's prompts go out when training asks for them.
        ordered: groups are trained on in the order of the dataset, and those of a step come from the weights `ahead` steps
            before the ones that it changes. Else from whatever weights are newest, in the order in which they are finished.
    """

    ahead: int
    ordered: bool

    @classmethod
    def of(cls, config: AsyncTrainingConfig) -> Window:
        return cls(config.staleness, config.mode == "ordered" or config.staleness == 0)

    def version_for(self, step: int) -> int | None:
        """The weights that the groups of a step must come from; None: any. Version k is the policy after k steps."""
        return max(0, step - 1 - self.ahead) if self.ordered else None

    def may_draw(self, next_step: int, version: int, groups_ahead: int, lot_size: int) -> bool:
        """Whether the prompts of `next_step` may go out before training asks for them.

        Args:
            version: the newest weights.
            groups_ahead: groups that were drawn and not yet trained on.
        """
        if self.ordered:
            return self.ahead > 0 and next_step <= version + 1 + self.ahead
        return groups_ahead <= self.ahead * lot_size


@dataclass(eq=False)
class Lot:
    """Groups that were drawn together, a batch of the loader, and how much of them is still to come."""

    groups: list[Group]
    epoch: int
    generating: int
    incomplete: int


class Scorer(Protocol):
    """A reward manager, as far as the stream knows it."""

    @property
    def pool(self) -> Any: ...

    def samples_of(self, data: DataProto, rows: Sequence[int], responses: list[list[int]]) -> list[Any]: ...


class _ToScore(NamedTuple):
    group: Group
    lot: Lot
    scorer: Scorer | None
    place: int
    sample: Sample | Episode


class Stream:
    """Groups on their way from the dataset to a training step.

    Args:
        window: when what may start.
        loader: the prompts.
        router: makes the router, given who takes its samples.
        total_steps: nothing is drawn ahead for later ones.
        n: samples of each prompt; with `greedy` one more.
        sampling: how they are drawn.
        scorer: scores samples of training one by one as they come; None: nobody does.
        phase: `phase(name)` times what happens inside it.
        episodes: conducts the samples of prompts whose agents ask the policy themselves; None: no prompt has such.
    """

    def __init__(
        self,
        window: Window,
        loader: BatchLoader,
        router: Callable[[Callable[[list[Sample]], None]], Router],
        *,
        total_steps: int,
        n: int,
        greedy: bool,
        sampling: SamplingParams,
        scorer: Scorer | None,
        phase: Callable[[str], Any],
        episodes: Episodes | None = None,
    ) -> None:
        self._window, self._loader, self._phase, self._total_steps = window, loader, phase, total_steps
        self._n, self._greedy, self._sampling, self._scorer = n, greedy, sampling, scorer
        self._lots: dict[int, Lot] = {}
        """Ordered: the lots that were drawn ahead, by the step that they are for. Free: those that are not used up."""
        self._complete: deque[Group] = deque()
        """Free: groups that may be trained on, in the order in which they were finished."""
        self._written = 0
        """Free: groups that are written and not trained on; some of them wait for scores."""
        self._awaited: list[Lot] = []
        """What training waits for now."""
        self._open: dict[str, tuple[Group, Lot, Scorer | None]] = {}
        self._names = 0
        self._version = 0
        self._asked_step = 0
        self._last_drawn = 0
        self._first_version: int | None = None
        """The first weights of this process: older ones cannot be had."""
        self._episodes = episodes
        self.router = router(self._on_samples)
        self._seconds_before = self.router.seconds()
        if episodes is not None:
            episodes.connect(self.router, self._on_episode)

    # ---- for training ----

    def published(self, step: int, version: int) -> None:
        """The weights of `version` are there, after `step` steps: what waits for them may start."""
        self._version, self._asked_step = version, step
        if self._first_version is None:
            self._first_version = version
        self._last_drawn = max(self._last_drawn, step)
        self._draw_ahead()

    def take(self, step: int, count: int) -> tuple[list[Group], int]:
        """Groups for a training step, generated and scored, and the epoch they are from: a whole lot, or in free mode `count`.

        Asked again for the same step it gives further ones, by the newest weights.
        """
        self._asked_step = step
        if not self._window.ordered:
            return self._take_complete(count)
        lot = self._lots.pop(step, None)
        if lot is None:
            again = self._last_drawn >= step
            lot = self._draw(step, self._version if again else self._window.version_for(step))
            self._last_drawn = max(self._last_drawn, step)
        self._await(lot)
        return lot.groups, lot.epoch

    def generate(self, prompts: DataProto, n: int, sampling: SamplingParams, scorer: Scorer | None) -> list[Group]:
        """Groups of given prompts by the newest weights, before all others: for validation."""
        version = self._version if self._window.ordered else None
        groups = [Group(prompts, row, n, self._asked_step, version) for row in range(len(prompts))]
        lot = Lot(groups, -1, len(groups), len(groups))
        self._submit(groups, lot, sampling, scorer, validates=True)
        self._await(lot)
        return groups

    def figures(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """How old the groups of a step are, and what waits, runs and idles."""
        stepping, idle = self.router.seconds()
        before, self._seconds_before = self._seconds_before, (stepping, idle)
        with self.router.changed:
            ready = sum(group.complete and not group.taken for lot in self._lots.values() for group in lot.groups)
            reuse = self.router.reuse.figures()
        return {
            **staleness(groups, step - 1),
            **reuse,
            "stream/groups_ready": float(ready),
            "stream/samples_running": float(self.router.running()),
            "stream/samples_waiting": float(self.router.waiting()),
            "stream/engines_busy_s": stepping - before[0],
            "stream/engines_idle_s": idle - before[1],
        }

    def pending(self, phase: str) -> list[str]:
        """What training waits for: in `gen` the samples that are not written, as `uid/sample`, and of episodes what they wait
        for; in `reward` those that have no score."""
        if phase == "gen" and self._episodes is not None and (episodes := self._episodes.waiting_for()):
            return episodes
        with self.router.changed:
            groups = [group for lot in self._awaited for group in lot.groups]
            return [name for group in groups for name in (group.missing() if phase == "gen" else group.unscored())]

    def close(self) -> None:
        if self._episodes is not None:
            self._episodes.close()
        self.router.close()

    # ---- for checkpoints ----

    def drain(self) -> None:
        """Wait until every group that was drawn is complete; in free mode those under way are drawn again later instead."""
        if self._window.ordered:
            for lot in self._lots.values():
                self._await(lot)

    def lots(self) -> list[DataProto]:
        """What was drawn and not yet trained on, a table of prompts for each lot, with their groups in `meta_info`."""
        with self.router.changed:
            left = [(step, lot, [g for g in lot.groups if not g.taken]) for step, lot in self._lots.items()]
        return [as_table(step, lot.epoch, groups) for step, lot, groups in left if groups]

    def load_lots(self, step: int, tables: Sequence[DataProto]) -> None:
        """Go on after `step` with what `lots` gave. Groups that were not complete are generated again."""
        self._last_drawn = step
        for table in tables:
            for_step, epoch, groups = from_table(table)
            left = [group for group in groups if not group.complete]
            if left and self._window.ordered:
                raise CheckpointError(
                    "the checkpoint was written in free mode, with groups under way that any weights may finish",
                    "resume with async_training.mode=free, or in a new run with trainer.experiment_name",
                )
            lot = self._lots[for_step] = Lot(groups, epoch, len(left), len(left))
            self._last_drawn = max(self._last_drawn, for_step)
            if not self._window.ordered:
                self._complete += [group for group in groups if group.complete]
                self._written += len(groups) - len(left)
            self._submit(left, lot, self._sampling, self._scorer)

    # ---- drawing ----

    def _draw_ahead(self) -> None:
        size = self._loader.batch_size
        while self._is_wanted() and self._window.may_draw(
            self._last_drawn + 1, self._version, self._groups_ahead(), size
        ):
            self._draw_next()

    def _is_wanted(self) -> bool:
        """Whether there are steps to come that what was drawn is not enough for. In free mode a step may use up several lots, those
        whose groups were left out, so there it is groups that count."""
        if self._window.ordered:
            return self._last_drawn < self._total_steps
        return self._groups_ahead() < (self._total_steps - self._asked_step) * self._loader.batch_size

    def _draw_next(self) -> None:
        self._last_drawn += 1
        self._lots[self._last_drawn] = self._draw(self._last_drawn, self._window.version_for(self._last_drawn))

    def _groups_ahead(self) -> int:
        with self.router.changed:
            return sum(not group.taken for lot in self._lots.values() for group in lot.groups)

    def _draw(self, step: int, version: int | None) -> Lot:
        """The next batch of prompts goes out."""
        if version is not None:
            version = min(max(version, self._first_version or 0), self._version)
        epoch, prompts = self._loader.next_batch()
        groups = [Group(prompts, row, self._n, step, version, self._greedy) for row in range(len(prompts))]
        lot = Lot(groups, epoch, len(groups), len(groups))
        self._submit(groups, lot, self._sampling, self._scorer)
        return lot

    def _submit(
        self,
        groups: Sequence[Group],
        lot: Lot,
        sampling: SamplingParams,
        scorer: Scorer | None,
        validates: bool = False,
    ) -> None:
        greedy = replace(sampling, do_sample=False)
        streams = scorer if can_stream(scorer) else None
        requests: list[Request] = []
        conducted: list[tuple[Group, list[Request]]] = []
        with self.router.changed:
            for group in groups:
                self._names += 1
                name = f"{self._names}:{group.uid}"
                if streams is not None:
                    group.scores, group.scores_left = [Future() for _ in group.samples], len(group.samples)
                self._open[name] = group, lot, streams
                asked = list(group.requests(name, sampling, greedy).values())
                if self._episodes is not None and self._episodes.conducts(group):
                    self.router.reserve(group.version)
                    conducted.append((group, asked))
                else:
                    requests += asked
        self.router.submit(requests, first=validates)
        if self._episodes is not None and conducted:
            self._episodes.start(conducted, validates)

    # ---- what comes back ----

    def _on_samples(self, samples: list[Sample]) -> None:
        """Put samples into their groups and have them scored; in the router's thread."""
        if self._episodes is not None:
            samples = self._episodes.take_answers(samples)
        to_score: dict[tuple[int, int], list[_ToScore]] = {}
        with self.router.changed:
            for sample in samples:
                name, _, base = sample.request_id.rpartition("/")
                one = self._place(name, int(base) + sample.sample_index, sample)
                if one.scorer is not None:
                    to_score.setdefault((id(one.group.prompts), id(one.scorer)), []).append(one)
        for together in to_score.values():
            self._score(together)

    def _on_episode(self, place: tuple[str, int], episode: Episode) -> None:
        """The same for an episode; in the agents' thread."""
        name, index = place
        with self.router.changed:
            one = self._place(name, index, episode)
            if not one.group.samples_left:
                self.router.reserve(one.group.version, -1)
            self.router.changed.notify_all()
        if one.scorer is None:
            return
        known = scored_by_agent(episode, one.scorer.pool.options.on_error)
        if known is None:
            try:
                self._score([one])
                return
            except QuadrigaError:
                if episode.finish_reason == DONE:
                    raise
                known = RewardResult(0.0, WRONG)  # cut off before its agent could say, and nobody else can
        one.group.scores[one.place].set_result(known)
        self._scored(one.group, one.lot)

    def _place(self, name: str, index: int, sample: Sample | Episode) -> _ToScore:
        """Put a sample into its group."""
        group, lot, scorer = self._open[name]
        group.samples[index] = sample
        group.samples_left -= 1
        if not group.samples_left:
            del self._open[name]
            lot.generating -= 1
            self._written += self._may_be_taken(lot)
            if group.complete:
                self._completed(group, lot)
        return _ToScore(group, lot, scorer, index, sample)

    def _score(self, together: list[_ToScore]) -> None:
        """Samples of prompts that were drawn together, by one scorer."""
        scorer, prompts = together[0].scorer, together[0].group.prompts
        assert scorer is not None
        ids = [one.sample.token_ids.tolist() for one in together]
        asked = scorer.samples_of(prompts, [one.group.row for one in together], ids)
        for sample, one in zip(asked, together, strict=True):
            if isinstance(one.sample, Episode):
                sample.extra_info |= {"num_turns": one.sample.turns, "finish_reason": one.sample.finish_reason}
        handles = scorer.pool.submit(asked)
        for handle, one in zip(handles, together, strict=True):
            one.group.scores[one.place] = handle
            handle.add_done_callback(lambda _, one=one: self._scored(one.group, one.lot))

    def _scored(self, group: Group, lot: Lot) -> None:
        with self.router.changed:
            group.scores_left -= 1
            if group.complete:
                self._completed(group, lot)
                self.router.changed.notify_all()

    def _completed(self, group: Group, lot: Lot) -> None:
        lot.incomplete -= 1
        if self._may_be_taken(lot):
            self._complete.append(group)

    def _may_be_taken(self, lot: Lot) -> bool:
        """Free: whether training takes the groups of a lot one by one. A validation waits for all of its own."""
        return not self._window.ordered and lot.epoch >= 0

    def _await(self, lot: Lot) -> None:
        self._wait([lot], lambda: not lot.generating, lambda: not lot.incomplete)

    def _wait(self, lots: list[Lot], written: Callable[[], bool], scored: Callable[[], bool]) -> None:
        self._awaited = lots
        with self._phase("gen"):
            self.router.wait(written)
        with self._phase("reward"):
            self.router.wait(scored)
        self._awaited = []

    def _take_complete(self, count: int) -> tuple[list[Group], int]:
        self._draw_ahead()
        while self._groups_ahead() < count:  # some were taken and not used
            self._draw_next()
        self._wait(list(self._lots.values()), lambda: self._written >= count, lambda: len(self._complete) >= count)
        with self.router.changed:
            groups = [self._complete.popleft() for _ in range(count)]
            self._written -= count
            for group in groups:
                group.taken = True
            for step in [s for s, lot in self._lots.items() if all(g.taken for g in lot.groups)]:
                del self._lots[step]
        return groups, max(int(group.prompts.non_tensor_batch["epoch"][group.row]) for group in groups)
