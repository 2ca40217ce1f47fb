from __future__ import annotations

import math

import plain_reference as plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_batches import make_batch, seeds, sizes

from quadriga.algorithms import (
    AGGREGATION_MODES,
    AdaptiveKLController,
    Aggregation,
    FixedKLController,
    apply_kl_penalty,
    kl_estimate,
    kl_loss,
    make_kl_controller,
)
from quadriga.errors import CheckpointError, ConfigError, DataError

KINDS = ["k1", "abs", "k2", "k3"]
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
log_probs = st.floats(-1e4, 0, width=32)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(log_probs, log_probs)
def test_estimators_equal_the_plain_ones(kind, logp, ref):
    got = kl_estimate(torch.tensor(logp, dtype=torch.float64), torch.tensor(ref, dtype=torch.float64), kind)
    assert got.item() == pytest.approx(plain.kl(logp - ref, kind), rel=1e-9, abs=1e-12)


def test_estimators_by_hand():
    logp, ref = torch.tensor([-1.0, -3.0]).double(), torch.tensor([-2.0, -2.0]).double()  # d = 1, −1
    assert kl_estimate(logp, ref, "k1").tolist() == [1, -1]
    assert kl_estimate(logp, ref, "abs").tolist() == [1, 1]
    assert kl_estimate(logp, ref, "k2").tolist() == [0.5, 0.5]
    assert kl_estimate(logp, ref, "k3").tolist() == pytest.approx([1 / math.e, math.e - 2])


@pytest.mark.parametrize(("alias", "kind"), ALIASES.items())
@pytest.mark.parametrize("suffix", ["", "+"])
def test_aliases(alias, kind, suffix):
    logp, ref = torch.randn(50), torch.randn(50)
    assert torch.equal(kl_estimate(logp, ref, alias + suffix), kl_estimate(logp, ref, kind + suffix))


@settings(max_examples=200, deadline=None)
@given(st.floats(-50, 50, width=32))
def test_k3_is_never_negative(d):
    for dtype in (torch.float32, torch.float64):
        assert kl_estimate(torch.tensor(d, dtype=dtype), torch.tensor(0.0, dtype=dtype), "k3") >= 0


def test_k3_keeps_its_digits_near_0_and_is_never_negative_there():
    d = torch.logspace(-12, 0, 20000) * torch.tensor([1.0, -1.0]).repeat(10000)
    single = kl_estimate(d, torch.zeros_like(d), "k3")
    exact = kl_estimate(d.double(), torch.zeros_like(d).double(), "k3")
    assert (single >= 0).all()
    visible = d.abs() > 1e-3
    torch.testing.assert_close(single[visible].double(), exact[visible], rtol=1e-3, atol=0)


def test_k3_is_bounded_by_10_and_the_others_are_not():
    far = torch.tensor([-1e4, -30.0]), torch.tensor([0.0, 0.0])
    assert kl_estimate(*far, "k3").tolist() == [10, 10]
    assert kl_estimate(*far, "k1").tolist() == [-1e4, -30]
    assert kl_estimate(*reversed(far), "k3").tolist() == [10, 10]  # 20 + e^−20 − 1, bounded


@pytest.mark.parametrize("kind", KINDS)
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind):
    logp, ref = torch.randn(30, requires_grad=True), torch.randn(30)
    value = kl_estimate(logp, ref, kind + "+")
    assert torch.equal(value, kl_estimate(logp, ref, kind))
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    torch.testing.assert_close(gradient, (logp - ref).detach())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind):
    logp = torch.randn(20, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(20, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: kl_estimate(v, ref, kind), logp)


def test_an_unknown_kind_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"k1, k2, k3, kl, low_var_kl, mse"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "full")


# ---------------------------------------------------------------------------------------------------- reward and loss


def test_the_penalty_by_hand():
    scores = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    logp = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -9.0, -9.0], [-9.0, -9.0, -9.0]])
    ref = torch.tensor([[-2.0, -5.0, float("nan")], [-1.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    rewards, kl = apply_kl_penalty(scores, logp, ref, mask, "kl", beta=0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 0.7, 0.0], [1.95, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    assert kl.item() == pytest.approx(((1 + 3) / 2 + 0.5) / 2)  # by row, and the row without tokens does not count


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3+"])
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@settings(max_examples=10, deadline=None)
@given(seeds, sizes)
def test_the_loss_is_the_aggregated_estimate_and_its_shares_add_up(kind, mode, seed, size):
    batch = make_batch(seed, size)
    mask, inputs = batch["response_mask"], (batch["log_prob"], batch["ref_log_prob"], batch["response_mask"])
    agg = Aggregation.of_batch(mode, mask)

    def share(rows):
        logp, ref, m = (x[rows] for x in inputs)
        return kl_loss(log_prob=logp, ref_log_prob=ref, response_mask=m, loss_agg=agg, kind=kind)

    loss, metrics = share(slice(None))
    torch.testing.assert_close(loss, agg(kl_estimate(inputs[0], inputs[1], kind), mask))
    parts = [share(slice(i, i + 1)) for i in range(size[0])]
    torch.testing.assert_close(sum(p for p, _ in parts), loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(sum(m["actor/kl_loss"] for _, m in parts), metrics["actor/kl_loss"])


@pytest.mark.parametrize("kind", [*KINDS, "k1+", "k3+"])
def test_garbage_under_the_padding_gets_gradient_0(kind):
    batch = make_batch(12, (5, 6))
    mask = batch["response_mask"]
    logp = torch.where(mask, batch["log_prob"], float("nan")).requires_grad_()
    ref = torch.where(mask, batch["ref_log_prob"], float("-inf"))
    agg = Aggregation.of_batch("token-mean", mask)
    loss, _ = kl_loss(log_prob=logp, ref_log_prob=ref, response_mask=mask, loss_agg=agg, kind=kind)
    loss.backward()
    assert loss.isfinite()
    assert (logp.grad[~mask] == 0).all()
    assert logp.grad.isfinite().all()


# --------------------------------------------------------------------------------------------------------- controllers


def test_the_fixed_controller_stays():
    controller = make_kl_controller(type="fixed", kl_coef=0.02)
    controller.update(5.0, 100)
    assert controller.value == 0.02


@pytest.mark.parametrize(
    ("current", "factor"),
    [(6.6, 1 + 0.1 * 0.25), (100.0, 1 + 0.2 * 0.25), (5.4, 1 - 0.1 * 0.25), (0.0, 1 - 0.2 * 0.25), (6.0, 1.0)],
)
def test_the_adaptive_controller_follows_the_kl_in_bounded_steps(current, factor):
    controller = make_kl_controller(type="adaptive", kl_coef=0.2, target_kl=6.0, horizon=1000)
    controller.update(torch.tensor(current), n_steps=250)
    assert controller.value == pytest.approx(0.2 * factor)


def test_the_coefficient_never_turns_negative_however_large_the_batch():
    controller = AdaptiveKLController(kl_coef=0.2, target_kl=6.0, horizon=100)
    controller.update(0.0, n_steps=10_000_000)
    assert controller.value == pytest.approx(0.2 * 0.8)


def test_the_adaptive_controller_resumes_where_it_was():
    first = AdaptiveKLController(0.2, target_kl=6.0, horizon=1000)
    for kl in (1.0, 9.0, 12.0):
        first.update(kl, 300)
    second = AdaptiveKLController(0.2, target_kl=6.0, horizon=1000)
    second.load_state_dict(first.state_dict())
    first.update(3.0, 300)
    second.update(3.0, 300)
    assert second.value == first.value


def test_a_checkpoint_of_the_other_controller_is_refused():
    with pytest.raises(CheckpointError, match=r"'fixed'.*'adaptive'"):
        AdaptiveKLController(0.2, 6.0, 1000).load_state_dict(FixedKLController(0.1).state_dict())


def test_a_kl_that_is_not_finite_does_not_poison_the_coefficient():
    controller = AdaptiveKLController(0.2, 6.0, 1000)
    with pytest.raises(DataError, match="nan"):
        controller.update(float("nan"), 10)
    assert controller.value == 0.2


@pytest.mark.parametrize(
    "options",
    [
        {"type": "adaptve"},
        {"type": "adaptive", "horizon": 0},
        {"type": "adaptive", "target_kl": 0.0},
        {"kl_coef": -1.0},
        {"kl_coef": float("nan")},
    ],
)
def test_impossible_controllers_are_refused(options):
    with pytest.raises(ConfigError, match=r"algorithm\.kl_ctrl"):
        make_kl_controller(**options)
