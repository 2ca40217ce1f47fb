from __future__ import annotations

import math

import numpy as np
import plain_reference as plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_batches import ADVANTAGE_INPUTS, make_batch, only, seeds, sizes

from quadriga.algorithms import adv_estimator_names, compute_advantage, get_adv_estimator, group_ids_from_uids, masked
from quadriga.errors import ConfigError, DataError

ALL = sorted(plain.ESTIMATORS)
OUTCOME = ["gpg", "grpo", "grpo_passk", "grpo_vectorized", "opo", "reinforce_plus_plus_baseline", "rloo"]
WHITENED = ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
estimators = pytest.mark.parametrize("name", ALL)


def advantage_batch(seed, size, **kw):
    return only(make_batch(seed, size, **kw), ADVANTAGE_INPUTS)


def one_per_row(rows: list[float], lengths: list[int] | None = None) -> dict[str, torch.Tensor]:
    """A batch whose row i has the score rows[i] on the last of its tokens."""
    lengths = lengths or [2] * len(rows)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards[torch.arange(len(rows)), torch.tensor(lengths) - 1] = torch.tensor(rows, dtype=torch.float64)
    return {"token_level_rewards": rewards, "response_mask": mask}


def row_advantages(name: str, scores: list[float], groups: list[int], lengths=None, **kw) -> list[float]:
    advantages, returns = compute_advantage(name, **one_per_row(scores, lengths), group_ids=torch.tensor(groups), **kw)
    assert torch.equal(advantages, returns)
    return advantages[:, 0].tolist()


def test_the_registry_holds_exactly_the_estimators_of_the_contract():
    elsewhere = ["gdpo", "gigpo", "optimal_token_baseline", "tir_optimal_token_baseline"]  # test_more_advantages.py
    assert adv_estimator_names() == sorted([*ALL, *elsewhere])


# ------------------------------------------------------------------------------------------------ against plain Python


@estimators
@settings(max_examples=60, deadline=None)
@given(seeds, sizes, st.sampled_from([0.0, 0.5, 0.97, 1.0]), st.sampled_from([0.0, 0.9, 1.0]), st.booleans())
def test_equals_the_plain_reference(name, seed, size, gamma, lam, normalise):
    batch = advantage_batch(seed, size)
    options = {"gamma": gamma, "lam": lam, "norm_adv_by_std_in_grpo": normalise, "f_norm": 1.7}
    got = compute_advantage(name, **batch, **options)
    lists = {key: value.tolist() for key, value in batch.items()}
    expected = plain.ESTIMATORS[name](lists.pop("token_level_rewards"), lists.pop("response_mask"), **lists, **options)
    for ours, theirs in zip(got, expected):
        torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64), rtol=1e-8, atol=1e-8)


@estimators
def test_blocks_of_rows_do_not_show(name, monkeypatch):
    batch = advantage_batch(5, (23, 9))
    at_once = compute_advantage(name, **batch, gamma=0.9, lam=0.8)
    monkeypatch.setattr(masked, "_BLOCK_ELEMENTS", 36)
    for block, whole in zip(compute_advantage(name, **batch, gamma=0.9, lam=0.8), at_once):
        torch.testing.assert_close(block, whole)


# --------------------------------------------------------------------------------------------------------- by hand


def test_grpo_by_hand():
    # Scores 1, 2, 3: mean 2, unbiased std 1. Scores 0, 4: mean 2, std √8.
    got = row_advantages("grpo", [1, 2, 3, 0, 4], [7, 7, 7, 1, 1])
    root8 = math.sqrt(8)
    assert got == pytest.approx([-1 / (1 + 1e-6), 0, 1 / (1 + 1e-6), -2 / (root8 + 1e-6), 2 / (root8 + 1e-6)])


def test_dr_grpo_does_not_divide():
    assert row_advantages("grpo", [1, 2, 3, 0, 4], [7, 7, 7, 1, 1], norm_adv_by_std_in_grpo=False) == [-1, 0, 1, -2, 2]


def test_rloo_by_hand():
    # 1 against the mean of (2, 6) = 4, 2 against 3.5, 6 against 1.5.
    assert row_advantages("rloo", [1, 2, 6], [0, 0, 0]) == pytest.approx([-3, -1.5, 4.5])


def test_opo_weighs_the_baseline_by_length():
    # Lengths 1 and 3, scores 4 and 0: the baseline is (1·4 + 3·0) / 4 = 1.
    assert row_advantages("opo", [4, 0], [0, 0], lengths=[1, 3]) == [3, -1]


def test_pass_at_k_rewards_the_lead_of_the_best_alone():
    assert row_advantages("grpo_passk", [1, 5, 2, 3], [0, 0, 0, 1], norm_adv_by_std_in_grpo=False) == [0, 3, 0, 0]
    std = math.sqrt(((1 - 8 / 3) ** 2 + (5 - 8 / 3) ** 2 + (2 - 8 / 3) ** 2) / 2)
    assert row_advantages("grpo_passk", [1, 5, 2], [0, 0, 0]) == pytest.approx([0, 3 / (std + 1e-6), 0])


def test_pass_at_k_with_a_shared_first_place_has_no_winner():
    assert row_advantages("grpo_passk", [5, 5, 2], [0, 0, 0]) == [0, 0, 0]


def test_gpg_scales_up_by_the_share_of_rows_with_a_score():
    # Two of four rows have a score: α = 4 / 2.
    assert row_advantages("gpg", [1, 3, 0, 0], [0, 0, 1, 1]) == [-2, 2, 0, 0]
    assert row_advantages("gpg", [1, 3, 0, 0], [0, 0, 1, 1], f_norm=4.0) == [-0.5, 0.5, 0, 0]


def test_reinforce_plus_plus_baseline_by_hand():
    # Centred scores −1, 1 on 1 and 3 tokens: over tokens the mean is 1/2 and the variance ((3/2)² + 3·(1/2)²) / 3 = 1.
    got = row_advantages("reinforce_plus_plus_baseline", [0, 2], [0, 0], lengths=[1, 3])
    assert got == pytest.approx([-1.5, 0.5])


def test_reinforce_plus_plus_by_hand():
    rewards, mask = torch.tensor([[0.0, 0.0, 8.0]]), torch.tensor([[1, 1, 1]])
    advantages, returns = compute_advantage(
        "reinforce_plus_plus", token_level_rewards=rewards, response_mask=mask, gamma=0.5
    )
    assert returns.tolist() == [[2, 4, 8]]
    mean, std = 14 / 3, math.sqrt(((2 - 14 / 3) ** 2 + (4 - 14 / 3) ** 2 + (8 - 14 / 3) ** 2) / 2)
    assert advantages[0].tolist() == pytest.approx([(x - mean) / std for x in (2, 4, 8)])


def test_remax_by_hand():
    advantages, returns = compute_advantage(
        "remax",
        token_level_rewards=torch.tensor([[1.0, 0.0, 3.0], [2.0, 0.0, 0.0]]),
        response_mask=torch.tensor([[1, 1, 1], [1, 0, 0]]),
        reward_baselines=torch.tensor([1.0, 5.0]),
    )
    assert returns.tolist() == [[4, 3, 3], [2, 0, 0]]
    assert advantages.tolist() == [[3, 2, 2], [-3, 0, 0]]


def test_gae_by_hand():
    # γ = λ = ½, values 2 and 4, reward 3 at the end: δ = (0 + ½·4 − 2, 3 − 4) = (0, −1), A = (0 − ¼, −1).
    advantages, returns = compute_advantage(
        "gae",
        token_level_rewards=torch.tensor([[0.0, 3.0]]),
        response_mask=torch.ones(1, 2),
        values=torch.tensor([[2.0, 4.0]]),
        gamma=0.5,
        lam=0.5,
    )
    assert returns.tolist() == [[1.75, 3.0]]
    half_gap = 0.375 / math.sqrt(2 * 0.375**2)  # −0.25 and −1 lie 0.375 on either side of their mean
    assert advantages[0].tolist() == pytest.approx([half_gap, -half_gap])


# ------------------------------------------------------------------------------------------------------- properties


@estimators
@settings(max_examples=25, deadline=None)
@given(seeds, sizes)
def test_permuting_rows_permutes_the_result(name, seed, size):
    batch = advantage_batch(seed, size)
    order = torch.randperm(size[0], generator=torch.Generator().manual_seed(seed))
    plain_order = compute_advantage(name, **batch, gamma=0.9, lam=0.8)
    permuted = compute_advantage(name, **{key: value[order] for key, value in batch.items()}, gamma=0.9, lam=0.8)
    for a, b in zip(permuted, plain_order):
        torch.testing.assert_close(a, b[order], rtol=1e-9, atol=1e-9)


@estimators
@settings(max_examples=25, deadline=None)
@given(seeds, sizes, st.integers(1, 5))
def test_more_padding_changes_nothing(name, seed, size, extra):
    batch = advantage_batch(seed, size)
    padded = {k: torch.nn.functional.pad(v, (0, extra)) if v.dim() == 2 else v for k, v in batch.items()}
    for a, b in zip(compute_advantage(name, **padded, gamma=0.9), compute_advantage(name, **batch, gamma=0.9)):
        torch.testing.assert_close(a[:, : size[1]], b, rtol=1e-9, atol=1e-9)
        assert (a[:, size[1] :] == 0).all()


@estimators
@settings(max_examples=25, deadline=None)
@given(seeds, sizes)
def test_a_gap_is_as_if_it_were_not_there(name, seed, size):
    """Closing the gaps of every row, so that its tokens are adjacent, closes those of the result, with equal values."""
    batch = advantage_batch(seed, size)
    order = torch.argsort((~batch["response_mask"]).int(), dim=-1, stable=True)
    closed = {k: v.gather(-1, order) if v.dim() == 2 else v for k, v in batch.items()}
    options = {"gamma": 0.9, "lam": 0.8}
    for a, b in zip(compute_advantage(name, **closed, **options), compute_advantage(name, **batch, **options)):
        torch.testing.assert_close(a, b.gather(-1, order), rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(seeds, sizes)
def test_gae_with_gamma_and_lambda_1_is_monte_carlo(seed, size):
    batch = advantage_batch(seed, size)
    _, returns = compute_advantage("gae", **batch, gamma=1.0, lam=1.0)
    _, monte_carlo = compute_advantage("reinforce_plus_plus", **batch, gamma=1.0)
    assert torch.equal(returns, monte_carlo)


@settings(max_examples=40, deadline=None)
@given(seeds, sizes)
def test_gae_with_lambda_0_looks_one_policy_token_ahead(seed, size):
    batch = advantage_batch(seed, size)
    _, returns = compute_advantage("gae", **batch, gamma=0.9, lam=0.0)
    for row in range(size[0]):
        at = batch["response_mask"][row].nonzero().flatten().tolist()
        for t, following in zip(at, [*at[1:], None]):
            ahead = 0.0 if following is None else batch["values"][row, following].item()
            expected = batch["token_level_rewards"][row, t].item() + 0.9 * ahead
            assert returns[row, t].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["grpo", "rloo", "gpg"])
@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(2, 12))
def test_the_advantages_of_a_group_sum_to_0(name, seed, rows):
    random = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, generator=random, dtype=torch.float64).tolist()
    groups = torch.randint(0, 3, (rows,), generator=random).tolist()
    got = row_advantages(name, scores, groups)
    for members in plain.by_group(groups):
        assert sum(got[i] for i in members) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", OUTCOME)
def test_a_group_of_one_has_zero_advantage(name):
    assert row_advantages(name, [5.0, -3.0, 2.0], [0, 1, 2]) == [0, 0, 0]


@pytest.mark.parametrize("name", OUTCOME)
@pytest.mark.parametrize("score", [0.1, 1 / 3, -7.7])
def test_equal_scores_have_exactly_zero_advantage(name, score):
    batch = one_per_row([score] * 7, lengths=[1, 2, 3, 1, 2, 3, 5])
    batch["token_level_rewards"] = batch["token_level_rewards"].float()
    advantages, _ = compute_advantage(name, **batch, group_ids=torch.zeros(7, dtype=torch.int64))
    if name == "opo":  # its baseline is a weighted mean, which rounds
        assert advantages.abs().max() < 1e-6
    else:
        assert (advantages == 0).all()


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "grpo_passk", "reinforce_plus_plus_baseline"])
def test_adding_a_constant_to_all_scores_changes_nothing(name):
    scores, groups = [1.0, 4.0, 2.0, 8.0, 0.0], [0, 0, 0, 1, 1]
    assert row_advantages(name, [s + 100 for s in scores], groups) == pytest.approx(
        row_advantages(name, scores, groups)
    )


@pytest.mark.parametrize("name", WHITENED)
def test_whitened_advantages_have_mean_0_and_variance_1_over_tokens(name):
    batch = advantage_batch(11, (40, 30))
    advantages, _ = compute_advantage(name, **batch, gamma=0.99, lam=0.95)
    tokens = advantages[batch["response_mask"]]
    assert tokens.mean().abs() < 1e-9
    assert tokens.var().item() == pytest.approx(1, rel=1e-6)


# --------------------------------------------------------------------------------------------------- hard inputs


@pytest.mark.parametrize("name", OUTCOME)
def test_a_score_on_a_token_that_is_not_the_policys_is_not_lost(name):
    """A conversation may end with a tool's output, and carry its score there."""
    batch = one_per_row([1.0, 5.0, 2.0]) | {"group_ids": torch.zeros(3, dtype=torch.int64)}
    moved = batch | {"token_level_rewards": torch.nn.functional.pad(batch["token_level_rewards"], (1, 0))}
    moved["response_mask"] = torch.nn.functional.pad(batch["response_mask"], (0, 1))
    expected, _ = compute_advantage(name, **batch)
    assert torch.equal(compute_advantage(name, **moved)[0][:, :2], expected)


@estimators
@settings(max_examples=25, deadline=None)
@given(seeds, sizes)
def test_float32_in_is_float32_out_and_close_to_float64(name, seed, size):
    exact = advantage_batch(seed, size)
    single = {k: v.float() if v.is_floating_point() else v for k, v in exact.items()}
    for a, b in zip(compute_advantage(name, **single, gamma=0.9), compute_advantage(name, **exact, gamma=0.9)):
        assert a.dtype == torch.float32
        assert b.dtype == torch.float64
        assert a.isfinite().all()
        if name not in WHITENED and not name.startswith("grpo"):  # these divide by a spread that may be 0
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@estimators
def test_all_zero_rewards_a_one_token_row_and_an_all_masked_row_are_finite(name):
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [0, 1, 0]])
    zeros = torch.zeros(4, 3)
    advantages, returns = compute_advantage(
        name,
        token_level_rewards=zeros,
        response_mask=mask,
        values=zeros,
        group_ids=torch.tensor([0, 0, 1, 1]),
        reward_baselines=torch.zeros(4),
    )
    assert (advantages == 0).all()
    assert (returns == 0).all()


@pytest.mark.parametrize("name", WHITENED)
def test_a_batch_without_any_token_is_an_error_where_it_must_be_whitened(name):
    batch = advantage_batch(0, (3, 4)) | {"response_mask": torch.zeros(3, 4)}
    with pytest.raises(DataError, match=r"[Rr]ow"):
        compute_advantage(name, **batch)


def test_values_under_the_padding_are_never_read():
    batch = advantage_batch(3, (6, 8))
    dirty = batch | {"values": torch.where(batch["response_mask"], batch["values"], float("nan"))}
    for a, b in zip(compute_advantage("gae", **dirty, lam=0.9), compute_advantage("gae", **batch, lam=0.9)):
        assert torch.equal(a, b)


def test_inputs_are_left_as_they_were():
    batch = advantage_batch(4, (6, 8))
    before = {key: value.clone() for key, value in batch.items()}
    for name in ALL:
        compute_advantage(name, **batch)
    assert all(torch.equal(batch[key], before[key]) for key in batch)


def test_values_with_gradient_give_advantages_without():
    batch = advantage_batch(4, (6, 8))
    batch["values"].requires_grad_()
    for x in (
        *compute_advantage("gae", **batch),
        *get_adv_estimator("gae")(**only(batch, ADVANTAGE_INPUTS[:2]), values=batch["values"]),
    ):
        assert not x.requires_grad


# ---------------------------------------------------------------------------------------------------------- groups


def test_uids_of_any_kind_become_groups():
    uids = np.array(["b", "a", "b", "c"], dtype=object)
    assert group_ids_from_uids(uids).tolist() == [0, 1, 0, 2]
    assert group_ids_from_uids([(0, 5), (0, 6), (0, 5)]).tolist() == [0, 1, 0]
    assert group_ids_from_uids(torch.tensor([9, -1, 9])).tolist() == [0, 1, 0]
    batch = one_per_row([1.0, 2.0, 3.0, 4.0])
    by_uid, _ = compute_advantage("rloo", **batch, group_ids=uids)
    by_number, _ = compute_advantage("rloo", **batch, group_ids=torch.tensor([5, 3, 5, 4]))
    assert torch.equal(by_uid, by_number)


def test_unhashable_uids_are_refused():
    with pytest.raises(DataError, match="hashable"):
        group_ids_from_uids(np.zeros((2, 2)))


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(("name", "missing"), [("gae", "values"), ("grpo", "group_ids"), ("remax", "reward_baselines")])
def test_a_missing_input_is_named(name, missing):
    batch = advantage_batch(1, (4, 3)) | {missing: None}
    with pytest.raises(ConfigError, match=f"'{name}' needs '{missing}'"):
        compute_advantage(name, **batch)


@pytest.mark.parametrize("key", ["response_mask", "values", "group_ids", "reward_baselines"])
def test_a_wrong_shape_is_named(key):
    batch = advantage_batch(1, (4, 3))
    batch[key] = batch[key][:-1]
    with pytest.raises(DataError, match=f"{key} has shape"):
        compute_advantage("gae", **batch)


def test_rewards_of_integers_or_of_one_dimension_are_refused():
    for rewards in (torch.zeros(2, 2, dtype=torch.int64), torch.zeros(4)):
        with pytest.raises(DataError, match="token_level_rewards"):
            compute_advantage("grpo", token_level_rewards=rewards, response_mask=rewards, group_ids=[0, 0])


def test_the_row_of_a_reward_that_is_not_finite_is_named():
    batch = advantage_batch(1, (4, 3))
    batch["token_level_rewards"][2, 0] = float("nan")
    with pytest.raises(DataError, match="row 2"):
        compute_advantage("grpo", **batch)


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(ConfigError) as error:
        get_adv_estimator("gpro")
    assert "Did you mean 'grpo'" in str(error.value)
    assert "algorithm.adv_estimator" in str(error.value)
    assert all(name in str(error.value) for name in ALL)
