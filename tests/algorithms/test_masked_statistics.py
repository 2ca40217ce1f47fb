from __future__ import annotations

import plain_reference as plain
import pytest
import torch
from hypothesis import given, settings
from random_batches import make_batch, seeds, sizes

from quadriga.algorithms import masked, masked_mean, masked_sum, masked_var, masked_whiten
from quadriga.errors import DataError


@settings(max_examples=60, deadline=None)
@given(seeds, sizes)
def test_statistics_equal_the_plain_ones(seed, size):
    batch = make_batch(seed, size)
    x, mask = batch["values"], batch["response_mask"]
    tokens = plain.selected(x.tolist(), mask.tolist())
    assert masked_sum(x, mask).item() == pytest.approx(sum(tokens), abs=1e-12)
    assert masked_mean(x, mask).item() == pytest.approx(plain.mean(tokens), abs=1e-12)
    assert masked_var(x, mask).item() == pytest.approx(plain.variance(tokens), abs=1e-12)
    torch.testing.assert_close(
        masked_whiten(x, mask),
        torch.tensor(plain.whiten(x.tolist(), mask.tolist()), dtype=x.dtype),
        rtol=1e-9,
        atol=1e-9,
    )


def test_whitened_tokens_have_mean_0_and_variance_1():
    x = torch.randn(64, 50, dtype=torch.float64) * 7 + 1000
    mask = torch.rand(64, 50) < 0.5
    white = masked_whiten(x, mask)
    assert masked_mean(white, mask).abs() < 1e-10
    assert masked_var(white, mask).item() == pytest.approx(1, abs=1e-8)
    assert (white[~mask] == 0).all()


def test_whitening_in_blocks_is_whitening_at_once(monkeypatch):
    x, mask = torch.randn(37, 11, dtype=torch.float64), torch.rand(37, 11) < 0.5
    at_once = masked_whiten(x, mask)
    monkeypatch.setattr(masked, "_BLOCK_ELEMENTS", 22)
    torch.testing.assert_close(masked_whiten(x, mask), at_once)


def test_rows_are_taken_one_by_one_along_a_dimension():
    x = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert masked_sum(x, mask, dim=-1).tolist() == [3.0, 4.0]
    assert masked_mean(x, mask, dim=-1).tolist() == [1.5, 4.0]
    assert masked_var(x, mask, dim=-1).tolist() == [0.5, 0.0]


def test_a_single_token_has_variance_0_and_whitens_to_0():
    x, mask = torch.tensor([[5.0, 3.0]]), torch.tensor([[1, 0]])
    assert masked_var(x, mask) == 0
    assert masked_whiten(x, mask).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("statistic", [masked_mean, masked_var, masked_whiten])
def test_a_mask_without_tokens_is_an_error(statistic):
    with pytest.raises(DataError, match="none of the 2 rows"):
        statistic(torch.ones(2, 3), torch.zeros(2, 3))


@pytest.mark.parametrize("statistic", [masked_mean, masked_var])
def test_a_row_without_tokens_is_named(statistic):
    mask = torch.ones(4, 3, dtype=torch.bool)
    mask[2] = False
    with pytest.raises(DataError, match="row 2 has no token"):
        statistic(torch.ones(4, 3), mask, dim=-1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
def test_any_dtype_of_mask_selects_the_same_and_what_it_hides_is_never_read(dtype):
    x = torch.tensor([[1.0, float("nan"), 4.0], [float("inf"), 1.0, 0.0]])
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype)
    assert masked_sum(x, mask) == 6
    assert masked_mean(x, mask) == 1.5
    assert masked_var(x, mask) == 3
    assert masked_whiten(x, mask).isfinite().all()
    assert masked.token_counts(mask).tolist() == [2, 2]


def test_gradients_of_the_statistics():
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    for statistic in (masked_sum, masked_mean, masked_var):
        assert torch.autograd.gradcheck(lambda v, f=statistic: f(v, mask), x)
