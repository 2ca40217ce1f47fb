"""The parts of generation on a GPU that need none: sizes of batches, and block tables that live elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quadriga.rollout.interface import Request, SamplingParams
from quadriga.rollout.native.blocks import BlockPool
from quadriga.rollout.native.cuda.graphs import DecodeGraphs, bucket_of
from quadriga.rollout.native.scheduler import Scheduler
from quadriga.rollout.native.sequence import Sequence


def test_batches_are_padded_by_less_than_a_quarter() -> None:
    assert [bucket_of(rows) for rows in (1, 2, 3, 9, 16, 17, 33, 500, 1000, 1024)] == [
        1,
        2,
        4,
        16,
        16,
        20,
        40,
        512,
        1024,
        1024,
    ]
    for rows in range(17, 3000):
        assert rows <= bucket_of(rows) < 1.25 * rows


def test_a_batch_larger_than_the_largest_graph_is_cut() -> None:
    graphs = DecodeGraphs(lambda slots: slots, 100, torch.device("cpu"), eager=True)
    assert graphs.parts(250) == [(0, 100), (100, 100), (200, 50)]
    assert [graphs.padded(rows) for rows in (100, 50, 3)] == [100, 56, 4]


@pytest.mark.parametrize("samples", [1, 3])
def test_changes_rebuild_the_block_tables_on_the_device(samples: int) -> None:
    scheduler = Scheduler(BlockPool(64), 4, 16, 64, 128, on_preempt=lambda sequence: None, on_device=True)
    mirror = np.zeros_like(scheduler.tables)
    for number in range(4):
        request = Request(str(number), list(range(5 + number)), SamplingParams(), sample_indices=tuple(range(samples)))
        members = [Sequence(request, i, float("inf")) for i in request.sample_indices]
        scheduler.submit(members[0].prompt, members)
    for step in range(12):
        batch = scheduler.schedule()
        assert batch.moves == []
        for slot, column, block in scheduler.take_changes():
            mirror[slot, column] = block
        scheduler.advance(batch)
        for sequence in scheduler.running:
            count = scheduler.num_blocks[sequence.slot]
            assert (mirror[sequence.slot, :count] == scheduler.blocks_of(sequence)).all()
        if step == 6:
            scheduler.finish(scheduler.running[:2])
    assert scheduler.take_changes() == []


def test_prompts_wait_for_a_sixteenth_of_the_slots_while_samples_run() -> None:
    scheduler = Scheduler(BlockPool(512), 4, 32, 64, 256, on_preempt=lambda sequence: None, on_device=True)
    for number in range(34):
        request = Request(str(number), [1, 2, number], SamplingParams())
        scheduler.submit(np.array(request.prompt_ids), [Sequence(request, 0, float("inf"))])
    scheduler.advance(scheduler.schedule())
    assert len(scheduler.running) == 32
    scheduler.finish(scheduler.running[:1])
    assert scheduler.schedule().chunks == []
    scheduler.finish(scheduler.running[:1])
    assert len(scheduler.schedule().chunks) == 2
