"""The losses beyond PPO's clip: by hand, by the closed form of their gradient, and by what a wrong version would get wrong."""

from __future__ import annotations

import math

import pytest
import torch
from random_batches import make_batch
from test_policy_losses import loss_and_gradient, loss_of, row

from quadriga.algorithms import Aggregation, compute_policy_loss
from quadriga.algorithms.stale_losses import loglinear_proximal
from quadriga.algorithms.token_choice import (
    dropped_share,
    off_policy_sequence_mask,
    random_priorities,
    second_moment_mask,
    select_by_covariance,
    select_by_entropy,
)
from quadriga.errors import ConfigError, DataError

NEW = ["clip_cov", "decoupled", "dppo_kl", "dppo_tv", "dro", "kl_cov", "luspo", "prime_rl", "sapo", "vespo"]
TOKEN_SUM = "token-sum"


def token_sum(batch):
    return Aggregation.of_batch(TOKEN_SUM, batch["response_mask"])


def gradient_of(name, batch, **options):
    return loss_and_gradient(name, batch, token_sum(batch), **options)[1][0].tolist()


def with_ratios(ratios, advantages, old_probs, **more):
    """One row with given ratios and old probabilities."""
    old = torch.tensor([old_probs], dtype=torch.float64).log()
    batch = row([0.0] * len(ratios), advantages)
    logs = torch.tensor([ratios], dtype=torch.float64).log()
    return batch | {"old_log_prob": old, "log_prob": old + logs, "rollout_log_prob": old.clone()} | more


# ----------------------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", NEW)
def test_on_policy_every_gradient_is_that_of_the_plain_policy_gradient(name):
    """−A times the aggregation's weight of the token; 0 on the tokens that clip_cov has chosen."""
    batch = make_batch(41, (6, 7))
    batch["advantages"] = batch["advantages"][:, :1].clone().expand(6, 7)
    batch["old_log_prob"] = batch["rollout_log_prob"] = batch["log_prob"].clone()
    agg = Aggregation.of_batch("seq-mean-token-sum" if name == "luspo" else "token-mean", batch["response_mask"])
    _, gradient, metrics = loss_and_gradient(name, batch, agg)
    sequences = int(batch["response_mask"].any(-1).sum())
    weight = 1 / sequences if name == "luspo" else 1 / int(batch["response_mask"].sum())
    expected = -batch["advantages"] * weight * batch["response_mask"]
    if name == "clip_cov":
        expected = expected.masked_fill(batch["cov_selected"], 0)
    torch.testing.assert_close(gradient, expected)
    assert metrics["actor/ppo_kl"] == 0


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("distance", [90.0, -90.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_log_ratio_of_90_is_finite_in_float32(name, distance, advantage):
    batch = {k: v.float() for k, v in row([distance, 0.0], [advantage] * 2, log_prob=-100.0).items()}
    batch |= {"rollout_log_prob": batch["old_log_prob"] - distance, "token_versions": torch.zeros(1, 2).long()}
    batch["cov_selected"] = torch.tensor([[True, False]])
    loss, gradient, _ = loss_and_gradient(name, batch, token_sum(batch))
    assert loss.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "vespo"])
def test_losses_with_the_log_prob_in_them_agree_on_policy_in_gradient_and_not_in_value(name):
    batch = row([0.0], [2.0], log_prob=-3.0)
    loss, gradient, _ = loss_and_gradient(name, batch, token_sum(batch))
    assert (loss.item(), gradient.item()) == pytest.approx((6.0, -2.0))


# ------------------------------------------------------------------------------------------------------------------ sapo


@pytest.mark.parametrize(("advantage", "tau"), [(1.5, 1.0), (-1.5, 1.05), (1.5, 2.5)])
@pytest.mark.parametrize("ratio", [0.01, 0.5, 1.0, 1.7, 40.0])
def test_sapo_by_its_closed_form(advantage, tau, ratio):
    options = {"tau_pos" if advantage > 0 else "tau_neg": tau}
    batch = row([math.log(ratio)], [advantage])
    loss, gradient, _ = loss_and_gradient("sapo", batch, token_sum(batch), **options)
    assert loss.item() == pytest.approx(-advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1))))
    assert gradient.item() == pytest.approx(-advantage * ratio / math.cosh(tau * (ratio - 1) / 2) ** 2, abs=1e-12)


def test_sapo_on_policy_has_the_value_minus_2a_over_tau_and_fades_on_both_sides():
    assert loss_of("sapo", row([0.0], [3.0]), tau_pos=2.0)[0].item() == pytest.approx(-3.0)
    far = gradient_of("sapo", row([-20.0, 0.0, 5.0], [1.0] * 3))
    assert abs(far[0]) < 1e-8
    assert far[1] == -1
    assert abs(far[2]) < 1e-8


# ------------------------------------------------------------------------------------------------------------------ dppo


def test_dppo_tv_by_hand():
    # P − Q: 0.01 at ρ = 2; 0.3 at ρ = 1.6; −0.25 at ρ = 0.5; A > 0 never holds back a token that became less likely.
    batch = with_ratios([2.0, 1.6, 0.5, 0.5], [1.0, 1.0, -1.0, 1.0], [0.01, 0.5, 0.5, 0.5])
    loss, gradient, metrics = loss_and_gradient("dppo_tv", batch, token_sum(batch))
    assert gradient[0].tolist() == pytest.approx([-2.0, 0.0, 0.0, -0.5])
    assert loss.item() == pytest.approx(-2 * math.log(0.02) - 0.5 * math.log(0.25))
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(0.5)


def test_dppo_keeps_what_ppo_clips_when_the_probability_hardly_moved():
    batch = with_ratios([10.0], [1.0], [0.001])
    assert gradient_of("vanilla", batch) == [0]
    assert gradient_of("dppo_tv", batch) == pytest.approx([-10.0])


def test_dppo_bounds_the_ratio_by_c_which_is_20_here():
    batch = with_ratios([30.0], [1.0], [0.001])
    _, _, metrics = loss_and_gradient("dppo_tv", batch, token_sum(batch))
    assert gradient_of("dppo_tv", batch) == pytest.approx([-20.0])
    assert gradient_of("dppo_tv", batch, clip_ratio_c=3.0) == pytest.approx([-3.0])
    assert metrics["actor/pg_clipfrac_lower"] == 1
    with pytest.raises(ConfigError, match="clip_ratio_c"):
        loss_of("dppo_tv", batch, clip_ratio_c=1.0)


def test_dppo_kl_by_hand():
    p, q = 0.9, 0.5
    distance = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))  # 0.51
    batch = with_ratios([p / q], [1.0], [q])
    assert gradient_of("dppo_kl", batch, clip_ratio_high=distance + 1e-6) == pytest.approx([-p / q])
    assert gradient_of("dppo_kl", batch, clip_ratio_high=distance - 1e-6) == [0]


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_never_masks_a_move_back_towards_the_old_policy(name):
    batch = with_ratios([1e-3, 1.9], [1.0, -1.0], [0.9, 0.5])
    assert gradient_of(name, batch) == pytest.approx([-1e-3, 1.9])


# ------------------------------------------------------------------------------------------------------- prime_rl and dro


def test_prime_rl_by_hand():
    # Token 0 kept, token 1 masked (0.5 → 0.9, A > 0): only its square remains.
    batch = with_ratios([1.2, 1.8], [1.0, 1.0], [0.5, 0.5])
    loss, gradient, metrics = loss_and_gradient("prime_rl", batch, token_sum(batch), prime_kl_coef=0.1)
    squares = [math.log(1.2) ** 2, math.log(1.8) ** 2]
    assert loss.item() == pytest.approx(-1.2 + 0.1 * sum(squares))
    assert gradient[0].tolist() == pytest.approx([-1.2 + 0.2 * math.log(1.2), 0.2 * math.log(1.8)])
    assert metrics["actor/masked_high"].item() == pytest.approx(0.5)
    assert metrics["actor/masked_low"] == 0
    assert metrics["actor/k3_masked"].item() == pytest.approx((1.8 - math.log(1.8) - 1) / 2)
    assert metrics["actor/k3_kept"].item() == pytest.approx((1.2 - math.log(1.2) - 1) / 2)


def test_dro_rests_where_the_log_ratio_is_the_advantage_over_beta():
    beta, advantages = 0.3, [0.6, -1.5, 9.0]
    assert gradient_of("dro", row([a / beta for a in advantages], advantages)) == pytest.approx([0, 0, 0], abs=1e-12)
    assert gradient_of("dro", row([50.0], [0.0])) == pytest.approx([15.0])  # never cut off


@pytest.mark.parametrize("beta", [None, 0.0, -1.0])
def test_dro_needs_a_positive_beta(beta):
    batch = row([0.0], [1.0])
    with pytest.raises(ConfigError, match="dro_beta"):
        compute_policy_loss("dro", **batch, loss_agg=token_sum(batch), dro_beta=beta)


# --------------------------------------------------------------------------------------------------------- luspo and vespo


def test_luspo_is_gspos_row_loss_times_the_rows_length():
    batch = make_batch(7, (5, 6))
    batch["advantages"] = batch["advantages"][:, :1].clone().expand(5, 6)
    batch["log_prob"] = batch["old_log_prob"] + 0.1 * (batch["log_prob"] - batch["old_log_prob"])
    mask = batch["response_mask"]
    clip = {"clip_ratio_low": 0.002, "clip_ratio_high": 0.0025}
    for i in range(5):
        one = {k: v[i : i + 1] for k, v in batch.items()}
        length = int(mask[i].sum())
        luspo, _ = loss_of("luspo", one, "seq-mean-token-sum")
        gspo, _ = loss_of("gspo", one, "seq-mean-token-mean", **clip)
        torch.testing.assert_close(luspo, length * gspo)


def test_vespo_by_hand():
    batch = row([0.3, -0.1], [2.0, 2.0], log_prob=-1.5)
    s = 0.2
    phi = math.exp(3 + 2 * s - 3 * math.exp(s))
    loss, gradient, metrics = loss_and_gradient("vespo", batch, token_sum(batch))
    assert gradient[0].tolist() == pytest.approx([-2 * phi] * 2)
    assert loss.item() == pytest.approx(2 * 2 * phi * 1.5)
    assert metrics["actor/vespo_weight"].item() == pytest.approx(phi)
    bad = math.exp(2 + 3 * s - 2 * math.exp(s))
    assert gradient_of("vespo", row([0.3, -0.1], [-2.0, -2.0])) == pytest.approx([2 * bad] * 2)


def test_vespos_weight_depends_on_the_sum_of_the_log_ratios_alone_and_takes_rollout_weights_into_it():
    assert gradient_of("vespo", row([0.5, -0.3], [1.0] * 2)) == pytest.approx(
        gradient_of("vespo", row([0.1, 0.1], [1.0] * 2))
    )
    weights = torch.tensor([[math.exp(0.3), math.exp(-0.1)]], dtype=torch.float64)
    weighted = gradient_of("vespo", row([0.0, 0.0], [1.0] * 2), rollout_is_weights=weights)
    assert weighted == pytest.approx(gradient_of("vespo", row([0.3, -0.1], [1.0] * 2)))


# ------------------------------------------------------------------------------------------------------ chosen by covariance


def chosen(name, batch, seed=0, **options):
    ids = (batch["old_log_prob"] * 1000).long().abs()
    priority = random_priorities(ids, ids.shape[1], seed)
    inputs = {k: batch[k] for k in ("log_prob", "old_log_prob", "advantages", "response_mask")}
    return select_by_covariance(name, **inputs, priority=priority, **options)


def test_kl_cov_chooses_the_largest_covariances_of_the_whole_batch():
    batch = make_batch(5, (8, 10))
    mask = batch["response_mask"]
    picked = chosen("kl_cov", batch, kl_cov_ratio=0.2)
    count = int(0.2 * mask.sum())
    assert int(picked.sum()) == count
    a, lp = batch["advantages"], batch["log_prob"]
    cov = (a - a[mask].mean()) * (lp - lp[mask].mean())
    assert cov[picked].min() >= cov[mask & ~picked].max()
    assert int(chosen("kl_cov", batch).sum()) == 1  # at least one


def test_clip_cov_chooses_candidates_only_and_the_same_however_rows_are_dealt():
    batch = make_batch(5, (40, 30))
    batch["advantages"] = batch["advantages"] * 3
    mask = batch["response_mask"]
    options = {"clip_cov_ratio": 0.02, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
    picked = chosen("clip_cov", batch, **options)
    a, lp = batch["advantages"], batch["log_prob"]
    cov = (a - a[mask].mean()) * (lp - lp[mask].mean())
    ratio = (lp - batch["old_log_prob"]).exp()
    clipped = torch.where(a > 0, ratio > 1.2, ratio < 0.8)
    assert int(picked.sum()) == int(0.02 * mask.sum())
    assert ((cov > 1) & (cov < 5) & ~clipped & mask)[picked].all()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    dealt = chosen("clip_cov", {k: v[order] for k, v in batch.items()}, **options)
    assert torch.equal(dealt, picked[order])
    assert not torch.equal(chosen("clip_cov", batch, seed=1, **options), picked)


def test_clip_cov_without_a_candidate_is_ppo_without_dual_clip():
    batch = make_batch(5, (4, 5))
    none = chosen("clip_cov", batch, clip_cov_lb=1e6, clip_cov_ub=1e7)
    assert not none.any()
    loss, _ = loss_of("clip_cov", batch | {"cov_selected": none})
    torch.testing.assert_close(loss, loss_of("vanilla", batch, clip_ratio_c=1e30)[0])


def test_kl_cov_with_one_chosen_token_differs_from_the_policy_gradient_in_one_entry():
    batch = make_batch(5, (4, 5))
    one = chosen("kl_cov", batch)
    got = loss_and_gradient("kl_cov", batch | {"cov_selected": one}, token_sum(batch), ppo_kl_coef=0.5)[1]
    plain = loss_and_gradient("kl_cov", batch | {"cov_selected": one & False}, token_sum(batch))[1]
    difference = got - plain
    assert int((difference != 0).sum()) == 1
    assert difference[one].abs().item() == pytest.approx(0.5)
    ratio = (batch["log_prob"] - batch["old_log_prob"]).exp()
    torch.testing.assert_close(plain, -batch["advantages"] * ratio * batch["response_mask"])  # never cut off


def test_equal_covariances_are_told_apart_by_the_draw():
    batch = make_batch(5, (8, 10)) | {"advantages": torch.zeros(8, 10, dtype=torch.float64)}
    assert int(chosen("kl_cov", batch, kl_cov_ratio=0.1).sum()) == int(0.1 * batch["response_mask"].sum())


def test_an_all_masked_batch_has_nothing_to_choose():
    batch = make_batch(5, (3, 4)) | {"response_mask": torch.zeros(3, 4, dtype=torch.bool)}
    assert not chosen("kl_cov", batch).any()
    assert not chosen("clip_cov", batch).any()


def test_the_tokens_of_highest_entropy_are_chosen_over_the_whole_batch():
    entropy = torch.tensor([[0.1, 0.9, 0.5], [0.8, 0.2, 5.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    picked = select_by_entropy(entropy=entropy, response_mask=mask, priority=torch.rand(2, 3), share=0.4)
    assert picked.tolist() == [[False, True, False], [True, False, False]]


def test_priorities_are_uniform_and_differ_between_rows_positions_and_seeds():
    ids = torch.randint(1, 50000, (200, 64), generator=torch.Generator().manual_seed(3))
    drawn = random_priorities(ids, 40, seed=1)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.02)
    assert drawn.var().item() == pytest.approx(1 / 12, abs=0.01)
    assert len(drawn.unique()) == drawn.numel()
    assert not torch.equal(drawn, random_priorities(ids, 40, seed=2))


# ------------------------------------------------------------------------------------------------------ stale policies


def decoupled(batch, **options):
    """Loss and gradient with the recomputed proximal policy."""
    keys = ("old_log_prob", "rollout_log_prob", "advantages", "response_mask", "token_versions")
    inputs = {k: batch[k] for k in keys if k in batch}
    log_prob = batch["log_prob"].clone().requires_grad_()
    agg = token_sum(batch)
    loss, metrics = compute_policy_loss("decoupled", log_prob=log_prob, **inputs, loss_agg=agg, **options)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return loss.detach(), gradient, metrics


def test_decoupled_is_ppo_where_the_proximal_policy_sampled():
    batch = make_batch(11, (5, 6))
    batch["rollout_log_prob"] = batch["old_log_prob"].clone()
    loss, gradient, _ = decoupled(batch)
    ppo, ppo_gradient, _ = loss_and_gradient("vanilla", batch, token_sum(batch), clip_ratio_c=1e30)
    torch.testing.assert_close(loss, ppo)
    torch.testing.assert_close(gradient, ppo_gradient)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_decoupled_is_weighted_reinforce_where_the_policy_has_not_moved_in_the_step(level):
    batch = make_batch(11, (5, 6))
    batch["old_log_prob"] = batch["log_prob"].clone()
    _, gradient, _ = decoupled(batch, behaviour_level=level, behaviour_cap=1e9)
    mask = batch["response_mask"]
    gap = torch.where(mask, batch["log_prob"] - batch["rollout_log_prob"], 0)
    if level == "sequence":
        gap = (gap.sum(-1) / mask.sum(-1).clamp(min=1)).unsqueeze(-1).expand_as(gap)
    torch.testing.assert_close(gradient, -batch["advantages"] * gap.exp() * mask)


def test_decoupled_masks_or_clamps_weights_above_the_cap_and_keeps_the_divisor():
    batch = row([0.0, 0.0], [1.0, 1.0])
    batch["rollout_log_prob"] = batch["old_log_prob"] - torch.tensor([[math.log(8.0), math.log(2.0)]])
    _, masked, metrics = decoupled(batch)
    assert masked[0].tolist() == pytest.approx([0.0, -2.0])
    assert metrics["actor/behaviour_outside"].item() == pytest.approx(0.5)
    assert metrics["actor/behaviour_weight"].item() == pytest.approx(1.0)
    _, clamped, _ = decoupled(batch, behaviour_bound="clamp")
    assert clamped[0].tolist() == pytest.approx([-5.0, -2.0])


def test_the_loglinear_proximal_policy_by_the_age_of_each_token():
    now, behave = torch.tensor([[-1.0] * 5]), torch.tensor([[-3.0] * 5])
    versions = torch.tensor([[9, 8, 5, 10, 12]])  # at version 10: 1, 2, 5, 0 and −2 behind
    got = loglinear_proximal(now, behave, versions, 10)
    assert got[0].tolist() == pytest.approx([-3.0, -3 + 2 * 0.5, -3 + 2 * 0.8, -3.0, -3.0])
    with pytest.raises(DataError, match="version of every token"):
        loglinear_proximal(now, behave, None, 10)


@pytest.mark.parametrize("key", ["behaviour_level", "behaviour_bound", "proximal"])
def test_decoupled_refuses_unknown_options(key):
    with pytest.raises(ConfigError, match=key):
        decoupled(make_batch(1, (2, 3)), **{key: "other"})


def test_opsm_drops_bad_rows_that_the_policy_would_hardly_write():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]])
    rollout = torch.zeros(4, 3)
    log_prob = torch.tensor([[-0.6, -0.6, -9.0], [-0.6, -0.6, -0.6], [-0.1, -0.1, -0.1], [0.0, 0.0, 0.0]])
    advantages = torch.tensor([[-1.0] * 3, [1.0] * 3, [-1.0] * 3, [-1.0] * 3])
    weights = off_policy_sequence_mask(
        log_prob=log_prob, rollout_log_prob=rollout, advantages=advantages, response_mask=mask, delta=0.5
    )
    assert weights.tolist() == [[0, 0, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]]
    assert dropped_share(weights, mask).item() == pytest.approx(2 / 8)


def test_m2po_drops_as_few_of_the_largest_gaps_as_needed():
    gaps = torch.tensor([[0.1, 0.5, 0.2], [1.0, 0.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    inputs = {"old_log_prob": torch.zeros(2, 3), "rollout_log_prob": gaps, "response_mask": mask}
    # Squares 0, .01, .04, .25, 1: means of the smallest k: 0, .005, .0167, .075, .26.
    assert second_moment_mask(**inputs, threshold=0.04).tolist() == [[1, 0, 1], [0, 1, 1]]
    assert second_moment_mask(**inputs, threshold=0.1).tolist() == [[1, 1, 1], [0, 1, 1]]
    assert second_moment_mask(**inputs, threshold=10.0).tolist() == [[1, 1, 1], [1, 1, 1]]
    alone = second_moment_mask(**inputs, threshold=1e-30)
    assert int(alone[mask.bool()].sum()) == 1


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_a_token_of_weight_0_has_no_gradient_and_stays_in_the_divisor(mode):
    batch = row([0.0, 0.0], [1.0, 1.0])
    agg = Aggregation.of_batch(mode, batch["response_mask"]).weighted(torch.tensor([[0.0, 1.0]]))
    _, gradient, metrics = loss_and_gradient("vanilla", batch, agg.weighted(torch.tensor([[1.0, 1.0]])))
    assert gradient[0].tolist() == pytest.approx([0.0, -0.5])
    assert metrics["actor/pg_clipfrac"] == 0


def test_two_sided_clipping_is_the_dual_clip():
    """INTELLECT-2 (arXiv 2505.07291) takes min(ρ, δ) in the branch that is not clipped."""
    delta, high = 4.0, 0.2
    for ratio in (0.1, 0.9, 1.1, 3.0, 7.0):
        for advantage in (1.0, -1.0):
            two_sided = max(-advantage * min(ratio, delta), -advantage * min(max(ratio, 0.8), 1 + high))
            loss, _ = loss_of("vanilla", row([math.log(ratio)], [advantage]), clip_ratio_c=delta)
            assert loss.item() == pytest.approx(two_sided)


def test_gspo_holds_a_row_that_became_likelier_by_far():
    batch = row([300.0, 300.0], [-1.0, -1.0], log_prob=-1.0)
    loss, gradient, _ = loss_and_gradient("gspo", batch, Aggregation.of_batch("token-mean", torch.ones(1, 2)))
    assert loss.item() == pytest.approx(math.exp(10))
    assert gradient.tolist() == [[0, 0]]
