"""Whether prompts, responses, mini-batches and workers divide evenly, and the nearest numbers that do.

A step has `train_batch_size` prompts. An optimiser step takes `ppo_mini_batch_size` of them with `n` responses each,
and its rows are shared evenly by all workers. So with `unit = workers / gcd(workers, n)`, the mini-batch must be a
multiple of `unit`, and the step a multiple of the mini-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, gcd, lcm
from typing import Any

from quadriga.config.needs import need_critic, uses_token_budget
from quadriga.config.placement import learning_slots
from quadriga.config.schema import Config
from quadriga.config.typed import Problems

TRAIN = "data.train_batch_size"


@dataclass(frozen=True)
class Update:
    """How one model is updated: `mini` prompts an optimiser step, in passes of `micro` rows (1: by token budget)."""

    section: str
    mini: int
    micro: int
    sharing: int = 1
    """Workers that go over their rows together (ulysses_sequence_parallel_size)."""

    @property
    def key(self) -> str:
        return f"{self.section}.ppo_mini_batch_size"


@dataclass(frozen=True)
class Shares:
    """Over whom the rows of a mini-batch are shared."""

    n: int
    workers: int

    @property
    def unit(self) -> int:
        return self.workers // gcd(self.workers, self.n)

    def rows_per_worker(self, mini: int) -> int:
        return mini * self.n // self.workers

    def smallest_mini(self, micro: int) -> int:
        """The smallest multiple of `unit` of which each worker gets at least `micro` rows."""
        return self.unit * ceil(max(1, micro) * self.workers / (self.n * self.unit))


def report_batch_sizes(config: Config, problems: Problems) -> None:
    """Note every batch size that does not divide, with the nearest valid numbers."""
    train, trainer = config.data.train_batch_size, config.trainer
    shares = Shares(config.actor_rollout_ref.rollout.n, learning_slots(config))
    updates = _updates(config)
    actor = updates[0]
    for update in updates:
        if update.mini % shares.unit == 0 and train % update.mini == 0:
            _report_micro_batch(update, shares, problems)
        elif update is actor or update.mini != actor.mini:
            if update.mini % shares.unit == 0:
                what = (
                    f"{TRAIN}={train} prompts cannot be split into mini-batches of {update.key}={update.mini} prompts"
                )
            else:
                what = (
                    f"{update.key}={update.mini} prompts x actor_rollout_ref.rollout.n={shares.n} responses = "
                    f"{update.mini * shares.n} rows cannot be shared evenly by {shares.workers} workers "
                    f"(trainer.nnodes={trainer.nnodes} x trainer.n_gpus_per_node={trainer.n_gpus_per_node})"
                )
            micro = max(-(-other.micro // other.sharing) for other in updates if other.mini == update.mini)
            problems.add(what, _fix(train, update, shares, micro, [other.mini for other in updates]))


def _updates(config: Config) -> list[Update]:
    """The actor's update, and the critic's if there is one (by default it follows the actor's)."""
    sections: list[tuple[str, Any]] = [("actor_rollout_ref.actor", config.actor_rollout_ref.actor)]
    if need_critic(config):
        sections.append(("critic", config.critic))
    return [
        Update(name, section.ppo_mini_batch_size, _rows_per_pass(section), section.ulysses_sequence_parallel_size)
        for name, section in sections
    ]


def _rows_per_pass(section: Any) -> int:
    return 1 if uses_token_budget(section) else section.ppo_micro_batch_size_per_gpu or 1


def _report_micro_batch(update: Update, shares: Shares, problems: Problems) -> None:
    rows, key = shares.rows_per_worker(update.mini) * update.sharing, f"{update.section}.ppo_micro_batch_size_per_gpu"
    if update.micro > rows:
        problems.add(
            f"{key}={update.micro} rows is more than the {rows} rows that each of {shares.workers // update.sharing} "
            f"{'workers' if update.sharing == 1 else f'sets of {update.sharing} workers'} gets of a "
            f"mini-batch ({update.mini} prompts x {shares.n} responses)",
            f"set {key}={rows} or less",
        )


def _fix(train: int, update: Update, shares: Shares, micro: int, minis: list[int]) -> str:
    smallest, unit = shares.smallest_mini(micro), shares.unit
    others = [mini for mini in minis if mini != update.mini]
    options = []
    if dividing := [size for size in _divisors(train) if size % unit == 0 and size >= smallest]:
        options.append(_either(update.key, _nearest(update.mini, dividing)))
    if update.mini % unit == 0 and update.mini >= smallest:
        options.append(_either(TRAIN, _nearest_multiples(train, lcm(update.mini, *others))))
    if not options:
        for mini in _nearest_multiples(update.mini, unit, smallest):
            whole = _nearest_multiples(train, lcm(mini, *others))[0]
            options.append(f"{TRAIN}={whole} with {update.key}={mini}")
    return "set " + ", or ".join(options)


def _either(key: str, values: list[int]) -> str:
    return f"{key}={' or '.join(map(str, values))}"


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _nearest(number: int, candidates: Iterable[int]) -> list[int]:
    """The largest candidate below and the smallest above `number`, as far as there are any."""
    below = [c for c in candidates if c <= number]
    above = [c for c in candidates if c > number]
    return ([max(below)] if below else []) + ([min(above)] if above else [])


def _nearest_multiples(number: int, unit: int, smallest: int = 1) -> list[int]:
    """The multiples of `unit` next to `number`, none below `smallest`, which is a multiple or 1."""
    below = number // unit * unit
    return [m for m in (below, below + unit) if m >= smallest] or [smallest]
