"""Optimal token baselines, gdpo and gigpo: by hand, against plain loops, and by what a wrong version would get wrong."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from plain_reference import by_group, mean, return_to_go, variance, whiten
from random_batches import make_batch, seeds, sizes

from quadriga.algorithms import compute_advantage
from quadriga.errors import ConfigError, DataError

BASELINES = ["optimal_token_baseline", "tir_optimal_token_baseline"]
baselines = pytest.mark.parametrize("name", BASELINES)


def closed(batch):
    """The batch with its gaps closed up."""
    order = torch.argsort((~batch["response_mask"]).int(), dim=-1, stable=True)
    return {k: v.gather(-1, order) if v.dim() == 2 else v for k, v in batch.items()}


def inputs_of(batch, weighted=False):
    keys = ["token_level_rewards", "response_mask", "group_ids", "old_log_prob", "sum_pi_squared"]
    return {k: batch[k] for k in [*keys, *["rollout_is_weights"] * weighted]}


def by_loops(batch, zero_tail=True, weighted=False):
    """The definition, one group and position at a time."""
    lists = {k: batch[k].tolist() for k in inputs_of(batch, weighted)}
    mask = lists["response_mask"]
    returns = return_to_go(lists["token_level_rewards"], mask, 1.0)
    out = [[0.0] * len(m) for m in mask]
    for rows in by_group(lists["group_ids"]):
        rows = [i for i in rows if any(mask[i])]
        if len(rows) < 2:
            continue
        collected = {}
        for i in rows:
            total, collected[i] = 0.0, []
            for t in range(len(mask[i])):
                e = max(0.0, 1 - 2 * math.exp(lists["old_log_prob"][i][t]) + lists["sum_pi_squared"][i][t])
                if weighted:
                    e *= lists["rollout_is_weights"][i][t] ** 2
                total += e if mask[i][t] else 0.0
                collected[i].append(total)
        for t in range(len(mask[0])):
            there = [i for i in rows if mask[i][t]]
            if not there:
                continue
            b = sum(returns[i][t] * collected[i][t] for i in there) / (sum(collected[i][t] for i in there) + 1e-8)
            if zero_tail and len(there) == 1:
                b = 0.0
            for i in there:
                out[i][t] = returns[i][t] - b
    return out


@baselines
@settings(max_examples=60, deadline=None)
@given(seeds, sizes)
def test_token_baselines_equal_the_plain_reference(name, seed, size):
    batch = closed(make_batch(seed, size))
    for zero_tail in (True, False):
        for weighted in (True, False):
            inputs = inputs_of(batch, weighted)
            got, returns = compute_advantage(name, **inputs, handle_zero_tail=zero_tail)
            expected = torch.tensor(by_loops(batch, zero_tail, weighted), dtype=torch.float64)
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
            assert (returns[~batch["response_mask"]] == 0).all()


@settings(max_examples=40, deadline=None)
@given(seeds, sizes)
def test_the_tir_baseline_does_not_see_gaps(seed, size):
    batch = make_batch(seed, size)
    order = torch.argsort((~batch["response_mask"]).int(), dim=-1, stable=True)
    with_gaps, _ = compute_advantage(BASELINES[1], **inputs_of(batch))
    without, _ = compute_advantage(BASELINES[0], **inputs_of(closed(batch)))
    torch.testing.assert_close(with_gaps.gather(-1, order), without)


def test_the_plain_baseline_refuses_gaps():
    batch = make_batch(3, (3, 4)) | {"response_mask": torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]])}
    with pytest.raises(DataError, match="Row 1 has a gap"):
        compute_advantage("optimal_token_baseline", **inputs_of(batch))


def rows_of(scores, weights, groups=None):
    """Rows of two tokens; `weights` is each row's e at both."""
    rows = len(scores)
    rewards = torch.zeros(rows, 2, dtype=torch.float64)
    rewards[:, 1] = torch.tensor(scores, dtype=torch.float64)
    half = torch.full((rows, 2), 0.5, dtype=torch.float64)
    return {
        "token_level_rewards": rewards,
        "response_mask": torch.ones(rows, 2, dtype=torch.bool),
        "group_ids": torch.zeros(rows).long() if groups is None else torch.tensor(groups),
        "old_log_prob": half.log(),
        "sum_pi_squared": torch.tensor(weights, dtype=torch.float64).unsqueeze(-1).expand(rows, 2),
    }


@baselines
def test_with_equal_weights_the_baseline_is_the_mean_return(name):
    got, _ = compute_advantage(name, **rows_of([1.0, 2.0, 6.0], [0.5] * 3))
    assert got[:, 0].tolist() == pytest.approx([-2, -1, 3], abs=1e-6)


@baselines
def test_surprising_rows_weigh_more_and_the_baseline_stays_between_the_returns(name):
    got, _ = compute_advantage(name, **rows_of([0.0, 1.0], [0.75, 0.25]))
    assert got[:, 0].tolist() == pytest.approx([-0.25, 0.75], abs=1e-6)


@baselines
def test_a_constant_added_to_all_returns_leaves_the_advantages(name):
    got, _ = compute_advantage(name, **rows_of([0.0, 1.0, 4.0], [0.7, 0.2, 0.1]))
    moved, _ = compute_advantage(name, **rows_of([9.0, 10.0, 13.0], [0.7, 0.2, 0.1]))
    torch.testing.assert_close(moved, got, rtol=0, atol=1e-6)


@baselines
def test_a_group_of_one_has_zero_advantage_and_rows_without_tokens_leave_it(name):
    batch = rows_of([5.0, -3.0], [0.5, 0.5], groups=[0, 1])
    assert (compute_advantage(name, **batch)[0] == 0).all()
    batch = rows_of([5.0, -3.0], [0.5, 0.5])
    batch["response_mask"][1] = False
    assert (compute_advantage(name, **batch)[0] == 0).all()


@baselines
def test_where_only_the_longest_row_is_left_its_return_is_its_advantage(name):
    batch = rows_of([1.0, 3.0], [0.5, 0.5])
    batch["response_mask"][0, 1] = False
    batch["token_level_rewards"] = torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    assert compute_advantage(name, **batch)[0][1, 1].item() == pytest.approx(3.0)
    kept, _ = compute_advantage(name, **batch, handle_zero_tail=False)
    assert kept[1, 1].item() == pytest.approx(0.0, abs=1e-6)


@baselines
def test_what_the_baseline_needs_is_named(name):
    batch = rows_of([1.0, 2.0], [0.5, 0.5])
    del batch["sum_pi_squared"]
    with pytest.raises(ConfigError, match="needs 'sum_pi_squared'"):
        compute_advantage(name, **batch)


# ------------------------------------------------------------------------------------------------------------------ gdpo


def gdpo_batch(components, groups, lengths):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {
        "token_level_rewards": torch.zeros(mask.shape, dtype=torch.float64),
        "response_mask": mask,
        "group_ids": torch.tensor(groups),
        "reward_components": {k: torch.tensor(v, dtype=torch.float64) for k, v in components.items()},
    }


GROUPS, LENGTHS = [0, 0, 0, 1, 1], [1, 3, 2, 2, 4]
RIGHT, TIDY = [1.0, 0.0, 0.0, 1.0, 0.0], [0.2, 0.9, 0.4, 0.1, 0.3]


def gdpo(components, **options):
    return compute_advantage("gdpo", **gdpo_batch(components, GROUPS, LENGTHS), **options)[0]


@pytest.mark.parametrize("normalise", [True, False])
def test_gdpo_by_plain_loops(normalise):
    batch = gdpo_batch({"right": RIGHT, "tidy": TIDY}, GROUPS, LENGTHS)
    got, _ = compute_advantage("gdpo", **batch, gdpo_reward_weights=[1.0, 0.5], norm_adv_by_std_in_grpo=normalise)
    per_row = [0.0] * 5
    for values, weight in ((RIGHT, 1.0), (TIDY, 0.5)):
        for rows in by_group(GROUPS):
            group = [values[i] for i in rows]
            scale = math.sqrt(variance(group)) + 1e-6 if normalise else 1.0
            for i in rows:
                per_row[i] += weight * (values[i] - mean(group)) / scale
    mask = batch["response_mask"].tolist()
    expected = whiten([[a] * len(m) for a, m in zip(per_row, mask)], mask)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_the_scale_of_a_reward_does_not_matter_and_a_constant_one_adds_nothing():
    got = gdpo({"right": RIGHT, "tidy": TIDY})
    scaled = gdpo({"right": [100 * r for r in RIGHT], "tidy": TIDY})
    assert (scaled - got).abs().max() < 1e-4
    torch.testing.assert_close(gdpo({"right": RIGHT, "tidy": TIDY, "same": [0.7] * 5}), got)


def test_one_reward_alone_is_whitened_grpo():
    batch = gdpo_batch({"right": RIGHT}, GROUPS, LENGTHS)
    rewards = batch["token_level_rewards"].clone()
    rewards[:, 0] = torch.tensor(RIGHT, dtype=torch.float64)
    grpo, _ = compute_advantage("grpo", **batch | {"token_level_rewards": rewards})
    mask = batch["response_mask"].tolist()
    torch.testing.assert_close(gdpo({"right": RIGHT}), torch.tensor(whiten(grpo.tolist(), mask), dtype=torch.float64))


def test_gdpo_reports_each_reward():
    metrics: dict[str, float] = {}
    gdpo({"right": [1.0, 1.0, 1.0, 0.0, 1.0]}, metrics=metrics)
    assert metrics["gdpo/right/mean"] == pytest.approx(0.8)
    assert metrics["gdpo/right/std"] == pytest.approx(0.4)
    assert metrics["gdpo/right/groups_without_spread"] == pytest.approx(3 / 5)


def test_gdpo_refuses_weights_that_do_not_fit_and_rewards_that_are_not_finite():
    with pytest.raises(ConfigError, match="gdpo has 1 rewards"):
        gdpo({"right": RIGHT}, gdpo_reward_weights=[1.0, 2.0])
    with pytest.raises(DataError, match="'right' of row 1"):
        gdpo({"right": [1.0, float("nan"), 0.0, 0.0, 0.0]})


# ----------------------------------------------------------------------------------------------------------------- gigpo


def gigpo(rewards, trajectories, steps, observations, groups, **options):
    table = torch.zeros(len(rewards), 2, dtype=torch.float64)
    table[:, 1] = torch.tensor(rewards, dtype=torch.float64)
    got, _ = compute_advantage(
        "gigpo",
        token_level_rewards=table,
        response_mask=torch.ones(len(rewards), 2),
        group_ids=torch.tensor(groups),
        trajectory_ids=torch.tensor(trajectories),
        step_ids=torch.tensor(steps),
        observation_ids=torch.tensor(observations),
        **options,
    )
    return got[:, 0].tolist()


def test_gigpo_by_hand():
    # Trajectory 7: rewards 0, 1 in states 10, 11. Trajectory 8: 0, 0 in states 10, 12. γ = ½. Rows are not in order.
    rewards, trajectories, steps, states = [1.0, 0.0, 0.0, 0.0], [7, 7, 8, 8], [1, 0, 0, 1], [11, 10, 10, 12]
    got = gigpo(rewards, trajectories, steps, states, [0] * 4, gigpo_gamma=0.5, norm_adv_by_std_in_grpo=False)
    # A_episode: ±½. A_step: in state 10 the returns are ½ and 0; the other states were seen once.
    assert got == pytest.approx([0.5, 0.5 + 0.25, -0.5 - 0.25, -0.5])
    divided = gigpo(rewards, trajectories, steps, states, [0] * 4, gigpo_gamma=0.5)
    root = math.sqrt(0.5) + 1e-6  # the std over the two trajectories, not over the four rows
    assert divided == pytest.approx([0.5 / root, 0.5 / root + 0.25, -0.5 / root - 0.25, -0.5 / root])


def test_gigpo_step_weight_and_std():
    rewards, trajectories, steps, states = [1.0, 0.0], [0, 1], [0, 0], [4, 4]
    plain = gigpo(rewards, trajectories, steps, states, [0, 0], gigpo_step_weight=0.0)
    weighted = gigpo(rewards, trajectories, steps, states, [0, 0], gigpo_step_weight=2.0)
    assert [w - p for w, p in zip(weighted, plain)] == pytest.approx([1.0, -1.0])
    scaled = gigpo(rewards, trajectories, steps, states, [0, 0], gigpo_norm_steps_by_std=True)
    assert scaled[0] - plain[0] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6))


def test_a_state_is_compared_within_its_prompt_only():
    got = gigpo([1.0, 0.0, 5.0, 5.0], [0, 1, 2, 3], [0] * 4, [4] * 4, [0, 0, 1, 1], gigpo_step_weight=1.0)
    assert got[2:] == [0, 0]


def test_splitting_trajectories_into_steps_leaves_grpos_advantages():
    metrics: dict[str, float] = {}
    got = gigpo([0, 1.0, 0, 0, 3.0], [0, 0, 1, 1, 2], [0, 1, 0, 1, 0], [1, 2, 3, 4, 5], [0] * 5, metrics=metrics)
    whole, _ = compute_advantage(
        "grpo",
        token_level_rewards=torch.tensor([[1.0], [0.0], [3.0]], dtype=torch.float64),
        response_mask=torch.ones(3, 1),
        group_ids=torch.zeros(3).long(),
    )
    a = whole[:, 0].tolist()
    assert got == pytest.approx([a[0], a[0], a[1], a[1], a[2]])
    assert metrics["gigpo/step_group_size"] == 1


def test_gigpo_of_single_steps_needs_no_more_than_the_groups():
    rewards = torch.tensor([[1.0], [0.0], [4.0]], dtype=torch.float64)
    inputs = {"token_level_rewards": rewards, "response_mask": torch.ones(3, 1), "group_ids": torch.tensor([0, 0, 1])}
    got, _ = compute_advantage("gigpo", **inputs, norm_adv_by_std_in_grpo=False)
    assert got[:, 0].tolist() == pytest.approx([1.0, -1.0, 0.0])  # the episode's ½ and the step's ½


def test_gigpo_refuses_two_steps_of_the_same_number():
    with pytest.raises(DataError, match="same number"):
        gigpo([1.0, 0.0], [0, 0], [1, 1], [0, 0], [0, 0])
