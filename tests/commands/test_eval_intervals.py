"""Confidence intervals: they hold what they promise, and near 0 and 1 they still have a width."""

from __future__ import annotations

import random

import pytest

from quadriga.commands.evaluation_figures import mean_interval, share_interval


def test_all_right_is_not_certainly_all_right():
    low, high = share_interval([1.0] * 20)
    assert high == 1.0
    assert low == pytest.approx(0.839, abs=1e-3)  # Wilson's published bound for 20 of 20
    assert share_interval([0.0] * 20) == pytest.approx((1 - high, 1 - low))


def test_known_value_of_wilsons_interval():
    assert share_interval([1.0] * 50 + [0.0] * 50) == pytest.approx((0.4038, 0.5962), abs=1e-4)


def test_several_samples_narrow_it_but_not_below_that_of_independent_answers():
    one = share_interval([1.0, 0.0] * 50)
    eight = share_interval([0.5] * 100, samples_per_prompt=8)
    independent = share_interval([1.0, 0.0] * 400)
    assert eight == pytest.approx(independent)
    assert one[0] < eight[0] < eight[1] < one[1]


@pytest.mark.parametrize("chance", [0.03, 0.5, 0.9])
def test_about_95_of_100_intervals_hold_the_truth(chance):
    draw = random.Random(0)
    hits = 0
    for _ in range(1000):
        low, high = share_interval([float(draw.random() < chance) for _ in range(60)])
        hits += low <= chance <= high
    assert 920 <= hits <= 985


def test_interval_of_any_mean_comes_from_the_spread():
    assert mean_interval([3.0]) is None
    assert mean_interval([2.0, 2.0]) == (2.0, 2.0)
    low, high = mean_interval([1.0, 3.0])
    assert (low + high) / 2 == 2
    assert high - low == pytest.approx(2 * 1.96, abs=1e-3)
