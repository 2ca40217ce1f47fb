"""Every block is accounted for and holds what its owners believe it holds, whatever happens in whatever order."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.rollout import Request, SamplingParams
from quadriga.rollout.native.blocks import BlockPool
from quadriga.rollout.native.kv_cache import CacheShape
from quadriga.rollout.native.plan import decode_index
from quadriga.rollout.native.scheduler import Scheduler
from quadriga.rollout.native.sequence import Sequence

BLOCK = 4


class Simulation:
    """A scheduler with a memory of labels instead of keys: (owner, position), where a prompt is an owner of its own."""

    def __init__(self, blocks: int, slots: int, budget: int) -> None:
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(self.pool, BLOCK, slots, blocks * BLOCK, budget, on_preempt=self.save)
        self.memory = np.full((blocks, BLOCK, 2), -1)
        self.sampled: dict[int, int] = {}
        self.requests = 0

    def save(self, sequence: Sequence) -> None:
        sequence.tokens = [sequence.sample_index] * self.sampled[id(sequence)]

    def submit(self, prompt: int, samples: int, new: int) -> None:
        room = self.pool.num_blocks * BLOCK
        prompt = min(prompt, room - 1)
        params = SamplingParams(max_new_tokens=min(new, room - prompt))
        self.requests += 1
        request = Request(str(self.requests), [self.requests] * prompt, params)
        labels = range(1000 * self.requests, 1000 * self.requests + samples)
        members = [Sequence(request, label, math.inf) for label in labels]
        self.sampled |= {id(m): 0 for m in members}
        self.alive = [*getattr(self, "alive", []), *members]  # keeps ids from being reused
        self.scheduler.submit(members[0].prompt, members)

    def step(self) -> None:
        """One pass: move, write what the pass computes, share tails, and let full-grown samples finish."""
        scheduler = self.scheduler
        batch = scheduler.schedule()
        for source, target in batch.moves:
            self.memory[target] = self.memory[source]
        self.check()
        for sequence in scheduler.running:
            position = int(scheduler.lengths[sequence.slot])
            self._write(sequence, position, sequence.sample_index)
        for prefill, start, length in batch.chunks:
            first, prompt = prefill.members[0], len(prefill.members[0].request.prompt_ids)
            for position in range(start, start + length):
                self._write(first, position, prefill.ids[position] if position < prompt else first.sample_index)
        for prefill in batch.starting:
            tails = [scheduler.blocks_of(m)[-1] for m in prefill.members]
            if prefill.ids.size % BLOCK:
                for tail in tails[1:]:
                    self.memory[tail] = self.memory[tails[0]]
        scheduler.advance(batch)
        for sequence in scheduler.running:
            self.sampled[id(sequence)] += 1
        done = [s for s in scheduler.running if self.sampled[id(s)] >= s.request.params.max_new_tokens]
        scheduler.finish(done)
        self.check()

    def abort(self, which: int) -> None:
        self.scheduler.withdraw(lambda s: s.sample_index % 7 == which % 7)
        self.check()

    def _write(self, sequence: Sequence, position: int, owner: int) -> None:
        block = self.scheduler.blocks_of(sequence)[position // BLOCK]
        shared = position // BLOCK < self.scheduler.num_shared[sequence.slot]
        assert self.pool.owners[block] == 1 or (shared and position < len(sequence.request.prompt_ids))
        self.memory[block, position % BLOCK] = (owner, position)

    def check(self) -> None:
        scheduler = self.scheduler
        holders = [*scheduler.running, *(m for p in scheduler.prefilling for m in p.members)]
        assert len({s.slot for s in holders}) == len(holders)
        assert all(s.slot == -1 for p in scheduler.waiting for s in p.members)
        held = Counter(int(b) for s in holders for b in scheduler.blocks_of(s))
        owners = {b: int(n) for b, n in enumerate(self.pool.owners) if n}
        assert owners == dict(held)
        assert self.pool.num_free == self.pool.num_blocks - len(held)
        for sequence in scheduler.running:
            blocks, length = scheduler.blocks_of(sequence), int(scheduler.lengths[sequence.slot])
            read = self.memory[blocks].reshape(-1, 2)[:length]
            prompt = sequence.request.prompt_ids
            expected = [*prompt, *[sequence.sample_index] * (length - len(prompt))]
            assert read[:, 0].tolist() == expected
            assert read[:, 1].tolist() == list(range(length))
            assert length <= len(blocks) * BLOCK


actions = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 30), st.integers(1, 9), st.integers(1, 20)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 6)),
)


@settings(max_examples=300, deadline=None)
@given(
    blocks=st.integers(2, 40),
    slots=st.integers(1, 12),
    budget=st.integers(1, 40),
    script=st.lists(actions, max_size=25),
)
def test_every_block_is_accounted_for(blocks: int, slots: int, budget: int, script: list[tuple]) -> None:
    simulation = Simulation(blocks, slots, budget)
    for name, *arguments in script:
        if name == "step":
            for _ in range(arguments[0]):
                simulation.step()
        else:
            getattr(simulation, name)(*arguments)
    for _ in range(20_000):
        if simulation.scheduler.idle:
            break
        simulation.step()
    assert simulation.scheduler.idle
    assert simulation.pool.num_free == blocks
    assert len(simulation.scheduler._free_slots) == slots


def test_a_full_cache_preempts_the_last_to_come_and_all_finish() -> None:
    simulation = Simulation(blocks=8, slots=8, budget=64)
    for _ in range(4):
        simulation.submit(prompt=4, samples=1, new=20)
    finished = []
    for _ in range(500):
        if simulation.scheduler.idle:
            break
        before = {s.request.request_id for s in simulation.scheduler.running}
        simulation.step()
        finished += sorted(before - {s.request.request_id for s in simulation.alive if s.slot >= 0 or s.tokens})
    assert simulation.scheduler.idle
    assert simulation.scheduler.preemptions > 0
    assert finished[0] == "1"


def test_samples_of_a_prompt_hold_its_full_blocks_once() -> None:
    simulation = Simulation(blocks=40, slots=8, budget=64)
    simulation.submit(prompt=14, samples=8, new=3)
    simulation.step()
    assert simulation.pool.num_blocks - simulation.pool.num_free == 3 + 8  # three full blocks, and a tail each


def test_gaps_left_by_finished_samples_are_closed() -> None:
    simulation = Simulation(blocks=400, slots=64, budget=4096)
    for i in range(60):
        simulation.submit(prompt=9, samples=1, new=30 if i % 6 == 5 else 2)
    for _ in range(5):
        simulation.step()
    scheduler = simulation.scheduler
    held = np.concatenate([scheduler.blocks_of(s) for s in scheduler.running])
    assert len(scheduler.running) == 10
    assert held.max() + 1 <= 1.25 * held.size + 8


def test_the_decode_index_finds_every_block_once_in_order() -> None:
    """Parts of a row name the blocks of its table in order of position; shared blocks appear once with all owners."""
    shape = CacheShape(1, 6, 2, 8, BLOCK, torch.float32, torch.device("cpu"))
    tables = np.array([[9, 0, 1], [9, 2, 0], [9, 3, 4], [5, 0, 0]])
    counts, shared = np.array([3, 2, 3, 1]), np.array([1, 1, 1, 0])
    index = decode_index(shape, tables, counts, shared)
    assert index.num_private == 6
    assert index.shared_blocks.tolist() == [9]
    assert sorted(index.shared_rows.flatten().tolist()) == [0, 1, 2]
    assert index.private_row.tolist()[:6] == [0, 0, 1, 2, 2, 3]
    assert index.last_block.tolist() == [1, 2, 4, 5]
    used = index.parts[index.parts < len(index.maxima) - 1]
    assert used.unique().numel() == used.numel() == 6 * counts.sum()
