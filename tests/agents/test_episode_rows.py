"""From calls to rows to advantages, against a reference that goes through one episode after the other."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from quadriga.agents.episode import Call, Episode, rows_of_calls
from quadriga.config.names import ADV_ESTIMATORS
from quadriga.config.schema import Config
from quadriga.errors import DataError
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.rollout.service import Sample
from quadriga.trainer.ppo.contexts import further_contexts, one_row_each, with_all_contexts, without_filling
from quadriga.trainer.ppo.groups import Group, as_table, batch_of, episode_figures, from_table
from quadriga.trainer.ppo.row_functions import advantages, total_scores


def sample(ids: list[int], version: int = 0) -> Sample:
    log_probs = np.array([-0.01 * i for i in ids], np.float32)
    return Sample("r", 0, np.array(ids, np.int32), log_probs, 2 * log_probs, "stop", ((version, len(ids)),))


def test_calls_that_go_on_are_one_row_with_what_was_read_in_between():
    calls = [
        Call([1, 2], sample([3, 4], 5), 0.5),
        Call([1, 2, 3, 4, 9, 9], sample([6], 7)),
        Call([1, 2, 3, 4, 9, 9, 6, 8], sample([7, 7], 7), 2.0),
    ]
    (row,) = rows_of_calls(calls, [0])
    assert row.prompt_ids.tolist() == [1, 2]
    assert row.token_ids.tolist() == [3, 4, 9, 9, 6, 8, 7, 7]
    assert row.mask.tolist() == [1, 1, 0, 0, 1, 0, 1, 1]
    assert row.rewards.tolist() == [0, 0.5, 0, 0, 0, 0, 0, 2]
    assert row.versions == ((5, 2), (7, 1), (7, 2))
    assert row.log_probs.tolist() == pytest.approx([-0.03, -0.04, 0, 0, -0.06, 0, -0.07, -0.07])
    assert row.full_log_probs.tolist() == pytest.approx([-0.06, -0.08, 0, 0, -0.12, 0, -0.14, -0.14])


def test_another_context_is_a_further_row_and_each_call_goes_on_with_the_longest():
    calls = [
        Call([1], sample([2])),
        Call([1], sample([3])),  # the same question again: another branch
        Call([1, 3, 4], sample([5])),
        Call([1, 2, 4], sample([6])),
        Call([8], sample([9])),
        Call([1, 2], None),  # never answered
    ]
    rows = rows_of_calls(calls, [0])
    assert [(row.prompt_ids.tolist(), row.token_ids.tolist()) for row in rows] == [
        ([1], [3, 4, 5]),
        ([1], [2, 4, 6]),
        ([8], [9]),
    ]


def test_an_episode_without_an_answer_is_a_row_of_its_prompt_alone():
    (row,) = rows_of_calls([Call([1, 2], None), Call([1, 2], sample([]))], [7, 7])
    assert row.prompt_ids.tolist() == [7, 7]
    assert len(row.token_ids) == len(row.mask) == len(row.rewards) == 0


PARTS, DIVISOR = 3, 4
"""Mini-batches of one prompt each, on four ranks."""


def make_groups(seed: int, prompts: int = 3, n: int = 4, contexts: int = 1) -> list[Group]:
    """Groups of random episodes, with rewards by turn and at the end; one of them has no tokens, the others up to `contexts` rows."""
    chance = random.Random(seed)
    uids = [f"0:{i}" for i in range(prompts)]
    table = DataProto.from_dict(
        {"input_ids": torch.ones(prompts, 2, dtype=torch.long), "attention_mask": torch.ones(prompts, 2)},
        {"uid": object_array(uids), "index": np.arange(prompts), "epoch": np.zeros(prompts, int)},
    )
    groups = []
    for row in range(prompts):
        group = Group(table, row, n, 1, 0)
        for k in range(n):
            calls = []
            for which in range(chance.randrange(1, contexts + 1)):
                context = [10 + which, *(chance.randrange(1, 9) for _ in range(chance.randrange(0, 3)))]
                for _ in range(0 if row == k == 1 else chance.randrange(1, 5)):
                    written = [chance.randrange(1, 9) for _ in range(chance.randrange(1, 5))]
                    said = chance.choice([0.0, 0.5, -1.0])
                    calls.append(Call(list(context), sample(written, chance.randrange(3)), said))
                    context = [*context, *written, *[chance.randrange(1, 9) for _ in range(chance.randrange(0, 4))]]
            episode = Episode(
                rows_of_calls(calls, [1, 2]), "done", chance.choice([0.0, 1.0]), turn_rewards=True, turns=len(calls)
            )
            group.samples[k] = episode
            group.samples_left -= 1
        groups.append(group)
    return groups


def scored(groups: list[Group]) -> DataProto:
    batch = batch_of(groups, 0, lambda rows: rows, versions=True)
    ends = torch.tensor([s.reward for g in groups for s in g.written])
    batch.put_columns(DataProto.from_dict({"row_scores": ends}))
    columns, _ = total_scores(batch)
    batch.put_columns(DataProto.from_dict(columns))
    further = further_contexts(groups)
    return with_all_contexts(batch, further, 0, lambda rows: rows, PARTS, DIVISOR) if any(further) else batch


def episodes_of(groups: list[Group]) -> list[Episode]:
    return [episode for group in groups for episode in group.written]


def rows_in(batch: DataProto, groups: list[Group]) -> dict[tuple[int, int], int]:
    """Where the contexts of episodes stand in a batch, by episode and context."""
    if "context" not in batch.non_tensor_batch:
        return {(k, 0): k for k in range(len(batch))}
    names = list(zip(batch.batch["episode"].tolist(), batch.non_tensor_batch["context"]))
    return {name: b for b, name in enumerate(names) if name[0] >= 0}


def own_tokens(groups: list[Group]) -> list[list[tuple[int, int, float]]]:
    """Of every episode, one by one: context, position and reward of each token that the policy wrote, the last context last."""
    told = []
    for episode in episodes_of(groups):
        own = [
            (c, t, float(row.rewards[t]))
            for c, row in enumerate(episode.rows)
            for t in range(len(row.token_ids))
            if row.mask[t]
        ]
        if own:
            own[-1] = (*own[-1][:2], own[-1][2] + episode.reward)
        told.append(own)
    return told


def as_columns(groups: list[Group], batch: DataProto, values: list[list[float]]) -> torch.Tensor:
    """A number for every token that the policy wrote, as a column of the batch."""
    column, at = torch.zeros(batch.batch["responses"].shape), rows_in(batch, groups)
    for k, (own, mine) in enumerate(zip(own_tokens(groups), values)):
        for (c, t, _), value in zip(own, mine, strict=True):
            column[at[k, c], t] = value
    return column


@pytest.mark.parametrize("contexts", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_scores_stand_on_the_last_tokens_of_their_turns_and_the_end_on_the_last_of_all(seed, contexts):
    groups = make_groups(seed, contexts=contexts)
    batch = scored(groups)
    own = own_tokens(groups)
    expected = as_columns(groups, batch, [[reward for _, _, reward in tokens] for tokens in own])
    assert torch.allclose(batch.batch["token_level_scores"], expected)
    for (k, _), b in rows_in(batch, groups).items():
        assert float(batch.batch["score"][b]) == pytest.approx(sum(reward for _, _, reward in own[k]))


@pytest.mark.parametrize("seed", range(5))
def test_every_context_of_an_episode_is_a_row_in_the_mini_batch_of_its_prompt(seed):
    groups = make_groups(seed, contexts=4)
    batch, episodes = scored(groups), episodes_of(groups)
    assert len(batch) % (PARTS * DIVISOR) == 0
    at = rows_in(batch, groups)
    assert sorted(at) == [(k, c) for k, episode in enumerate(episodes) for c in range(len(episode.rows))]
    for (k, c), b in at.items():
        row, size = episodes[k].rows[c], len(episodes[k].rows[c].token_ids)
        written = batch.batch["attention_mask"][b].bool()
        assert batch.batch["input_ids"][b][written].tolist() == [*row.prompt_ids, *row.token_ids]
        assert batch.batch["response_mask"][b, :size].tolist() == row.mask.tolist()
        assert batch.batch["rollout_log_probs"][b, :size].tolist() == row.full_log_probs.tolist()
        assert batch.non_tensor_batch["uid"][b] == f"0:{k // 4}"
        assert b // (len(batch) // PARTS) == k // 4
    filling = sorted(set(range(len(batch))) - set(at.values()))
    assert len(filling) < len(batch) - len(episodes)
    assert not batch.batch["response_mask"][filling].any()
    assert without_filling(batch).batch["input_ids"].shape[0] == len(at)
    last = one_row_each(batch)
    assert last.batch["episode"].tolist() == list(range(len(episodes)))
    assert last.non_tensor_batch["context"].tolist() == [len(episode.rows) - 1 for episode in episodes]


def plain_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    ahead, next_value, advantages = 0.0, 0.0, []
    for reward, value in zip(reversed(rewards), reversed(values)):
        ahead = reward + gamma * next_value - value + gamma * lam * ahead
        next_value = value
        advantages.append(ahead)
    advantages.reverse()
    return advantages, [a + v for a, v in zip(advantages, values)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kl_in_reward", [False, True])
@pytest.mark.parametrize(
    "estimator", ["gae", "reinforce_plus_plus", "grpo", "rloo", "opo", "reinforce_plus_plus_baseline"]
)
@pytest.mark.parametrize("contexts", [1, 3])
def test_advantages_are_those_of_episodes_taken_one_by_one(seed, estimator, kl_in_reward, contexts):
    groups = make_groups(seed, contexts=contexts)
    batch = scored(groups)
    shape = batch.batch["responses"].shape
    noise = torch.Generator().manual_seed(seed)
    extra = {name: torch.randn(shape, generator=noise) / 4 for name in ("values", "old_log_probs", "ref_log_prob")}
    batch.put_columns(DataProto.from_dict(extra))
    config = Config()
    algorithm = config.algorithm
    algorithm.adv_estimator, algorithm.gamma, algorithm.lam, algorithm.use_kl_in_reward = (
        estimator,
        0.9,
        0.8,
        kl_in_reward,
    )
    if estimator not in ("gae", "reinforce_plus_plus"):
        algorithm.gamma = algorithm.lam = 1.0
    columns, figures = advantages(batch, algorithm, 0.3, 64, 64, config.distillation)

    told, at = own_tokens(groups), rows_in(batch, groups)
    kl = extra["old_log_probs"] - extra["ref_log_prob"]
    rewards = [
        [r - (0.3 * float(kl[at[k, c], t]) if kl_in_reward else 0) for c, t, r in own] for k, own in enumerate(told)
    ]
    expected: list[list[float]] = []
    returns: list[list[float]] = []
    for b, own in enumerate(told):
        if estimator == "gae":
            mine, back = plain_gae(rewards[b], [float(extra["values"][at[b, c], t]) for c, t, _ in own], 0.9, 0.8)
        elif estimator == "reinforce_plus_plus":
            mine = [sum(0.9**k * r for k, r in enumerate(rewards[b][t:])) for t in range(len(own))]
            back = list(mine)
        else:
            group = range(b // 4 * 4, b // 4 * 4 + 4)
            scores = [sum(rewards[k]) for k in group]
            mean, mine_score = sum(scores) / 4, sum(rewards[b])
            if estimator == "grpo":
                deviation = math.sqrt(sum((s - mean) ** 2 for s in scores) / 3)
                value = (mine_score - mean) / (deviation + 1e-6)
            elif estimator == "rloo":
                value = mine_score - (sum(scores) - mine_score) / 3
            elif estimator == "opo":
                lengths = [len(told[k]) for k in group]
                value = mine_score - sum(s * n for s, n in zip(scores, lengths)) / sum(lengths)
            else:
                value = mine_score - mean
            mine = [value] * len(own)
            back = list(mine)
        expected.append(mine)
        returns.append(back)
    if estimator in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):  # whitened over all tokens
        flat = [value for row in expected for value in row]
        mean = sum(flat) / len(flat)
        variance = sum((value - mean) ** 2 for value in flat) / (len(flat) - 1)
        expected = [[(value - mean) / math.sqrt(variance + 1e-8) for value in row] for row in expected]
    assert torch.allclose(columns["advantages"], as_columns(groups, batch, expected), atol=2e-5)
    if estimator == "gae":
        written = as_columns(groups, batch, [[1.0] * len(own) for own in told])
        assert torch.allclose(columns["returns"] * written, as_columns(groups, batch, returns), atol=2e-5)
    episodes = episodes_of(groups)
    lengths = [sum(len(row.token_ids) for row in episode.rows) for episode in episodes]
    assert figures["response_length/mean"] == pytest.approx(sum(lengths) / len(episodes))
    assert figures["response_length/mean"] > sum(len(own) for own in told) / len(told)
    assert figures["prompt_length/mean"] == pytest.approx(sum(len(e.rows[0].prompt_ids) for e in episodes) / len(told))
    assert figures["critic/rewards/mean"] == pytest.approx(sum(map(sum, rewards)) / len(told), abs=1e-6)
    tokens = sum(len(row.prompt_ids) + len(row.token_ids) for episode in episodes for row in episode.rows)
    assert figures["perf/total_num_tokens"] == tokens


def joined(batch: DataProto, groups: list[Group]) -> DataProto:
    """One row an episode, made by hand: its contexts one after the other, with what else its last row has."""
    at = rows_in(batch, groups)
    wide = [name for name, column in batch.batch.items() if column.shape[1:] == batch.batch["responses"].shape[1:]]
    lines: dict[str, list[torch.Tensor]] = {name: [] for name in [*wide, "reward_baselines"]}
    labels: dict[str, list] = {name: [] for name in batch.non_tensor_batch}
    for k, episode in enumerate(episodes_of(groups)):
        rows = [at[k, c] for c in range(len(episode.rows))]
        sizes = [len(row.token_ids) for row in episode.rows]
        for name in wide:
            lines[name].append(torch.cat([batch.batch[name][b, :size] for b, size in zip(rows, sizes)]))
        lines["reward_baselines"].append(batch.batch["reward_baselines"][rows[-1]])
        for name, column in batch.non_tensor_batch.items():
            labels[name].append(column[rows[-1]])
    lengths = torch.tensor([len(line) for line in lines["responses"]])
    padded = {name: torch.nn.utils.rnn.pad_sequence(lines[name], batch_first=True) for name in wide}
    there = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    padded |= {"attention_mask": torch.cat([torch.ones(len(lengths), 1).long(), there], 1), "response_lengths": lengths}
    padded["reward_baselines"] = torch.stack(lines["reward_baselines"])
    return DataProto.from_dict(padded, {name: object_array(values) for name, values in labels.items()})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("estimator", ADV_ESTIMATORS)
def test_every_estimator_sees_the_contexts_of_an_episode_as_one_line(seed, estimator):
    groups = make_groups(seed, contexts=3)
    batch = scored(groups)
    shape, noise = batch.batch["responses"].shape, torch.Generator().manual_seed(seed)
    drawn = {name: torch.rand(shape, generator=noise) for name in ("values", "sum_pi_squared", "rollout_is_weights")}
    drawn["old_log_probs"] = -torch.rand(shape, generator=noise)
    prompts = torch.tensor([int(uid[2:]) for uid in batch.non_tensor_batch["uid"]])
    drawn["reward_baselines"] = torch.tensor([0.5, -0.5, 2.0])[prompts]
    batch.put_columns(DataProto.from_dict(drawn))
    episodes = batch.batch["episode"].tolist()
    for name in ("reward_a", "reward_b"):
        values = torch.randn(100, generator=noise).tolist()
        batch.non_tensor_batch[name] = object_array([values[k] for k in episodes])
    batch.non_tensor_batch["trajectory_uid"] = object_array([f"t{k // 2}" for k in episodes])
    batch.non_tensor_batch["turn_index"] = object_array([k % 2 for k in episodes])
    batch.non_tensor_batch["observation"] = object_array([f"o{k % 3}" for k in episodes])
    config = Config()
    config.algorithm.adv_estimator = estimator
    config.algorithm.gdpo_reward_keys = ["a", "b"]
    arguments = (config.algorithm, 0.0, 64, 64, config.distillation)
    if estimator == "optimal_token_baseline":  # by the column: it cannot, and says who can
        with pytest.raises(DataError, match="tir_optimal_token_baseline"):
            advantages(batch, *arguments)
        return
    columns, _ = advantages(batch, *arguments)
    line = joined(batch, groups)
    expected, _ = advantages.__wrapped__(line, *arguments)
    at = rows_in(batch, groups)
    for name in ("advantages", "returns"):
        whole = torch.zeros(shape)
        for k, episode in enumerate(episodes_of(groups)):
            begin = 0
            for c, row in enumerate(episode.rows):
                end = begin + len(row.token_ids)
                whole[at[k, c], : end - begin] = expected[name][k, begin:end]
                begin = end
        assert torch.allclose(columns[name], whole, atol=1e-6)
    assert columns["advantages"].abs().sum() > 0


def test_versions_and_masks_of_rows_are_those_of_their_tokens():
    groups = make_groups(3)
    batch = batch_of(groups, 0, lambda rows: rows, versions=True)
    for b, episode in enumerate(s for g in groups for s in g.written):
        (row,) = episode.rows
        size = len(row.token_ids)
        assert batch.batch["response_mask"][b, :size].tolist() == row.mask.tolist()
        assert batch.batch["response_mask"][b, size:].sum() == 0
        written = batch.batch["token_versions"][b, :size][torch.from_numpy(row.mask).bool()].tolist()
        assert written == [version for version, count in row.versions for _ in range(count)]
        prompt = batch.batch["prompts"].shape[1]
        assert int(batch.batch["attention_mask"][b, prompt:].sum()) == size
        assert int(batch.batch["attention_mask"][b, :prompt].sum()) == len(row.prompt_ids)


def test_groups_of_episodes_survive_a_table(tmp_path):
    groups = make_groups(1, contexts=2)
    as_table(1, 0, groups).save_to_disk(tmp_path / "groups")
    _, _, again = from_table(DataProto.load_from_disk(tmp_path / "groups"))
    ours, theirs = (batch_of(g, 0, lambda rows: rows, versions=True) for g in (groups, again))
    assert set(ours.batch.keys()) == set(theirs.batch.keys())
    assert all(torch.equal(ours.batch[name], theirs.batch[name]) for name in ours.batch.keys())  # noqa: SIM118
    assert episode_figures(groups) == episode_figures(again)
