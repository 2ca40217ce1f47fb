"""How the rows of a step are laid out for the ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quadriga.trainer.ppo.row_functions import layout
from quadriga.trainer.ppo.validation import validation_metrics


@given(
    world=st.integers(1, 4),
    minis=st.integers(1, 4),
    per_rank=st.integers(1, 5),
    balance=st.booleans(),
    data=st.data(),
)
def test_rows_stay_in_their_mini_batch_whatever_rank_they_go_to(world, minis, per_rank, balance, data):
    rows = world * minis * per_rank
    lengths = data.draw(st.lists(st.integers(1, 1000), min_size=rows, max_size=rows))
    order = layout(lengths, minis, world, balance)
    assert sorted(order) == list(range(rows))
    chunks = order.reshape(world, minis, per_rank)
    for k in range(minis):
        expected = set(range(k * rows // minis, (k + 1) * rows // minis))
        assert set(chunks[:, k].ravel()) == expected


def test_one_rank_keeps_the_order():
    assert layout([5, 1, 9, 2], 2, 1, True).tolist() == [0, 1, 2, 3]


def test_balanced_ranks_have_nearly_the_same_number_of_tokens():
    lengths = np.random.default_rng(0).integers(1, 1000, 256)
    order = layout(lengths.tolist(), 1, 4, True).reshape(4, -1)
    totals = lengths[order].sum(1)
    assert totals.max() - totals.min() < 0.02 * totals.mean()
    unbalanced = lengths[layout(lengths.tolist(), 1, 4, False).reshape(4, -1)].sum(1)
    assert totals.max() < unbalanced.max()


def test_validation_figures_by_hand():
    sources = ["x", "x", "x", "x", "y", "y"]
    uids = ["1", "1", "2", "2", "3", "3"]
    results = {
        "acc": [1.0, 0.0, 0.0, 0.0, 1.0, 1.0],
        "score": [1.0, 0.5, 0.0, 0.0, 1.0, 1.0],
        "pred": ["4", "5", "7", "7", "1", "1"],
    }
    figures = validation_metrics(sources, uids, results, 2)
    assert figures["val/x/acc/mean@2"] == 0.25
    assert figures["val/x/acc/best@2"] == 0.5
    assert figures["val/x/acc/maj@2"] == 0.5, "on a tie the earlier answer counts"
    assert figures["val/x/score/mean@2"] == 0.375
    assert figures["val/y/acc/maj@2"] == 1.0


def test_majority_beats_a_lucky_answer():
    results = {"acc": [1.0, 0.0, 0.0], "pred": ["4", "5", "5"]}
    figures = validation_metrics(["x"] * 3, ["1"] * 3, results, 3)
    assert figures["val/x/acc/maj@3"] == 0.0
    assert figures["val/x/acc/best@3"] == 1.0


def test_rows_without_an_answer_do_not_outvote():
    results = {"acc": [0.0, 0.0, 1.0], "pred": [None, None, "4"]}
    assert validation_metrics(["x"] * 3, ["1"] * 3, results, 3)["val/x/acc/maj@3"] == 1.0


def test_held_out_answers_without_a_result_and_their_lengths_are_told_per_source():
    results = {"score": [0.0, 1.0, 0.0, 0.0], "outcome": ["unparsed", "correct", "wrong", "wrong"]}
    lengths = {"response_tokens": [2, 4, 7, 9]}
    figures = validation_metrics(["x", "x", "y", "y"], ["1", "2", "3", "4"], {**results, **lengths}, 1)
    assert {name: figures[f"val/{name}"] for name in ("x/unparsed", "y/unparsed")} == {
        "x/unparsed": 0.5,
        "y/unparsed": 0,
    }
    assert figures["val/x/response_length/mean"] == 3
    assert figures["val/y/response_length/mean"] == 8
    told = validation_metrics(["x"] * 4, ["1", "2", "3", "4"], {"score": [0.0] * 4}, 1)
    assert "val/x/unparsed" not in told, "nothing is known of outcomes"
