"""Episodes: all that the policy wrote and read for one sample of a prompt, as rows that can be trained on.

Nobody has to be believed about the tokens: the driver knows what was asked of the engines and what they answered. Calls whose
context begins with what the policy read and wrote before are one row; any other context is a further row of the same episode, and
is trained on like the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quadriga.rollout.service import Sample

DONE, TURNS, TOKENS, TIME, CONTEXTS = "done", "turns", "tokens", "time", "contexts"
ERROR, CRASHED, STUCK = "error", "crashed", "stuck"
FINISH_REASONS = (DONE, TURNS, TOKENS, TIME, CONTEXTS, ERROR, CRASHED, STUCK)
"""How an episode ends: its agent returned; a limit of turns, tokens, time or contexts; its agent raised, ended its process, or blocked
it."""
FAILED = (ERROR, CRASHED, STUCK)


@dataclass
class Call:
    """One question to the policy and its answer."""

    prompt_ids: list[int]
    sample: Sample | None = None
    reward: float = 0.0
    """What the agent said of this turn."""


@dataclass(frozen=True)
class EpisodeRow:
    """One context of an episode, from its first prompt to the last token that the policy wrote.

    All arrays `[R]`, over what comes after the prompt; log-probs and rewards are 0 where the policy read.
    """

    prompt_ids: np.ndarray
    token_ids: np.ndarray
    mask: np.ndarray
    """1: written by the policy, 0: read."""
    log_probs: np.ndarray
    full_log_probs: np.ndarray
    rewards: np.ndarray
    """Of turns, on their last tokens."""
    versions: tuple[tuple[int, int], ...]
    """Runs `(version, tokens)` over the written tokens."""


@dataclass(frozen=True)
class Episode:
    """A finished episode; beside its rows it has the surface of a `Sample`."""

    rows: tuple[EpisodeRow, ...]
    """Its contexts; the last is the one in which the policy wrote last."""
    finish_reason: str
    reward: float | None = None
    """What the agent gave at the end; None: the reward function is asked."""
    turn_rewards: bool = False
    """Whether the agent gave rewards to turns."""
    told: dict[str, Any] = field(default_factory=dict)
    """What else the agent told, plain values."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    given_up: int = 0
    """Calls that were cancelled before their answer came; they are in no row."""
    attempts: int = 1
    leaked_tasks: int = 0
    own_s: float = 0.0
    """Seconds that were the agent's own, without those in which it waited for the policy."""
    error: str | None = None

    @property
    def token_ids(self) -> np.ndarray:
        """Of the last row: the one that the reward function is given."""
        return self.rows[-1].token_ids

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        return tuple(run for row in self.rows for run in row.versions)

    def _asdict(self) -> dict[str, Any]:
        """Plain values, as `restored` takes them."""
        return {**vars(self), "rows": [vars(row) for row in self.rows]}

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> Episode:
        rows = tuple(EpisodeRow(**{**row, "versions": tuple(map(tuple, row["versions"]))}) for row in saved["rows"])
        return cls(**{**saved, "rows": rows})


def rows_of_calls(calls: Sequence[Call], first_prompt: Sequence[int]) -> tuple[EpisodeRow, ...]:
    """The calls that were answered, as rows, in the order of their last calls. Without any: one row of the prompt alone."""
    chains: list[tuple[list[int], list[Call]]] = []
    for call in calls:
        if call.sample is None or not len(call.sample.token_ids):
            continue
        after = [chain for chain in chains if call.prompt_ids[: len(chain[0])] == chain[0]]
        whole = [*call.prompt_ids, *call.sample.token_ids.tolist()]
        if after:
            longest = max(after, key=lambda chain: len(chain[0]))
            chains.remove(longest)
            chains.append((whole, [*longest[1], call]))
        else:
            chains.append((whole, [call]))
    return tuple(_row(whole, chain) for whole, chain in chains) or (unanswered(first_prompt),)


def unanswered(prompt: Sequence[int]) -> EpisodeRow:
    """A row of a prompt alone."""
    none = np.zeros(0, np.float32)
    return EpisodeRow(np.array(prompt, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int8), none, none, none, ())


def _row(whole: list[int], chain: list[Call]) -> EpisodeRow:
    start = len(chain[0].prompt_ids)
    size = len(whole) - start
    mask = np.zeros(size, np.int8)
    log_probs, full, rewards = (np.zeros(size, np.float32) for _ in range(3))
    versions: list[tuple[int, int]] = []
    for call in chain:
        sample = call.sample
        assert sample is not None
        begin = len(call.prompt_ids) - start
        end = begin + len(sample.token_ids)
        mask[begin:end] = 1
        log_probs[begin:end], full[begin:end] = sample.log_probs, sample.full_log_probs
        rewards[end - 1] += call.reward
        versions += sample.versions
    ids = np.array(whole, np.int32)
    return EpisodeRow(ids[:start], ids[start:], mask, log_probs, full, rewards, tuple(versions))
