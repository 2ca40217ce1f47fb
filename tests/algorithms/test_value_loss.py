from __future__ import annotations

import plain_reference as plain
import pytest
import torch
from hypothesis import given, settings
from random_batches import make_batch, seeds, sizes

from quadriga.algorithms import AGGREGATION_MODES, Aggregation, value_loss
from quadriga.errors import ConfigError

modes = pytest.mark.parametrize("mode", AGGREGATION_MODES)


def critic_batch(seed, size):
    batch = make_batch(seed, size)
    return {
        "values": batch["values"],
        "old_values": batch["reward_baselines"][:, None] + batch["log_prob"],
        "returns": batch["returns"],
        "response_mask": batch["response_mask"],
    }


@modes
@settings(max_examples=20, deadline=None)
@given(seeds, sizes)
def test_equals_the_plain_reference(mode, seed, size):
    batch = critic_batch(seed, size)
    loss, _ = value_loss(**batch, loss_agg=Aggregation.of_batch(mode, batch["response_mask"]), cliprange_value=0.3)
    triples = [zip(*rows) for rows in zip(*(batch[k].tolist() for k in ("values", "old_values", "returns")))]
    per_token = [[plain.value_token(v, old, ret, 0.3) for v, old, ret in row] for row in triples]
    expected = plain.aggregate(mode, per_token, batch["response_mask"].tolist(), constant=size[1])
    assert loss.item() == pytest.approx(expected, rel=1e-9)


def test_by_hand():
    # Near its old value: ½·(1−3)². Moved towards the return by 2 with a range of ½: held at 0.5, ½·(0.5−3)².
    mask = torch.ones(1, 2)
    loss, metrics = value_loss(
        values=torch.tensor([[1.0, 2.0]]),
        old_values=torch.tensor([[1.0, 0.0]]),
        returns=torch.tensor([[3.0, 3.0]]),
        response_mask=mask,
        loss_agg=Aggregation.of_batch("token-sum", mask),
    )
    assert loss.item() == 2.0 + 3.125
    assert metrics["critic/vf_clipfrac"].item() == 0.5
    assert metrics["critic/vpred_mean"].item() == 1.5


@modes
def test_gradient(mode):
    batch = critic_batch(4, (4, 5))
    agg = Aggregation.of_batch(mode, batch["response_mask"])
    values = batch.pop("values").requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(values=v, **batch, loss_agg=agg)[0], values)


@modes
@settings(max_examples=10, deadline=None)
@given(seeds, sizes)
def test_rows_one_by_one_add_up_to_the_mini_batch(mode, seed, size):
    batch = critic_batch(seed, size)
    agg = Aggregation.of_batch(mode, batch["response_mask"])
    whole, whole_metrics = value_loss(**batch, loss_agg=agg)
    shares = [value_loss(**{k: v[i : i + 1] for k, v in batch.items()}, loss_agg=agg) for i in range(size[0])]
    torch.testing.assert_close(sum(loss for loss, _ in shares), whole, rtol=1e-10, atol=1e-12)
    for key, value in whole_metrics.items():
        torch.testing.assert_close(sum(metrics[key] for _, metrics in shares), value, rtol=1e-10, atol=1e-12)


def test_garbage_under_the_padding_gets_gradient_0():
    batch = critic_batch(6, (4, 5))
    mask = batch["response_mask"]
    agg = Aggregation.of_batch("token-mean", mask)
    clean, _ = value_loss(**batch, loss_agg=agg)
    dirty = {k: torch.where(mask, v, float("nan")) for k, v in batch.items() if k != "response_mask"}
    values = dirty["values"].requires_grad_()
    loss, _ = value_loss(**dirty, response_mask=mask, loss_agg=agg)
    loss.backward()
    assert loss == clean
    assert (values.grad[~mask] == 0).all()
    assert values.grad.isfinite().all()


def test_a_negative_range_is_refused():
    batch = critic_batch(6, (4, 5))
    agg = Aggregation.of_batch("token-mean", batch["response_mask"])
    with pytest.raises(ConfigError, match="cliprange_value"):
        value_loss(**batch, loss_agg=agg, cliprange_value=-1.0)
