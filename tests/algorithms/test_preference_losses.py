"""Losses on pairs: the published formulas, and behaviour far from the middle."""

from __future__ import annotations

import math

import pytest
import torch

from quadriga.algorithms import dpo_loss, pairwise_reward_loss
from quadriga.errors import ConfigError


def test_pairwise_loss_is_the_negative_log_likelihood_of_the_preference():
    loss = pairwise_reward_loss(torch.tensor([1.0, 0.0, -3.0]), torch.tensor([1.0, 2.0, 4.0]))
    expected = [math.log(1 + math.exp(-d)) for d in (0.0, -2.0, -7.0)]
    assert loss.tolist() == pytest.approx(expected)


def test_dpo_starts_at_log_2_and_falls_with_the_margin():
    loss = dpo_loss(torch.tensor([0.0, 5.0, -5.0]), beta=0.1)
    assert loss.tolist() == pytest.approx([math.log(2), math.log(1 + math.exp(-0.5)), math.log(1 + math.exp(0.5))])


def test_label_smoothing_mixes_both_directions():
    margin = torch.tensor([3.0])
    plain, turned = dpo_loss(margin, beta=1.0), dpo_loss(-margin, beta=1.0)
    smooth = dpo_loss(margin, beta=1.0, label_smoothing=0.2)
    assert smooth.item() == pytest.approx(0.8 * plain.item() + 0.2 * turned.item())


def test_ipo_pulls_the_margin_to_half_of_one_over_beta():
    margin = torch.tensor([5.0, 0.0], requires_grad=True)
    loss = dpo_loss(margin, beta=0.1, loss_type="ipo")
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([0.0, 25.0])
    assert margin.grad.tolist() == pytest.approx([0.0, -10.0])


def test_no_nan_however_far_apart():
    far = torch.tensor([1e4, -1e4, 0.0], requires_grad=True)
    for loss in (dpo_loss(far, beta=0.5), pairwise_reward_loss(far, torch.zeros(3))):
        assert torch.isfinite(loss).all()
        (gradient,) = torch.autograd.grad(loss.sum(), far)
        assert torch.isfinite(gradient).all()


def test_settings_that_make_no_loss_are_refused():
    for wrong in ({"beta": 0.0}, {"beta": 0.1, "label_smoothing": 0.5}, {"beta": 0.1, "loss_type": "hinge"}):
        with pytest.raises(ConfigError):
            dpo_loss(torch.zeros(1), **wrong)
