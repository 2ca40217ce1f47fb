"""On-policy distillation: expected gradients by enumerating a small vocabulary, bounds, and hard inputs."""

from __future__ import annotations

import math

import pytest
import torch

from quadriga.algorithms import Aggregation
from quadriga.algorithms.distillation import (
    TAILS,
    distillation_advantage,
    sampled_token_loss,
    top_k_divergence,
    top_k_loss,
)
from quadriga.errors import ConfigError

VOCABULARY = 5


def logits(seed, rows=1, vocabulary=VOCABULARY):
    return torch.randn(rows, vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def kl(p, q):
    return (p.exp() * (p - q)).sum(-1)


def gradient(value, by):
    return torch.autograd.grad(value, by)[0]


def expected_gradient(mode, student_logits, teacher, **options):
    """E over the student's own tokens of the loss's gradient: the sampling itself is held fixed, as it is in training."""
    total = torch.zeros_like(student_logits)
    chances = student_logits.detach().softmax(-1)[0]
    mask = torch.ones(1, 1)
    for token in range(VOCABULARY):
        x = student_logits.detach().clone().requires_grad_()
        log_prob = x.log_softmax(-1)[:, token : token + 1]
        loss, _ = sampled_token_loss(
            log_prob=log_prob,
            teacher_log_prob=teacher[:, token : token + 1],
            response_mask=mask,
            loss_agg=Aggregation.of_batch("token-mean", mask),
            loss_mode=mode,
            **options,
        )
        total += chances[token] * gradient(loss, x)
    return total


@pytest.mark.parametrize("mode", ["k2", "mse", "k1+", "k3+"])
def test_these_have_the_gradient_of_the_reverse_kl(mode):
    x, teacher = logits(1).requires_grad_(), logits(2).log_softmax(-1)
    wanted = gradient(kl(x.log_softmax(-1), teacher).sum(), x)
    torch.testing.assert_close(expected_gradient(mode, x, teacher), wanted)


def test_k3_has_the_gradient_of_the_forward_kl():
    x, teacher = logits(1).requires_grad_(), logits(2).log_softmax(-1)
    wanted = gradient(kl(teacher, x.log_softmax(-1)).sum(), x)
    torch.testing.assert_close(expected_gradient("k3", x, teacher), wanted)


@pytest.mark.parametrize("mode", ["k1", "kl"])
def test_k1_as_a_loss_teaches_nothing_and_is_refused(mode):
    x, teacher = logits(1), logits(2).log_softmax(-1)
    with pytest.raises(ConfigError, match="expected gradient of 0"):
        expected_gradient(mode, x, teacher)


def test_tokens_of_an_older_student_are_weighted():
    """E over the old student of sg[ρ]·k2's gradient is that of the student of now."""
    x, old, teacher = logits(1).requires_grad_(), logits(3).log_softmax(-1), logits(2).log_softmax(-1)
    total, mask = torch.zeros_like(x), torch.ones(1, 1)
    for token in range(VOCABULARY):
        at = slice(token, token + 1)
        loss, _ = sampled_token_loss(
            log_prob=x.log_softmax(-1)[:, at],
            teacher_log_prob=teacher[:, at],
            old_log_prob=old[:, at],
            response_mask=mask,
            loss_agg=Aggregation.of_batch("token-mean", mask),
            loss_mode="k2",
        )
        total += old.exp()[0, token] * gradient(loss, x)
    torch.testing.assert_close(total, gradient(kl(x.log_softmax(-1), teacher).sum(), x))


def test_tokens_that_older_weights_than_those_of_the_steps_start_sampled_are_weighted_twice():
    """E over μ of (π_old/μ)·sg[ρ]·k2's gradient is that of the student of now."""
    x, old, teacher = logits(1).requires_grad_(), logits(3).log_softmax(-1), logits(2).log_softmax(-1)
    sampler = logits(4).log_softmax(-1)
    total, mask = torch.zeros_like(x), torch.ones(1, 1)
    for token in range(VOCABULARY):
        at = slice(token, token + 1)
        loss, _ = sampled_token_loss(
            log_prob=x.log_softmax(-1)[:, at],
            teacher_log_prob=teacher[:, at],
            old_log_prob=old[:, at],
            rollout_is_weights=(old - sampler)[:, at].exp(),
            response_mask=mask,
            loss_agg=Aggregation.of_batch("token-mean", mask),
            loss_mode="k2",
        )
        total += sampler.exp()[0, token] * gradient(loss, x)
    torch.testing.assert_close(total, gradient(kl(x.log_softmax(-1), teacher).sum(), x))


def test_the_advantage_is_the_policy_gradient_of_the_reverse_kl():
    x, teacher = logits(1).requires_grad_(), logits(2).log_softmax(-1)
    log_probs = x.log_softmax(-1)
    advantages = distillation_advantage(log_probs, teacher, torch.ones(1, VOCABULARY))
    surrogate = -(log_probs.detach().exp() * advantages * log_probs).sum()
    torch.testing.assert_close(gradient(surrogate, x), gradient(kl(x.log_softmax(-1), teacher).sum(), x))


def test_the_advantage_may_be_another_estimate_with_bounds_of_its_own():
    student, teacher = torch.tensor([[-1.0, -30.0, -4.0]]), torch.tensor([[-4.0, -1.0, -4.0]])
    mask = torch.tensor([[1, 1, 1]])
    assert distillation_advantage(student, teacher, mask).tolist() == [[-3.0, 10.0, 0.0]]
    assert distillation_advantage(student, teacher, mask, "k1", 2.0).tolist() == [[-2.0, 2.0, 0.0]]
    assert distillation_advantage(student, teacher, mask, "k2", 100.0).tolist() == [[-4.5, -100.0, 0.0]]
    assert distillation_advantage(student, teacher, mask, "k1", None, -5.0).tolist() == [[-3.0, 4.0, 0.0]]


def test_the_advantage_is_bounded_and_0_off_the_mask():
    got = distillation_advantage(
        torch.tensor([[-1.0, -1.0, -90.0, float("nan")]]),
        torch.tensor([[-2.0, -90.0, -1.0, float("nan")]]),
        torch.tensor([[1, 1, 1, 0]]),
    )
    assert got.tolist() == [[-1.0, -10.0, 10.0, 0.0]]


# ------------------------------------------------------------------------------------------------------------ top k


def top(teacher, student, k):
    best = teacher.topk(k, -1)
    return student.gather(-1, best.indices), best.values


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_with_the_whole_vocabulary_every_tail_is_the_full_divergence(tail, beta):
    s, t = logits(1, 7).log_softmax(-1), logits(2, 7).log_softmax(-1)
    m = (beta * t.exp() + (1 - beta) * s.exp()).log()
    full = kl(t, s) if beta == 0 else kl(s, t) if beta == 1 else beta * kl(t, m) + (1 - beta) * kl(s, m)
    got = top_k_divergence(*top(t, s, VOCABULARY), beta=beta, tail=tail)
    torch.testing.assert_close(got, full, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_bucket_is_a_lower_bound_between_0_and_the_full_divergence(k, beta):
    s, t = logits(1, 50).log_softmax(-1), logits(2, 50).log_softmax(-1)
    got = top_k_divergence(*top(t, s, k), beta=beta)
    full = top_k_divergence(*top(t, s, VOCABULARY), beta=beta)
    assert (got >= -1e-12).all()
    assert (got <= full + 1e-6).all()


@pytest.mark.parametrize("tail", ["bucket", "renormalised"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_student_like_its_teacher_has_loss_and_gradient_0(tail, beta):
    x = logits(1).requires_grad_()
    teacher = x.detach().log_softmax(-1)
    value = top_k_divergence(*top(teacher, x.log_softmax(-1), 3), beta=beta, tail=tail)
    assert value.item() == pytest.approx(0, abs=1e-12)
    assert gradient(value.sum(), x).abs().max() < 1e-9


def test_a_dropped_tail_pulls_even_where_both_agree():
    x = logits(1).requires_grad_()
    value = top_k_divergence(*top(x.detach().log_softmax(-1), x.log_softmax(-1), 2), tail="dropped")
    assert value.item() == pytest.approx(0, abs=1e-12)
    assert gradient(value.sum(), x).abs().max() > 1e-3


def test_jensen_shannon_is_symmetric_at_one_half_and_at_most_ln_2():
    s, t = (5 * logits(1, 40)).log_softmax(-1), (5 * logits(2, 40)).log_softmax(-1)
    got = top_k_divergence(s, t, beta=0.5)
    torch.testing.assert_close(got, top_k_divergence(t, s, beta=0.5))
    assert (got <= math.log(2)).all()


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("tail", TAILS)
def test_gradients_of_the_divergence(beta, tail):
    teacher = logits(2, 4).log_softmax(-1)
    best = teacher.topk(3, -1)

    def value(x):
        return top_k_divergence(x.log_softmax(-1).gather(-1, best.indices), best.values, beta=beta, tail=tail)

    assert torch.autograd.gradcheck(value, logits(5, 4).requires_grad_())


def batch(rows=2, width=3, k=3, vocabulary=6):
    student, teacher = (torch.randn(rows, width, vocabulary, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    best, own = teacher.topk(k, -1), student.topk(k, -1)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    return {
        "student_log_probs": student.gather(-1, best.indices),
        "teacher_log_probs": best.values,
        "response_mask": mask,
        "loss_agg": Aggregation.of_batch("token-mean", mask),
        "teacher_ids": best.indices,
        "student_top_ids": own.indices,
    }


def test_top_k_metrics_by_hand():
    given = batch()
    given["teacher_ids"] = torch.tensor([[[0, 1, 2]] * 3] * 2)
    given["student_top_ids"] = torch.tensor([[[2, 1, 5], [0, 1, 2], [9, 9, 9]], [[7, 8, 9], [0, 1, 2], [0, 1, 2]]])
    _, metrics = top_k_loss(**given)
    assert metrics["distillation/overlap_ratio"].item() == pytest.approx((2 / 3 + 1 + 0) / 3)
    selected = given["response_mask"].bool()
    mass = given["teacher_log_probs"].exp().sum(-1)[selected].mean()
    assert metrics["distillation/teacher_mass"].item() == pytest.approx(mass.item())
    per_token = top_k_divergence(given["student_log_probs"], given["teacher_log_probs"])[selected]
    assert metrics["distillation/loss_max"].item() == pytest.approx(per_token.max().item())
    assert metrics["distillation/loss_min"].item() == pytest.approx(per_token.min().item())


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("mode", ["forward_kl_topk", "jsd_topk"])
def test_padding_of_any_kind_changes_neither_loss_nor_gradient(tail, mode):
    given = batch()
    outside = ~given["response_mask"].bool()[..., None].expand(2, 3, 3)

    def run(garbage):
        student = given["student_log_probs"].masked_fill(outside, garbage).requires_grad_()
        teacher = given["teacher_log_probs"].masked_fill(outside, garbage)
        loss, _ = top_k_loss(
            **given | {"student_log_probs": student, "teacher_log_probs": teacher}, tail=tail, loss_mode=mode
        )
        return loss.detach(), gradient(loss, student)

    for garbage in (0.0, float("nan"), -torch.inf):
        loss, grad = run(garbage)
        assert loss == run(-1.0)[0]
        assert (grad[outside] == 0).all()
        assert torch.equal(grad, run(-1.0)[1])


def test_any_split_into_micro_batches_adds_up():
    given = batch()
    whole, _ = top_k_loss(**given)
    rows = [{k: v[i : i + 1] if isinstance(v, torch.Tensor) else v for k, v in given.items()} for i in range(2)]
    torch.testing.assert_close(sum(top_k_loss(**row)[0] for row in rows), whole)


def test_clamps():
    given = {
        "log_prob": torch.tensor([[-1.0, -30.0]]),
        "teacher_log_prob": torch.tensor([[-9.0, -1.0]]),
        "response_mask": torch.ones(1, 2),
        "loss_agg": Aggregation.of_batch("token-sum", torch.ones(1, 2)),
        "loss_mode": "k2",
    }
    assert sampled_token_loss(**given)[0].item() == pytest.approx(8**2 / 2 + 29**2 / 2)
    assert sampled_token_loss(**given, loss_max_clamp=10.0)[0].item() == 20
    assert sampled_token_loss(**given, log_prob_min_clamp=-5.0)[0].item() == pytest.approx(4**2 / 2 + 4**2 / 2)


def test_an_older_students_tokens_count_at_most_as_often_as_the_cap():
    given = {
        "log_prob": torch.tensor([[-1.0]]),
        "old_log_prob": torch.tensor([[-3.0]]),
        "teacher_log_prob": torch.tensor([[-2.0]]),
        "response_mask": torch.ones(1, 1),
        "loss_agg": Aggregation.of_batch("token-sum", torch.ones(1, 1)),
        "loss_mode": "k2",
    }
    assert sampled_token_loss(**given)[0].item() == pytest.approx(0.5 * math.exp(2))
    assert sampled_token_loss(**given, ratio_cap=2.0)[0].item() == pytest.approx(1.0)


def test_unknown_tails_and_betas_are_refused():
    s = logits(1).log_softmax(-1)
    with pytest.raises(ConfigError, match="tail"):
        top_k_divergence(s, s, tail="cut")
    with pytest.raises(ConfigError, match="jsd_beta"):
        top_k_divergence(s, s, beta=1.5)
