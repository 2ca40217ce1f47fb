"""Groups: a prompt and the samples that the policy wrote for it; and groups as rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quadriga.agents.episode import FAILED, FINISH_REASONS, TOKENS, Episode, EpisodeRow
from quadriga.checkpoint.disk import readable_disk_errors
from quadriga.data.files import expand_path
from quadriga.errors import DataError
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.rewards.result import RewardResult
from quadriga.rollout.interface import Request, SamplingParams
from quadriga.rollout.service import Sample

REPEAT_SHIFT = 40
"""A row that a sampler draws twice into one batch ("epoch:index#k") gets its own random numbers through these bits."""

TOKENS_AT_A_TIME = 1 << 22
"""Rows are made so many tokens at a time: where their columns live elsewhere, this process holds few of them."""


@dataclass(eq=False)
class Group:
    """The samples of one prompt.

    Args:
        prompts: the batch of prompts that its prompt is a row of.
        row: which.
        n: samples that are trained on.
        step: the training step whose random numbers it has.
        version: the weights that must write it; None: any.
        greedy: one more sample, the last, is decoded greedily: a baseline.
    """

    prompts: DataProto
    row: int
    n: int
    step: int
    version: int | None
    greedy: bool = False
    samples: list[Sample | Episode | None] = field(default_factory=list)
    """What the policy wrote at once, or in the episode of an agent."""
    scores: list[Future[RewardResult]] = field(default_factory=list)
    """What the reward function says of each sample, under way; empty where samples are not scored one by one."""
    scores_left: int = 0
    """Of those, how many are not there yet or not begun."""
    rm_scores: list[float] | None = None
    """What the reward model says of each sample that is trained on, once it was asked."""
    taken: bool = False
    """Free mode: whether training has had it."""

    def __post_init__(self) -> None:
        self.samples = [None] * (self.n + self.greedy)
        self.samples_left = self.n + self.greedy

    @property
    def uid(self) -> str:
        return self.prompts.non_tensor_batch["uid"][self.row]

    @property
    def prompt_ids(self) -> np.ndarray:
        """`[P]` int64"""
        kept = self.prompts.batch["attention_mask"][self.row].bool()
        return self.prompts.batch["input_ids"][self.row][kept].numpy()

    def requests(self, name: str, params: SamplingParams, greedy: SamplingParams) -> dict[str, Request]:
        """What to ask engines for, by the index of the first sample that answers it: `name/0`, and `name/n` for the greedy."""
        columns = self.prompts.non_tensor_batch
        key = _random_key(self.uid, int(columns["epoch"][self.row]), int(columns["index"][self.row]))
        ids = self.prompt_ids.tolist()
        asked = {
            f"{name}/0": Request(f"{name}/0", ids, params, key, tuple(range(self.n)), self.step, None, self.version)
        }
        if self.greedy:
            asked[f"{name}/{self.n}"] = Request(
                f"{name}/{self.n}", ids, greedy, key, (0,), self.step, None, self.version
            )
        return asked

    @property
    def written(self) -> list[Sample | Episode]:
        """The samples that are there."""
        return [sample for sample in self.samples if sample is not None]

    @property
    def complete(self) -> bool:
        return not self.samples_left and not self.scores_left

    def missing(self) -> list[str]:
        """The samples that are not there yet, as `uid/sample`."""
        return [f"{self.uid}/{k}" for k, sample in enumerate(self.samples) if sample is None]

    def unscored(self) -> list[str]:
        """The samples that are there and have no score yet, as `uid/sample`."""
        return [
            f"{self.uid}/{k}" for k, score in enumerate(self.scores) if self.samples[k] is not None and not score.done()
        ]

    def request_state(self) -> dict[str, Any]:
        """What is asked of engines, as plain values."""
        return {"n": self.n, "step": self.step, "version": self.version, "greedy": self.greedy}

    def state(self) -> dict[str, Any]:
        """That, and all of its samples and scores."""
        return {
            **self.request_state(),
            "samples": [sample._asdict() for sample in self.written],
            "scores": [asdict(score.result()) for score in self.scores],
        }

    @classmethod
    def restored(cls, prompts: DataProto, row: int, state: dict[str, Any]) -> Group:
        """A group as it was when `state` was made."""
        group = cls(prompts, row, state["n"], state["step"], state["version"], state["greedy"])
        for k, saved in enumerate(state.get("samples", ())):
            group.samples[k] = (
                Episode.restored(saved)
                if "rows" in saved
                else Sample(**{**saved, "versions": tuple(map(tuple, saved["versions"]))})
            )
            group.samples_left -= 1
        for saved in state.get("scores", ()):
            known: Future[RewardResult] = Future()
            known.set_result(RewardResult(**saved))
            group.scores.append(known)
        return group


def batch_of(
    groups: Sequence[Group],
    pad_token_id: int,
    leave: Callable[[DataProto], DataProto],
    *,
    greedy: bool = False,
    truncated: bool = False,
    versions: bool = False,
) -> DataProto:
    """Groups as the rows of a batch, see `rows_of`, made a part at a time: `leave` puts the columns of each where they live."""
    widths = widths_of(groups, greedy)
    size = max(1, TOKENS_AT_A_TIME // (groups[0].n * sum(widths)))
    kinds = {"greedy": greedy, "truncated": truncated, "versions": versions}
    kinds["turn_rewards"] = any(isinstance(s, Episode) and s.turn_rewards for group in groups for s in group.written)
    parts = [leave(rows_of(groups[k : k + size], widths, pad_token_id, **kinds)) for k in range(0, len(groups), size)]
    return DataProto.concat(parts) if len(parts) > 1 else parts[0]


def widths_of(groups: Sequence[Group], greedy: bool) -> tuple[int, int]:
    """The longest prompt and the longest response, at least 1, of all rows that groups may come to."""
    chosen = [group.written[-1:] if greedy else group.written[: group.n] for group in groups]
    rows = [
        row for own in chosen for sample in own for row in (sample.rows if isinstance(sample, Episode) else (sample,))
    ]
    prompts = [len(p) for group, own in zip(groups, chosen) for p in prompts_of(group, own)]
    return max(prompts), max(1, *(len(row.token_ids) for row in rows))


def prompts_of(group: Group, samples: Sequence[Sample | Episode]) -> Iterable[np.ndarray]:
    """The prompts that were answered: the group's, or those that agents made of it."""
    own = [row.prompt_ids for sample in samples if isinstance(sample, Episode) for row in sample.rows]
    return own if all(isinstance(sample, Episode) for sample in samples) else [*own, group.prompt_ids]


def rows_of(
    groups: Sequence[Group],
    widths: tuple[int, int],
    pad_token_id: int,
    *,
    greedy: bool,
    truncated: bool,
    versions: bool = False,
    turn_rewards: bool = False,
) -> DataProto:
    """The samples of groups, all of the same size, as rows: the `n` of each that are trained on, or the `greedy` ones.

    Args:
        widths: P and R.

    Tensors: those of `token_columns`. The prompts' other columns, with `sample_index`; and of episodes, what there is to tell of
    them: `cut_off` `[B]` says which ended because there was no room for more tokens. Of an episode with several contexts, this is
    the last one (`trainer.ppo.contexts` adds the others); `other_rewards` `[B]` is what turns of the others were given.
    """
    n = 1 if greedy else groups[0].n
    samples = [s for group in groups for s in (group.written[-1:] if greedy else group.written[:n])]
    has_episodes = any(isinstance(sample, Episode) for sample in samples)
    if has_episodes:
        own = [
            sample.rows[-1].prompt_ids if isinstance(sample, Episode) else groups[k // n].prompt_ids
            for k, sample in enumerate(samples)
        ]
        prompts, prompt_mask = padded_left(own, widths[0], pad_token_id)
    else:
        padded = padded_left([group.prompt_ids for group in groups], widths[0], pad_token_id)
        prompts, prompt_mask = (column.repeat_interleave(n, 0) for column in padded)
    rows = [sample.rows[-1] if isinstance(sample, Episode) else sample for sample in samples]
    kinds = {"truncated": truncated, "versions": versions, "turn_rewards": turn_rewards}
    tensors = token_columns(rows, prompts, prompt_mask, widths[1], pad_token_id, **kinds)
    columns = {name: np.repeat(column, n) for name, column in prompt_columns(groups).items()}
    columns["sample_index"] = np.tile(np.arange(n), len(groups))
    if has_episodes:
        cut = [s.finish_reason == (TOKENS if isinstance(s, Episode) else "length") for s in samples]
        tensors["cut_off"] = torch.tensor(cut)
        if turn_rewards:
            others = [s.rows[:-1] if isinstance(s, Episode) else () for s in samples]
            tensors["other_rewards"] = torch.tensor([sum(float(row.rewards.sum()) for row in own) for own in others])
        columns |= {name: object_array([_told(s).get(name) for s in samples]) for name in TOLD}
    return DataProto.from_dict(tensors, columns)


def token_columns(
    rows: Sequence[EpisodeRow | Sample],
    prompts: torch.Tensor,
    prompt_mask: torch.Tensor,
    width: int,
    pad_token_id: int,
    *,
    truncated: bool,
    versions: bool,
    turn_rewards: bool,
) -> dict[str, torch.Tensor]:
    """The tensors of rows: prompts `[B, P]` (padded left), responses, response_mask, rollout_log_probs `[B, R]` (padded right),
    input_ids, attention_mask, position_ids `[B, P+R]`, and the lengths num_tokens and response_lengths `[B]`. With `truncated`
    sampling also rollout_sampled_log_probs, of the distribution in use; with `versions` also token_versions `[B, R]`, of the
    weights that wrote each token; with `turn_rewards` that column `[B, R]`, what agents gave to turns.

    In rows of episodes response_mask is 0 where the policy read, attention_mask is 1 there.

    Args:
        width: R.
    """
    lengths = torch.tensor([len(row.token_ids) for row in rows])
    read_or_written = (torch.arange(width) < lengths[:, None]).long()
    response_mask = read_or_written
    if any(isinstance(row, EpisodeRow) for row in rows):
        written = [getattr(row, "mask", np.ones(len(row.token_ids), np.int8)) for row in rows]
        response_mask = _filled(written, read_or_written, 0, torch.long)
    responses = _filled([row.token_ids for row in rows], read_or_written, pad_token_id, torch.long)
    attention_mask = torch.cat([prompt_mask, read_or_written], dim=1)
    full = [row.full_log_probs for row in rows]
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": response_mask,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "num_tokens": attention_mask.sum(1),
        "response_lengths": lengths,
        "rollout_log_probs": _filled(full, read_or_written, 0.0, torch.float32),
    }
    if truncated:
        sampled = [row.log_probs for row in rows]
        tensors["rollout_sampled_log_probs"] = _filled(sampled, read_or_written, 0.0, torch.float32)
    if versions:
        runs = [np.repeat(*np.array(row.versions).T).tolist() if row.versions else [] for row in rows]
        tensors["token_versions"] = _filled(runs, response_mask, 0, torch.int32)
    if turn_rewards:
        given = [getattr(row, "rewards", np.zeros(len(row.token_ids), np.float32)) for row in rows]
        tensors["turn_rewards"] = _filled(given, read_or_written, 0.0, torch.float32)
    return tensors


TOLD = ("turns", "tool_calls", "tool_errors", "finish_reason", "episode_error", "messages", "told")
"""Columns of rows of episodes."""


def _told(sample: Sample | Episode) -> dict[str, Any]:
    if not isinstance(sample, Episode):
        return {"turns": 1, "tool_calls": 0, "tool_errors": 0, "finish_reason": sample.finish_reason}
    return {
        **{name: getattr(sample, name) for name in TOLD if name != "episode_error"},
        "episode_error": sample.error,
    }


def episode_figures(groups: Sequence[Group]) -> dict[str, float]:
    """What the episodes of a step were like; nothing without any."""
    episodes = [s for group in groups for s in group.written if isinstance(s, Episode)]
    if not episodes:
        return {}
    count = len(episodes)
    turns = [episode.turns for episode in episodes]
    masks = [row.mask for episode in episodes for row in episode.rows]
    return {
        "episode/turns/mean": sum(turns) / count,
        "episode/turns/max": float(max(turns)),
        "episode/turns/min": float(min(turns)),
        "episode/contexts/mean": len(masks) / count,
        "episode/contexts/max": float(max(len(episode.rows) for episode in episodes)),
        "episode/tool_calls/mean": sum(episode.tool_calls for episode in episodes) / count,
        "episode/tool_errors/mean": sum(episode.tool_errors for episode in episodes) / count,
        "episode/written_tokens/mean": sum(int(mask.sum()) for mask in masks) / count,
        "episode/read_tokens/mean": sum(int((mask == 0).sum()) for mask in masks) / count,
        "episode/agent_s/mean": sum(episode.own_s for episode in episodes) / count,
        "episode/again": float(sum(episode.attempts - 1 for episode in episodes)),
        "episode/leaked_tasks": float(sum(episode.leaked_tasks for episode in episodes)),
        "episode/given_up": float(sum(episode.given_up for episode in episodes)),
        "episode/failed": sum(episode.finish_reason in FAILED for episode in episodes) / count,
        **{
            f"episode/finish/{reason}": sum(episode.finish_reason == reason for episode in episodes) / count
            for reason in FINISH_REASONS
        },
    }


def prompt_columns(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """The columns of the groups' prompts that are no tensors, one entry a group."""
    names = dict.fromkeys(name for group in groups for name in group.prompts.non_tensor_batch)
    columns = {}
    for name in names:
        arrays = [group.prompts.non_tensor_batch.get(name) for group in groups]
        values = [None if array is None else array[group.row] for group, array in zip(groups, arrays)]
        kinds = {None if array is None else array.dtype for array in arrays}
        kind = kinds.pop() if len(kinds) == 1 else None
        columns[name] = object_array(values) if kind is None or kind.hasobject else np.array(values, kind)
    return columns


def as_table(step: int, epoch: int, groups: Sequence[Group]) -> DataProto:
    """Groups as a table of their prompts, with the samples and scores of those that are complete."""
    prompts, mask = padded_left([group.prompt_ids for group in groups], 0, 0)
    states = [group.state() if group.complete else group.request_state() for group in groups]
    about = {"step": step, "epoch": epoch, "groups": states}
    return DataProto.from_dict({"input_ids": prompts, "attention_mask": mask}, prompt_columns(groups), about)


def from_table(table: DataProto) -> tuple[int, int, list[Group]]:
    """What `as_table` was given: step, epoch and groups."""
    groups = [Group.restored(table, row, state) for row, state in enumerate(table.meta_info["groups"])]
    return table.meta_info["step"], table.meta_info["epoch"], groups


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """How many versions older than `version` the weights were that wrote the groups' tokens; 0 where nothing was written, as by agents
    that all failed before they asked."""
    runs = [
        (version - v, count) for group in groups for sample in group.written[: group.n] for v, count in sample.versions
    ]
    tokens = sum(count for _, count in runs)
    return {
        "stream/staleness/mean": sum(age * count for age, count in runs) / max(1, tokens),
        "stream/staleness/max": float(max((age for age, _ in runs), default=0)),
    }


def _random_key(uid: str, epoch: int, index: int) -> tuple[int, int]:
    repeat = int(uid.rpartition("#")[2]) if "#" in uid else 0
    return epoch & 0xFFFFFFFF, index + (repeat << REPEAT_SHIFT)


def padded_left(rows: Sequence[np.ndarray], width: int, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `[B, P]`, P being `width` or the longest."""
    lengths = torch.tensor([len(ids) for ids in rows])
    width = max(width, int(lengths.max()))
    mask = (torch.arange(width) >= width - lengths[:, None]).long()
    return _filled(rows, mask, padding, torch.long), mask


def _filled(values: Sequence[np.ndarray], mask: torch.Tensor, padding: Any, dtype: torch.dtype) -> torch.Tensor:
    full = torch.full(mask.shape, padding, dtype=dtype)
    full[mask.bool()] = torch.from_numpy(np.concatenate(values)).to(dtype)
    return full


class KeptGroups:
    """A folder with a file for every time that a step took groups: `step_00000012_0.dataproto`.

    Args:
        make: make the folder if it is not there.
    """

    def __init__(self, folder: str, make: bool) -> None:
        self._folder = expand_path(folder)
        self._taken: dict[int, int] = {}
        if make:
            with readable_disk_errors("make", self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
        elif not self._folder.is_dir():
            raise DataError(
                f"episodes.read_from={folder} is no folder", "give the folder that a run wrote with episodes.write_to"
            )

    def write(self, step: int, epoch: int, groups: list[Group]) -> None:
        """Keep the groups that a step has taken; complete ones only."""
        file = self._next_file(step)
        with readable_disk_errors("write", file):
            as_table(step, epoch, groups).save_to_disk(file)

    def read(self, step: int) -> tuple[list[Group], int]:
        """The groups that this step took next, and their epoch. DataError if it took no more."""
        file = self._next_file(step)
        if not file.is_file():
            kept = sorted(self._folder.glob("step_*.dataproto"))
            there = f"it has {len(kept)}, up to {kept[-1].name}" if kept else "it has none"
            raise DataError(
                f"step {step}: {file} is not there; {there}",
                "train for as many steps as were kept, with the same filter",
            )
        _, epoch, groups = from_table(DataProto.load_from_disk(file))
        return groups, epoch

    def _next_file(self, step: int) -> Path:
        number = self._taken[step] = self._taken.get(step, -1) + 1
        return self._folder / f"step_{step:08d}_{number}.dataproto"
