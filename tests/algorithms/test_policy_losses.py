from __future__ import annotations

import math

import plain_reference as plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_batches import LOSS_INPUTS, make_batch, only, seeds, sizes

from quadriga.algorithms import (
    AGGREGATION_MODES,
    Aggregation,
    compute_policy_loss,
    default_agg_mode,
    get_policy_loss,
    policy_loss_names,
)
from quadriga.errors import ConfigError, DataError

IN_PLAIN_PYTHON = ["cispo", "geo_mean", "gpg", "gspo", "vanilla"]
ALL = sorted(
    [
        *IN_PLAIN_PYTHON,
        "clip_cov",
        "decoupled",
        "dppo_kl",
        "dppo_tv",
        "dro",
        "kl_cov",
        "luspo",
        "prime_rl",
        "sapo",
        "vespo",
    ]
)
ALSO_TAKES = {
    "clip_cov": ("cov_selected",),
    "kl_cov": ("cov_selected",),
    "decoupled": ("rollout_log_prob", "token_versions"),
}
OPTIONS = {"dro": {"dro_beta": 0.3}, "decoupled": {"proximal": "loglinear", "version": 3}}
HELD_BY_A_PENALTY = ["dro", "kl_cov", "prime_rl"]
"""They pull towards the old policy even where the advantage is 0."""
WITH_STOPPED_FACTORS = ["dppo_kl", "dppo_tv", "vespo", "decoupled"]
"""Their gradient is not that of their value: see the closed forms in test_trust_region_losses.py."""
RATIO_LOSSES = ["cispo", "geo_mean", "gspo", "vanilla"]
losses = pytest.mark.parametrize("name", ALL)
modes = pytest.mark.parametrize("mode", AGGREGATION_MODES)


def loss_of(name, batch, mode="token-mean", agg=None, **kw):
    agg = agg or Aggregation.of_batch(mode, batch["response_mask"])
    inputs = only(batch, LOSS_INPUTS + ALSO_TAKES.get(name, ()))
    return compute_policy_loss(name, **inputs, loss_agg=agg, **OPTIONS.get(name, {}), **kw)


def loss_and_gradient(name, batch, agg, **kw):
    log_prob = batch["log_prob"].clone().requires_grad_()
    loss, metrics = loss_of(name, batch | {"log_prob": log_prob}, agg=agg, **kw)
    (gradient,) = torch.autograd.grad(loss, log_prob)
    return loss.detach(), gradient, metrics


def row(log_ratio: list[float], advantages: list[float], log_prob: float = -1.0) -> dict[str, torch.Tensor]:
    """One row of full length with the given log-ratios and advantages."""
    ratio = torch.tensor([log_ratio], dtype=torch.float64)
    current = torch.full_like(ratio, log_prob)
    return {
        "log_prob": current,
        "old_log_prob": current - ratio,
        "advantages": torch.tensor([advantages], dtype=torch.float64),
        "response_mask": torch.ones_like(ratio, dtype=torch.bool),
    }


def test_the_registry_holds_exactly_the_losses_of_the_contract():
    assert policy_loss_names() == ALL


# ------------------------------------------------------------------------------------------------ against plain Python


@pytest.mark.parametrize("name", IN_PLAIN_PYTHON)
@modes
@settings(max_examples=15, deadline=None)
@given(seeds, sizes, st.booleans())
def test_equals_the_plain_reference(name, mode, seed, size, extreme):
    batch = make_batch(seed, size, extreme=extreme)
    low, high = 0.2, 0.28
    loss, _ = loss_of(name, batch, mode, clip_ratio_low=low, clip_ratio_high=high)
    per_token = plain.per_token_losses(name, *(batch[key].tolist() for key in LOSS_INPUTS), low, high)
    expected = plain.aggregate(mode, per_token, batch["response_mask"].tolist(), constant=size[1])
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


# ------------------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected"),
    [
        (0.0, 2.0, -2.0),  # on-policy
        (math.log(1.1), 2.0, -2.2),  # inside the range
        (math.log(1.5), 2.0, -2.4),  # good and likelier: clipped at 1.2
        (math.log(0.5), 2.0, -1.0),  # good and less likely: not clipped
        (math.log(0.5), -2.0, 1.6),  # bad and less likely: clipped at 0.8
        (math.log(1.5), -2.0, 3.0),  # bad and likelier: not clipped
        (math.log(9.0), -2.0, 6.0),  # bad and far likelier: bounded by c = 3
        (500.0, -2.0, 6.0),
        (-500.0, 2.0, -2.0 * math.exp(-20)),
    ],
)
def test_ppo_clip_by_hand(log_ratio, advantage, expected):
    loss, _ = loss_of("vanilla", row([log_ratio], [advantage]))
    assert loss.item() == pytest.approx(expected)


def test_vanilla_metrics_by_hand():
    batch = row([0.0, math.log(1.5), math.log(9.0), math.log(0.5)], [1.0, 1.0, -1.0, -1.0])
    _, metrics = loss_of("vanilla", batch)
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(2 / 4)  # the second and the fourth
    assert metrics["actor/pg_clipfrac_lower"].item() == pytest.approx(1 / 4)  # the third
    assert metrics["actor/ppo_kl"].item() == pytest.approx(-math.log(1.5 * 9.0 * 0.5) / 4)


def test_clip_ratio_sets_both_sides_unless_they_are_given():
    up, down = row([math.log(3.0)], [1.0]), row([math.log(0.1)], [-1.0])
    assert loss_of("vanilla", up, clip_ratio=0.5)[0].item() == pytest.approx(-1.5)
    assert loss_of("vanilla", down, clip_ratio=0.5)[0].item() == pytest.approx(0.5)
    assert loss_of("vanilla", up, clip_ratio=0.5, clip_ratio_high=0.28)[0].item() == pytest.approx(-1.28)
    assert loss_of("vanilla", down, clip_ratio=0.5, clip_ratio_low=0.1)[0].item() == pytest.approx(0.9)
    assert loss_of("vanilla", up, clip_ratio=0.5, clip_ratio_low=0.1)[0].item() == pytest.approx(-1.5)


def test_gspo_by_hand():
    # The mean log-ratio is log 1.1, inside the range, although both tokens are outside.
    batch = row([math.log(1.1) + 1, math.log(1.1) - 1], [2.0, 2.0])
    loss, gradient, _ = loss_and_gradient("gspo", batch, Aggregation.of_batch("seq-mean-token-mean", torch.ones(1, 2)))
    assert loss.item() == pytest.approx(-2.2)
    assert gradient[0].tolist() == pytest.approx([-1.1, -1.1])  # −A ρ / len, through each token
    clipped, gradient, metrics = loss_and_gradient(
        "gspo", row([1.0, 0.0], [2.0, 2.0]), Aggregation.of_batch("seq-mean-token-mean", torch.ones(1, 2))
    )
    assert clipped.item() == pytest.approx(-2.4)
    assert gradient.tolist() == [[0, 0]]
    assert metrics["actor/pg_clipfrac"] == 1


def test_cispo_by_hand():
    batch = row([math.log(1.1), math.log(2.0), math.log(0.1)], [1.0, 2.0, -1.0], log_prob=-3.0)
    loss, gradient, metrics = loss_and_gradient("cispo", batch, Aggregation.of_batch("token-sum", torch.ones(1, 3)))
    weights = [1.1, 1.2, 0.8]
    assert loss.item() == pytest.approx(3 * (1.1 * 1 + 1.2 * 2 - 0.8))
    assert gradient[0].tolist() == pytest.approx([-w * a for w, a in zip(weights, [1, 2, -1])])
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(2 / 3)


def test_gpg_by_hand():
    loss, gradient, _ = loss_and_gradient(
        "gpg", row([0.0, 0.0], [1.0, -3.0], log_prob=-2.0), Aggregation.of_batch("token-mean", torch.ones(1, 2))
    )
    assert loss.item() == pytest.approx((2 - 6) / 2)
    assert gradient.tolist() == [[-0.5, 1.5]]


def test_gpg_needs_no_old_log_probs():
    batch = row([0.0], [1.0]) | {"old_log_prob": None}
    agg = Aggregation.of_batch("token-mean", batch["response_mask"])
    assert compute_policy_loss("gpg", **batch, loss_agg=agg)[0].item() == 1.0


def test_geo_mean_by_hand():
    # A > 0: log-ratios 1.0 → 0.2 (clipped above) and −1.0 (kept); their mean is −0.4.
    assert loss_of("geo_mean", row([1.0, -1.0], [2.0, 2.0]))[0].item() == pytest.approx(-2 * math.exp(-0.4))
    # A < 0: 1.0 (kept) and −1.0 → −0.2; their mean is 0.4.
    loss, metrics = loss_of("geo_mean", row([1.0, -1.0], [-2.0, -2.0]))
    assert loss.item() == pytest.approx(2 * math.exp(0.4))
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(0.5)


# --------------------------------------------------------------------------------------------------------- partitions


@losses
@modes
@settings(max_examples=12, deadline=None)
@given(seeds, st.tuples(st.integers(1, 9), st.integers(1, 8)), st.integers(1, 5), st.booleans())
def test_any_partition_gives_the_same_loss_gradient_and_metrics(name, mode, seed, size, parts, weighted):
    """Rows dealt at random to micro-batches, each padded to its own length: shares add up to the mini-batch."""
    batch = make_batch(seed, size)
    agg = Aggregation.of_batch(mode, batch["response_mask"])
    random = torch.Generator().manual_seed(seed)
    part_of_row = torch.randint(0, parts, (size[0],), generator=random)

    def weights(of):
        return {"rollout_is_weights": of["rollout_is_weights"]} if weighted else {}

    whole_loss, whole_gradient, whole_metrics = loss_and_gradient(name, batch, agg, **weights(batch))
    loss, gradient = torch.zeros_like(whole_loss), torch.zeros_like(whole_gradient)
    metrics = dict.fromkeys(whole_metrics, 0.0)
    for part in range(parts):
        rows = (part_of_row == part).nonzero().flatten()
        if not len(rows):
            continue
        kept = batch["response_mask"][rows].any(0).nonzero()
        length = int(kept.max()) + 1 if len(kept) else 1
        micro = {k: v[rows][:, :length] if v.dim() == 2 else v[rows] for k, v in batch.items()}
        share, micro_gradient, micro_metrics = loss_and_gradient(name, micro, agg, **weights(micro))
        loss += share
        gradient[rows, :length] += micro_gradient
        metrics = {key: metrics[key] + micro_metrics[key].item() for key in metrics}
    torch.testing.assert_close(loss, whole_loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-10, atol=1e-12)
    for key, value in whole_metrics.items():
        assert metrics[key] == pytest.approx(value.item(), abs=1e-10)


@losses
@modes
@settings(max_examples=8, deadline=None)
@given(seeds, sizes)
def test_permuting_rows_permutes_the_gradient_and_padding_changes_nothing(name, mode, seed, size):
    batch = make_batch(seed, size)
    agg = Aggregation.of_batch(mode, batch["response_mask"])
    loss, gradient, _ = loss_and_gradient(name, batch, agg)
    order = torch.randperm(size[0], generator=torch.Generator().manual_seed(seed))
    inputs = only(batch, LOSS_INPUTS + ALSO_TAKES.get(name, ()))
    changed = {k: torch.nn.functional.pad(v[order], (0, 3)) for k, v in inputs.items()}
    changed_loss, changed_gradient, _ = loss_and_gradient(name, changed, agg)
    torch.testing.assert_close(changed_loss, loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(changed_gradient[:, : size[1]], gradient[order], rtol=1e-10, atol=1e-12)
    assert (changed_gradient[:, size[1] :] == 0).all()


# ---------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("name", [name for name in ALL if name not in WITH_STOPPED_FACTORS])
@modes
def test_gradient_is_that_of_the_value(name, mode):
    """Where no stop-gradient is at work: always for most losses; for gspo when a row's tokens share their advantage
    (the sequence's gradient is then the sum of its tokens'); for cispo where the weight is clipped."""
    batch = make_batch(17, (5, 6))
    if name == "gspo":
        batch["advantages"] = batch["advantages"][:, :1].clone().expand(5, 6)
    if name == "cispo":
        batch["old_log_prob"] = batch["log_prob"] + 0.7 * batch["old_log_prob"].sign()
    agg = Aggregation.of_batch(mode, batch["response_mask"])

    def value(log_prob):
        return loss_of(name, batch | {"log_prob": log_prob}, agg=agg)[0]

    assert torch.autograd.gradcheck(value, batch["log_prob"].requires_grad_(), atol=1e-7)


def test_gspo_gradient_with_an_advantage_per_token():
    batch = row([0.05, -0.02, 0.03], [1.0, -2.0, 0.5])
    _, gradient, _ = loss_and_gradient("gspo", batch, Aggregation.of_batch("token-sum", torch.ones(1, 3)))
    ratio = math.exp(0.02)
    assert gradient[0].tolist() == pytest.approx([-ratio * a for a in (1.0, -2.0, 0.5)])


def test_gradient_does_not_pass_through_the_rollout_weights():
    batch = make_batch(3, (4, 5))
    weights = batch["rollout_is_weights"].requires_grad_()
    loss, _ = loss_of("vanilla", batch | {"log_prob": batch["log_prob"].requires_grad_()}, rollout_is_weights=weights)
    loss.backward()
    assert weights.grad is None


# --------------------------------------------------------------------------------------------------------- hard inputs


@pytest.mark.parametrize("name", RATIO_LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@modes
def test_on_policy_the_ratio_is_exactly_1(name, dtype, mode):
    batch = make_batch(8, (6, 7), dtype=dtype)
    batch["old_log_prob"] = batch["log_prob"].clone()
    if name == "geo_mean":
        batch["advantages"] = batch["advantages"].sign()[:, :1].expand(6, 7)
    agg = Aggregation.of_batch(mode, batch["response_mask"])
    loss, gradient, metrics = loss_and_gradient(name, batch, agg)
    reference = batch["log_prob"].clone().requires_grad_()
    surrogate = -batch["advantages"] * (reference if name == "cispo" else (reference - reference.detach()).exp())
    expected = agg(surrogate, batch["response_mask"])
    (expected_gradient,) = torch.autograd.grad(expected, reference)
    assert loss == expected.detach()
    torch.testing.assert_close(gradient, expected_gradient)
    assert metrics["actor/ppo_kl"] == 0
    assert metrics["actor/pg_clipfrac"] == 0


@losses
@modes
@settings(max_examples=10, deadline=None)
@given(seeds, sizes)
def test_log_probs_of_minus_10000_are_finite_in_float32(name, mode, seed, size):
    batch = make_batch(seed, size, dtype=torch.float32, extreme=True)
    loss, gradient, metrics = loss_and_gradient(name, batch, Aggregation.of_batch(mode, batch["response_mask"]))
    assert loss.dtype == gradient.dtype == torch.float32
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert all(value.isfinite() and not value.requires_grad for value in metrics.values())


@losses
@modes
@pytest.mark.parametrize("dirty_keys", [("log_prob",), ("old_log_prob",), ("advantages",), LOSS_INPUTS[:3]])
def test_garbage_under_the_padding_changes_neither_loss_nor_gradient(name, mode, dirty_keys):
    batch = make_batch(21, (6, 7))
    mask = batch["response_mask"]
    agg = Aggregation.of_batch(mode, mask)
    dirty = {
        key: torch.where(mask, batch[key], torch.tensor([float("nan"), float("inf")] * 3 + [float("nan")]))
        for key in dirty_keys
    }
    loss, gradient, metrics = loss_and_gradient(name, batch, agg)
    dirty_loss, dirty_gradient, dirty_metrics = loss_and_gradient(name, batch | dirty, agg)
    assert dirty_loss == loss
    assert torch.equal(dirty_gradient, gradient)
    assert (gradient[~mask] == 0).all()
    assert dirty_metrics == metrics


@losses
@modes
def test_all_zero_advantages_and_an_all_masked_batch_give_0_with_gradient_0(name, mode):
    batch = make_batch(2, (4, 5))
    still = batch | {"advantages": torch.zeros(4, 5, dtype=torch.float64)}
    empty = batch | {"response_mask": torch.zeros(4, 5, dtype=torch.bool)}
    for case in (empty,) if name in HELD_BY_A_PENALTY else (still, empty):
        loss, gradient, _ = loss_and_gradient(name, case, Aggregation.of_batch(mode, case["response_mask"]))
        assert loss == 0
        assert (gradient == 0).all()


def test_rollout_weights_of_geo_mean_count_by_their_geometric_mean_over_the_row():
    batch = make_batch(9, (5, 6))
    mask, weights = batch["response_mask"], batch["rollout_is_weights"]
    means = [weights[i][mask[i].bool()].log().mean().exp() for i in range(len(mask))]
    plain = [loss_of("geo_mean", {k: v[i : i + 1] for k, v in batch.items()}, "token-sum")[0] for i in range(len(mask))]
    whole, _ = loss_of("geo_mean", batch, "token-sum", rollout_is_weights=weights)
    torch.testing.assert_close(whole, sum(mean * loss for mean, loss in zip(means, plain)))


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("vespo", "geo_mean")])
def test_rollout_weights_multiply_the_loss_of_each_token(name):
    batch = make_batch(9, (5, 6))
    mask = batch["response_mask"]
    total = torch.zeros((), dtype=torch.float64)
    for i, t in mask.nonzero().tolist():
        one = torch.zeros_like(batch["log_prob"])
        one[i, t] = 1.0
        total += batch["rollout_is_weights"][i, t] * loss_of(name, batch, "token-sum", rollout_is_weights=one)[0]
    whole, _ = loss_of(name, batch, "token-sum", rollout_is_weights=batch["rollout_is_weights"])
    torch.testing.assert_close(whole, total)


# -------------------------------------------------------------------------------------------------------- aggregation


def test_sequence_losses_average_over_sequences_only_by_default():
    assert default_agg_mode("gspo") == "seq-mean-token-mean"
    assert default_agg_mode("geo_mean") == "seq-mean-token-mean"
    assert default_agg_mode("sapo") == "seq-mean-token-mean"
    assert default_agg_mode("luspo") == "seq-mean-token-sum"
    assert {default_agg_mode(name) for name in ("vanilla", "cispo", "gpg", "mine:loss")} == {"token-mean"}


@losses
def test_the_configured_aggregation_is_honoured_by_every_loss(name):
    batch = make_batch(30, (6, 9))
    values = {round(loss_of(name, batch, mode)[0].item(), 12) for mode in AGGREGATION_MODES}
    assert len(values) == len(AGGREGATION_MODES)


# ------------------------------------------------------------------------------------------------------------- errors


def test_a_wrong_shape_is_named():
    batch = make_batch(1, (4, 5))
    batch["old_log_prob"] = batch["old_log_prob"][:, :-1]
    with pytest.raises(DataError, match="old_log_prob has shape"):
        loss_of("vanilla", batch)


def test_a_missing_input_is_named():
    with pytest.raises(ConfigError, match="'vanilla' needs 'old_log_prob'"):
        loss_of("vanilla", make_batch(1, (4, 5)) | {"old_log_prob": None})


@pytest.mark.parametrize(
    ("options", "key"), [({"clip_ratio": -0.1}, "clip_ratio"), ({"clip_ratio_c": 1.0}, "clip_ratio_c")]
)
def test_impossible_clipping_is_refused(options, key):
    with pytest.raises(ConfigError, match=key):
        loss_of("vanilla", make_batch(1, (4, 5)), **options)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"Did you mean 'vanilla'.*cispo, clip_cov, .*, vanilla, vespo"):
        get_policy_loss("vanila")
