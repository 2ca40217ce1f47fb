from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from random_batches import make_batch, seeds, sizes

from quadriga.algorithms import correct_rollout, mismatch_metrics
from quadriga.errors import ConfigError, DataError

LOG2 = math.log(2)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])


def batch_of(log_ratio: list[list[float]], mask=MASK) -> dict[str, torch.Tensor]:
    rollout = torch.full((len(log_ratio), len(log_ratio[0])), -2.0, dtype=torch.float64)
    return {
        "old_log_prob": rollout + torch.tensor(log_ratio, dtype=torch.float64),
        "rollout_log_prob": rollout,
        "response_mask": mask,
    }


# Ratios 4, 1/4 | 1/8 | a row without tokens; garbage under the padding.
BATCH = batch_of([[2 * LOG2, -2 * LOG2, float("nan")], [-3 * LOG2, 50.0, 50.0], [9.0, 9.0, float("inf")]])


def test_token_weights_truncated():
    got = correct_rollout(**BATCH, rollout_is="token", rollout_is_threshold=2.0)
    torch.testing.assert_close(got.weights, torch.tensor([[2, 0.25, 0], [0.125, 0, 0], [0, 0, 0]]).double())
    assert torch.equal(got.mask, MASK.bool())
    assert got.metrics["rollout_corr/is_clipped_fraction"].item() == pytest.approx(1 / 3)
    assert got.metrics["rollout_corr/masked_fraction"] == 0
    assert got.metrics["rollout_corr/is_mean"].item() == pytest.approx(2.375 / 3)
    assert got.metrics["rollout_corr/ess"].item() == pytest.approx(2.375**2 / (3 * (4 + 1 / 16 + 1 / 64)))


def test_token_weights_zeroed_outside_the_bounds():
    got = correct_rollout(**BATCH, rollout_is="token", rollout_is_threshold="0.2_5")
    torch.testing.assert_close(got.weights, torch.tensor([[4, 0.25, 0], [0, 0, 0], [0, 0, 0]]).double())
    assert torch.equal(got.mask, MASK.bool())  # zeroed tokens still count in the denominator
    assert got.metrics["rollout_corr/masked_fraction"].item() == pytest.approx(1 / 3)
    assert got.metrics["rollout_corr/seq_masked_fraction"].item() == pytest.approx(1 / 2)


def test_sequence_weights_are_the_product_over_the_row():
    got = correct_rollout(**BATCH, rollout_is="sequence", rollout_is_threshold=100)
    torch.testing.assert_close(got.weights, torch.tensor([[1, 1, 0], [0.125, 0, 0], [0, 0, 0]]).double())


def test_normalised_weights_have_mean_1_over_tokens():
    got = correct_rollout(**BATCH, rollout_is="token", rollout_is_batch_normalize=True)
    assert got.weights[MASK.bool()].mean().item() == pytest.approx(1)


def test_normalised_weights_of_sequences_have_mean_1_over_rows_whatever_their_lengths():
    got = correct_rollout(**BATCH, rollout_is="sequence", rollout_is_threshold=100, rollout_is_batch_normalize=True)
    # The products are 1, over two tokens, and 0.125, over one: their mean is 0.5625.
    torch.testing.assert_close(got.weights[:, 0], torch.tensor([1 / 0.5625, 0.125 / 0.5625, 0]).double())


def test_without_weights_there_are_metrics_only():
    got = correct_rollout(**BATCH)
    assert got.weights is None
    assert torch.equal(got.mask, MASK.bool())
    assert got.metrics["rollout_corr/masked_fraction"] == 0


@pytest.mark.parametrize(
    ("test", "threshold", "kept"),
    [
        # Row 0: log-ratios ±log 4, mean 0, sum 0. Row 1: −log 8. In logs to the base 2: ±2 and −3.
        ("seq_mean_k1", "0.5_2.0", [True, False]),
        ("seq_mean_k1", 2.0, [True, False]),
        ("seq_mean_k1", "0.1_2.0", [True, True]),
        ("seq_max_k1", "0.2_5", [True, False]),
        ("seq_max_k1", "0.1_3.9", [False, True]),
        ("seq_max_k1", "0.26_5", [False, False]),
        ("seq_max_k1", "0.1_0.5", [False, True]),  # the padding's ratio of 1 does not count
        ("seq_sum_k1", "0.5_2.0", [True, False]),
        ("seq_max_k2", (2 * LOG2) ** 2 / 2 + 0.01, [True, False]),
        ("seq_mean_k2", (2 * LOG2) ** 2 / 2 + 0.01, [True, False]),
        ("seq_sum_k2", (2 * LOG2) ** 2 / 2 + 0.01, [False, False]),
        ("seq_max_k3", 4 - 2 * LOG2 - 1 + 0.01, [True, True]),
        ("seq_max_k3", 1.5, [False, True]),
        ("seq_mean_k3", 1.5, [True, True]),
        ("seq_mean_k1,seq_max_k1", "0.1_2.0,0.3_5", [False, False]),
        ("seq_mean_k1, seq_max_k1", "0.1_5", [True, True]),
    ],
)
def test_sequences_outside_the_bounds_leave_the_mask(test, threshold, kept):
    got = correct_rollout(**BATCH, rollout_rs=test, rollout_rs_threshold=threshold)
    assert got.mask.any(-1).tolist() == [*kept, False]
    assert torch.equal(got.mask, MASK.bool() & got.mask.any(-1, keepdim=True))
    assert got.metrics["rollout_corr/seq_masked_fraction"].item() == pytest.approx(1 - sum(kept) / 2)


@pytest.mark.parametrize(
    ("test", "threshold", "expected"),
    [
        ("token_k1", "0.2_5", [[True, True, False], [False] * 3, [False] * 3]),
        ("token_k2", (2 * LOG2) ** 2 / 2 + 0.01, [[True, True, False], [False] * 3, [False] * 3]),
        ("token_k3", 1.5, [[False, True, False], [True, False, False], [False] * 3]),  # 1.61, 0.64 and 1.20
    ],
)
def test_tokens_outside_the_bounds_leave_the_mask(test, threshold, expected):
    got = correct_rollout(**BATCH, rollout_rs=test, rollout_rs_threshold=threshold)
    assert got.mask.tolist() == expected


def test_weights_are_0_where_the_sequence_was_rejected():
    got = correct_rollout(**BATCH, rollout_is="token", rollout_rs="seq_mean_k1", rollout_rs_threshold=2.0)
    torch.testing.assert_close(got.weights, torch.tensor([[2, 0.25, 0], [0, 0, 0], [0, 0, 0]]).double())
    assert got.metrics["rollout_corr/masked_fraction"].item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("normalise", [False, True])
def test_a_batch_rejected_as_a_whole_is_finite(normalise):
    got = correct_rollout(
        **batch_of([[3.0, 3.0, 3.0]], torch.ones(1, 3)),
        rollout_is="sequence",
        rollout_is_batch_normalize=normalise,
        rollout_rs="seq_max_k1",
        rollout_rs_threshold=2.0,
    )
    assert not got.mask.any()
    assert (got.weights == 0).all()
    assert all(value.isfinite() for value in got.metrics.values())
    assert got.metrics["rollout_corr/masked_fraction"] == 1


def test_mismatch_metrics_by_hand():
    got = {key: value.item() for key, value in mismatch_metrics(**BATCH).items()}
    ratios = [4, 0.25, 0.125]
    assert got["rollout_corr/kl"] == pytest.approx(LOG2 * (-2 + 2 + 3) / 3)
    assert got["rollout_corr/k3_kl"] == pytest.approx(sum(r - math.log(r) - 1 for r in ratios) / 3)
    assert got["rollout_corr/chi2_token"] == pytest.approx(sum(r * r for r in ratios) / 3 - 1)
    assert got["rollout_corr/chi2_seq"] == pytest.approx((1 + 0.125**2) / 2 - 1)
    assert got["rollout_corr/ess"] == pytest.approx(sum(ratios) ** 2 / (3 * sum(r * r for r in ratios)))
    assert got["rollout_corr/rollout_ppl"] == pytest.approx(math.exp(2))
    assert got["rollout_corr/training_ppl"] == pytest.approx(math.exp(2 + LOG2))
    differences = [abs(math.exp(-2) * (r - 1)) for r in ratios]
    assert got["training/rollout_probs_diff_max"] == pytest.approx(max(differences))
    assert got["training/rollout_probs_diff_mean"] == pytest.approx(sum(differences) / 3)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [2.0, "0.5_2.0"])
def test_without_a_gap_every_weight_is_exactly_1(level, threshold):
    batch = make_batch(6, (5, 7), dtype=torch.float32)
    got = correct_rollout(
        old_log_prob=batch["log_prob"],
        rollout_log_prob=batch["log_prob"].clone(),
        response_mask=batch["response_mask"],
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_rs="seq_mean_k1,seq_max_k3",
        rollout_rs_threshold="0.999_1.001,0.001",
    )
    assert torch.equal(got.weights, batch["response_mask"].float())
    assert torch.equal(got.mask, batch["response_mask"])
    ideal_1 = {"rollout_corr/ess", "rollout_corr/is_mean"}
    for key, value in got.metrics.items():
        if not key.endswith("_ppl"):
            assert value == (1 if key in ideal_1 else 0), key


EVERYTHING = {
    "rollout_is": "sequence",
    "rollout_rs": "seq_mean_k3,seq_max_k1,token_k2",
    "rollout_rs_threshold": "5,0.1_10,3",
}


def random_rollout(seed, size, **kw):
    batch = make_batch(seed, size, **kw)
    return {
        "old_log_prob": batch["log_prob"],
        "rollout_log_prob": batch["old_log_prob"],
        "response_mask": batch["response_mask"],
    }


@settings(max_examples=40, deadline=None)
@given(seeds, sizes)
def test_log_probs_of_minus_10000_are_finite_in_float32(seed, size):
    got = correct_rollout(**random_rollout(seed, size, dtype=torch.float32, extreme=True), **EVERYTHING)
    assert got.weights.dtype == torch.float32
    assert got.weights.isfinite().all()
    for key, value in got.metrics.items():
        assert value.isfinite(), key


@settings(max_examples=40, deadline=None)
@given(seeds, sizes)
def test_more_padding_changes_nothing(seed, size):
    inputs = random_rollout(seed, size)
    got = correct_rollout(**inputs, **EVERYTHING)
    padded = correct_rollout(**{k: torch.nn.functional.pad(v, (0, 2)) for k, v in inputs.items()}, **EVERYTHING)
    assert torch.equal(padded.mask[:, : size[1]], got.mask)
    torch.testing.assert_close(padded.weights[:, : size[1]], got.weights)
    for key, value in got.metrics.items():
        torch.testing.assert_close(padded.metrics[key], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_is": "sentence"}, "rollout_is='sentence'"),
        ({"rollout_is": "token", "rollout_is_threshold": "two"}, "rollout_is_threshold='two'"),
        ({"rollout_is": "token", "rollout_is_threshold": 0.0}, "rollout_is_threshold=0.0"),
        ({"rollout_is": "token", "rollout_is_threshold": "3_2"}, "rollout_is_threshold='3_2'"),
        ({"rollout_rs": "seq_mean_k1"}, "0 bounds for 1 names"),
        ({"rollout_rs": "seq_median_k1", "rollout_rs_threshold": 2.0}, "unknown name 'seq_median_k1'.*token_k1"),
        ({"rollout_rs": "seq_max_k3", "rollout_rs_threshold": "0.5_2"}, "no bound for seq_max_k3"),
        ({"rollout_rs": "seq_max_k3", "rollout_rs_threshold": "1,2"}, "2 bounds for 1 names"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        correct_rollout(**BATCH, **options)


def test_a_batch_without_tokens_is_an_error():
    with pytest.raises(DataError, match="none of the 3 rows"):
        correct_rollout(**(BATCH | {"response_mask": torch.zeros(3, 3)}))


def test_staleness_is_counted_by_the_token():
    versions = torch.tensor([[5, 6, 0], [7, 7, 9], [1, 1, 1]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    batch = batch_of([[0.0] * 3] * 3, mask)
    got = correct_rollout(**batch, token_versions=versions, version=7).metrics
    assert got["rollout_corr/staleness_mean"].item() == pytest.approx((2 + 1 + 0) / 3)
    assert got["rollout_corr/staleness_max"] == 2
    assert got["rollout_corr/versions_in_row_max"] == 2
    assert "rollout_corr/staleness_max" not in correct_rollout(**batch).metrics
