from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.engine.micro_batch import RowSizes, plan_micro_batches
from quadriga.errors import DataError

_LENGTHS = st.lists(st.integers(0, 50), min_size=0, max_size=40)


@settings(deadline=None, max_examples=150)
@given(_LENGTHS, st.integers(1, 120), st.none() | st.integers(1, 5), st.integers(1, 8))
def test_every_row_is_in_exactly_one_micro_batch_and_none_exceeds_its_limits(lengths, max_tokens, max_rows, at_least):
    parts = plan_micro_batches(RowSizes(lengths), max_tokens, max_rows, at_least)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or sum(lengths[row] for row in part) <= max(max_tokens, max(lengths, default=0))
        assert max_rows is None or len(part) <= max_rows
    assert len(parts) >= at_least
    assert plan_micro_batches(RowSizes(lengths), max_tokens, max_rows, len(parts)) == parts


@settings(deadline=None, max_examples=150)
@given(_LENGTHS, st.integers(50, 200), st.integers(1, 8))
def test_a_rank_that_could_do_with_fewer_makes_exactly_as_many_as_agreed(lengths, max_tokens, more):
    own = len(plan_micro_batches(RowSizes(lengths), max_tokens))
    assert len(plan_micro_batches(RowSizes(lengths), max_tokens, at_least=own + more)) == own + more


def test_equal_rows_fill_the_budget():
    parts = plan_micro_batches(RowSizes([160] * 256), 2048)
    assert len(parts) == -(-256 // 12)


def test_rows_of_similar_length_share_a_micro_batch():
    parts = plan_micro_batches(RowSizes([1, 10, 1, 10, 1, 10]), 12)
    assert sorted(map(sorted, parts)) == [[0, 2, 4], [1], [3], [5]]


def test_a_shared_prompt_counts_once_and_its_rows_stay_together():
    sizes = RowSizes([14, 14, 14, 14], same_prompt=[0, 1, 0, 1], prompt_lengths=[10] * 4)
    assert plan_micro_batches(sizes, 18) == [[0, 2], [1, 3]]
    assert plan_micro_batches(sizes, 17) == [[0], [2], [1], [3]]


def test_a_budget_that_holds_nothing_is_refused():
    with pytest.raises(DataError, match="can hold nothing"):
        plan_micro_batches(RowSizes([3]), 0)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=20),
    st.integers(1, 200),
    st.none() | st.integers(1, 5),
    st.integers(1, 6),
)
def test_rows_that_belong_together_are_in_one_micro_batch_in_order(pairs, max_tokens, max_rows, at_least):
    lengths = [length for pair in pairs for length in pair]
    parts = plan_micro_batches(RowSizes(lengths, together=2), max_tokens, max_rows, at_least)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        assert part[::2] == [row - 1 for row in part[1::2]]
        assert all(row % 2 == 0 for row in part[::2])
        assert len(part) <= 2 or sum(lengths[row] for row in part) <= max(max_tokens, *map(sum, pairs))
        assert max_rows is None or len(part) <= max(2, max_rows)
    assert len(parts) >= at_least
