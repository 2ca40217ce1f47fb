from __future__ import annotations

import plain_reference as plain
import pytest
import torch
from hypothesis import given, settings
from random_batches import make_batch, seeds, sizes

from quadriga.algorithms import AGGREGATION_MODES, Aggregation, count_tokens_and_sequences, entropy_bonus
from quadriga.errors import ConfigError, DataError

modes = pytest.mark.parametrize("mode", AGGREGATION_MODES)

LOSS = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 0.0, 0.0, 0.0], [7.0, 7.0, 7.0, 7.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])  # the last row is no sequence


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 16 / 4),
        ("token-sum", 16),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-mean", (2 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 4),
    ],
)
def test_modes_by_hand(mode, expected):
    assert Aggregation.of_batch(mode, MASK)(LOSS, MASK).item() == expected


@modes
@settings(max_examples=25, deadline=None)
@given(seeds, sizes)
def test_equals_the_plain_reference(mode, seed, size):
    batch = make_batch(seed, size)
    x, mask = batch["values"], batch["response_mask"]
    expected = plain.aggregate(mode, x.tolist(), mask.tolist(), constant=size[1])
    assert Aggregation.of_batch(mode, mask)(x, mask).item() == pytest.approx(expected, abs=1e-12)


def test_counts_leave_out_rows_without_tokens():
    assert count_tokens_and_sequences(MASK) == (4, 2)


@modes
def test_ranks_add_up_with_counts_added_up(mode):
    """Two ranks that know only their own rows, and the sums of their counts."""
    ranks = [slice(0, 1), slice(1, 3)]
    tokens, sequences = map(sum, zip(*(count_tokens_and_sequences(MASK[rank]) for rank in ranks)))
    agg = Aggregation(mode, tokens, sequences, response_length=4)
    assert agg == Aggregation.of_batch(mode, MASK)
    shares = sum(agg(LOSS[rank], MASK[rank]) for rank in ranks)
    torch.testing.assert_close(shares, agg(LOSS, MASK))


def test_the_loss_scale_factor_wins_over_the_response_length():
    agg = Aggregation("seq-mean-token-sum-norm", 4, 2, loss_scale_factor=8, response_length=4)
    assert agg(LOSS, MASK).item() == 1.0


@modes
def test_gradient(mode):
    agg = Aggregation.of_batch(mode, MASK)
    x = LOSS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: agg(v, MASK), x)


@modes
def test_a_batch_without_tokens_has_loss_0(mode):
    nothing = torch.zeros_like(MASK)
    x = LOSS.clone().requires_grad_()
    loss = Aggregation.of_batch(mode, nothing)(x, nothing)
    loss.backward()
    assert loss == 0
    assert (x.grad == 0).all()


def test_the_mode_is_checked_and_the_known_ones_listed():
    with pytest.raises(ConfigError, match="seq-mean-token-sum-norm"):
        Aggregation("token_mean", 1, 1)


def test_the_norm_mode_needs_its_constant():
    for constant in (None, 0):
        with pytest.raises(ConfigError, match="loss_scale_factor"):
            Aggregation("seq-mean-token-sum-norm", 1, 1, loss_scale_factor=constant)


def test_negative_counts_are_refused():
    with pytest.raises(DataError, match="mini-batch"):
        Aggregation("token-mean", -1, 1)


@modes
def test_entropy_is_aggregated_like_the_policy_loss_and_logged_by_token(mode):
    agg = Aggregation.of_batch(mode, MASK)
    entropy = LOSS.clone().requires_grad_()
    loss, metrics = entropy_bonus(entropy=entropy, response_mask=MASK, loss_agg=agg)
    assert loss == agg(LOSS, MASK)
    assert loss.requires_grad
    assert metrics["actor/entropy"].item() == 4.0
    assert not metrics["actor/entropy"].requires_grad
