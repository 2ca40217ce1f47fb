"""Row order: fixed for ever by (seed, epoch), and resumable at any row."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.data.sampler import ResumableSampler, Sampler, seeded_order
from quadriga.errors import CheckpointError, DataError

MASK = 2**64 - 1


def philox_words(seed: int, stream: int, count: int) -> list[int]:
    """Philox4x64-10 as published (Salmon et al., 2011), on Python integers; NumPy counts its blocks from 1."""
    words: list[int] = []
    block = 0
    while len(words) < count:
        block += 1
        a, b, c, d = block, 0, 0, 0
        k0, k1 = seed & MASK, stream & MASK
        for _ in range(10):
            p, q = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
            a, b, c, d = (q >> 64) ^ b ^ k0, q & MASK, (p >> 64) ^ d ^ k1, p & MASK
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
        words += [a, b, c, d]
    return words[:count]


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**64 - 1), st.integers(0, 40))
def test_the_order_is_that_of_the_written_down_algorithm(seed, stream, rows):
    words = philox_words(seed, stream, rows)
    assert seeded_order(rows, seed, stream).tolist() == sorted(range(rows), key=lambda row: words[row])


def test_the_order_never_changes_between_versions():
    assert seeded_order(8, seed=1, stream=0).tolist() == [3, 5, 2, 7, 0, 6, 1, 4]
    assert seeded_order(8, seed=1, stream=1).tolist() == [0, 6, 5, 3, 4, 7, 2, 1]


def take(sampler: ResumableSampler, count: int) -> list[tuple[int, int]]:
    """(epoch, row) of the next `count` rows."""
    rows: list[tuple[int, int]] = []
    while len(rows) < count:
        rows += [(sampler.epoch, row) for row in islice(sampler, count - len(rows))]
    return rows


@given(
    num_rows=st.integers(1, 30),
    batch_size=st.integers(1, 30),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
    drop_last=st.booleans(),
    before=st.integers(0, 90),
)
def test_resuming_after_any_row_continues_with_the_very_next(num_rows, batch_size, shuffle, seed, drop_last, before):
    batch_size = min(batch_size, num_rows)

    def fresh() -> ResumableSampler:
        return ResumableSampler(num_rows, batch_size, shuffle, seed, drop_last)

    whole = take(fresh(), before + 70)
    interrupted = fresh()
    assert take(interrupted, before) == whole[:before]
    resumed = fresh()
    resumed.load_state_dict(interrupted.state_dict())
    assert take(resumed, 70) == whole[before:]


@given(st.integers(1, 50), st.integers(0, 3))
def test_an_epoch_visits_every_row_once(num_rows, seed):
    sampler = ResumableSampler(num_rows, 1, True, seed)
    assert sorted(sampler) == list(range(num_rows))
    assert (sampler.epoch, sampler.cursor) == (1, 0)


def test_epochs_and_seeds_have_different_orders():
    orders = {tuple(ResumableSampler(20, 4, True, seed)) for seed in range(5)}
    sampler = ResumableSampler(20, 4, True, 0)
    orders |= {tuple(sampler) for _ in range(5)}
    assert len(orders) == 5 + 5 - 1  # seed 0, epoch 0 is in both


def test_without_shuffle_rows_come_in_file_order():
    sampler = ResumableSampler(5, 2, False, 0)
    assert [list(sampler), list(sampler)] == [[0, 1, 2, 3], [0, 1, 2, 3]]


def test_dropped_rows_change_from_epoch_to_epoch_when_shuffled():
    sampler = ResumableSampler(5, 2, True, 0)
    missing = {frozenset(range(5)) - frozenset(sampler) for _ in range(10)}
    assert len(sampler) == 4
    assert all(len(rows) == 1 for rows in missing)
    assert len(missing) > 1


def test_a_dataset_smaller_than_a_batch_is_an_error_with_the_numbers():
    with pytest.raises(DataError, match=r"has 7 rows, fewer than one batch of data.train_batch_size=8"):
        ResumableSampler(7, 8, True, 0)
    assert len(ResumableSampler(7, 8, True, 0, drop_last=False)) == 7


def test_the_state_is_plain_and_small():
    sampler = ResumableSampler(10, 2, True, 3)
    take(sampler, 13)
    assert sampler.state_dict() == {"seed": 3, "epoch": 1, "cursor": 3, "num_rows": 10, "shuffle": True}


@pytest.mark.parametrize("changed", [{"num_rows": 11}, {"seed": 4}, {"shuffle": False}])
def test_a_state_of_other_data_is_refused(changed):
    state = ResumableSampler(10, 2, True, 3).state_dict()
    other = ResumableSampler(**({"num_rows": 10, "batch_size": 2, "shuffle": True, "seed": 3} | changed))
    with pytest.raises(CheckpointError, match=f"made with {next(iter(changed))}="):
        other.load_state_dict(state)


def test_an_incomplete_state_is_refused():
    with pytest.raises(CheckpointError, match="lacks cursor"):
        ResumableSampler(4, 2, True, 3).load_state_dict({"seed": 3, "epoch": 0, "num_rows": 4, "shuffle": True})


def test_it_satisfies_the_interface_that_custom_samplers_must():
    assert isinstance(ResumableSampler(4, 2, True, 3), Sampler)


def test_a_million_rows_are_ordered_quickly_enough_to_do_it_every_epoch():
    order = seeded_order(1_000_000, 0, 0)
    assert np.bincount(order).max() == 1
