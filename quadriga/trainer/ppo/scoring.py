"""What the reward function and the reward model say of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quadriga.agents.episode import FAILED, Episode
from quadriga.errors import RewardError
from quadriga.protocol import DataProto
from quadriga.rewards.managers import BaseRewardManager
from quadriga.rewards.result import CORRECT, ERROR, WRONG, RewardResult
from quadriga.trainer.ppo.groups import Group


def can_stream(manager: Any) -> bool:
    """Whether samples can be scored one by one as they come: a sample's score does not depend on the batch it is in, nor on a
    subclass's own way through it."""
    return (
        isinstance(manager, BaseRewardManager)
        and type(manager).__call__ is BaseRewardManager.__call__
        and type(manager).samples is BaseRewardManager.samples
        and not manager.pool.function.batched
    )


def scored_by_agent(episode: Episode, on_error: float | str) -> RewardResult | None:
    """The score of an episode whose agent gave one, or failed (then it is `reward.on_error`); None: the reward function is asked.

    Raises:
        RewardError: it failed, and `on_error` is "stop".
    """
    if episode.finish_reason in FAILED:
        if isinstance(on_error, str):
            raise RewardError(f"an agent failed and reward.on_error is 'stop':\n{episode.error}")
        return RewardResult(float(on_error), ERROR, error=episode.error, seconds=episode.own_s)
    if episode.reward is None:
        return None
    whole = episode.reward + sum(float(row.rewards.sum()) for row in episode.rows)
    extra = {name: value for name, value in episode.told.items() if name not in ("acc", "pred", "score")}
    acc, pred = episode.told.get("acc"), episode.told.get("pred")
    return RewardResult(
        episode.reward,
        CORRECT if (whole > 0 if acc is None else float(acc) > 0.5) else WRONG,
        acc=None if acc is None else float(acc),
        pred=None if pred is None else str(pred),
        extra=extra,
    )


def function_scores(rows: DataProto, groups: Sequence[Group], manager: Any, greedy: bool) -> dict[str, Any]:
    """A reward manager's answer (`return_dict`) for groups and their `rows`.

    Samples that came one by one have their scores; else the manager is given the whole batch. The scores are in `row_scores`
    `[B]` if the manager puts them on the last tokens, as managers do that score one sample at a time; else in `reward_tensor`
    `[B, R]`.
    """
    if not can_stream(manager):
        return manager(rows.fetch(), return_dict=True)
    handles = [score for group in groups for score in (group.scores[-1:] if greedy else group.scores[: group.n])]
    results = manager.pool.collect(handles)
    if type(manager).assemble is BaseRewardManager.assemble and manager.num_examine <= 0:
        return manager.by_row(results, rows.batch["response_lengths"])
    return manager.assemble(rows.fetch(), results, return_dict=True)


def scores_of_agents(
    groups: Sequence[Group], told: dict[str, Any], manager: Any, greedy: bool
) -> dict[str, torch.Tensor]:
    """What agents gave at the end of their episodes, where no manager is told of each sample by itself: in place of what the
    manager says of these rows, or in `row_scores` where there is no manager. Of those that failed, `reward.on_error` (without a manager
    0): see `scored_by_agent`."""
    if can_stream(manager):
        return {}
    samples = [s for group in groups for s in (group.written[-1:] if greedy else group.written[: group.n])]
    on_error = manager.pool.options.on_error if isinstance(manager, BaseRewardManager) else 0.0
    known = {k: scored_by_agent(s, on_error) for k, s in enumerate(samples) if isinstance(s, Episode)}
    given = {k: result.score for k, result in known.items() if result is not None}
    if not given:
        return {}
    if manager is None:
        return {"row_scores": torch.tensor([given.get(k, 0.0) for k in range(len(samples))])}
    column = told["reward_tensor"].clone()
    for k, reward in given.items():
        column[k] = 0
        if length := len(samples[k].token_ids):
            column[k, length - 1] = reward
    return {"reward_tensor": column}


def known_rm_scores(groups: Sequence[Group], rows: DataProto) -> DataProto | None:
    """`rm_scores` `[B, R]` of groups that the reward model has seen before; None if it has not seen all of them."""
    if any(group.rm_scores is None for group in groups):
        return None
    scores = torch.tensor([score for group in groups for score in group.rm_scores or ()])
    lengths = rows.batch["response_lengths"]
    column = torch.zeros(len(rows), rows.row_shape("responses")[0])
    some = (lengths > 0).nonzero(as_tuple=True)[0]
    column[some, lengths[some] - 1] = scores[some]
    return DataProto.from_dict({"rm_scores": column})


def remember_rm_scores(groups: Sequence[Group], rows: DataProto) -> None:
    """Note in the groups what the reward model said of their rows."""
    scores = rows.fetch(["rm_scores"]).batch["rm_scores"].sum(1).tolist()
    for k, group in enumerate(groups):
        group.rm_scores = scores[k * group.n : (k + 1) * group.n]
