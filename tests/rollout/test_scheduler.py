"""Every block is accounted for and holds what its owners believe it holds, whatever happens in whatever order."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
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
    """A scheduler with a memory of labels instead of keys: (token, position, number of the weights).

    Prompts are made of few tokens and often go on from what was written before, so that beginnings are known.
    """

    def __init__(self, blocks: int, slots: int, budget: int, closes_gaps: bool = True) -> None:
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(
            self.pool, BLOCK, slots, blocks * BLOCK, budget, on_preempt=self.save, closes_gaps=closes_gaps
        )
        self.memory = np.full((blocks, BLOCK, 3), -1)
        self.sampled: dict[int, int] = {}
        self.alive: list[Sequence] = []  # keeps ids from being reused
        self.finished: list[Sequence] = []
        self.requests = self.weights = self.computed = 0

    def save(self, sequence: Sequence) -> None:
        sequence.tokens = [sequence.sample_index] * self.sampled[id(sequence)]

    def submit(self, prompt: int, samples: int, new: int, kind: int | None = None) -> None:
        self.ask([self.requests + 1 if kind is None else kind] * prompt, samples, new)

    def goes_on(self, which: int, more: int, samples: int, new: int) -> None:
        """The next turn of a sample that has finished."""
        if self.finished:
            last = self.finished[which % len(self.finished)]
            self.ask([*last.request.prompt_ids, *last.tokens, *[7] * more], samples, new)

    def ask(self, prompt: list[int], samples: int, new: int) -> None:
        room = self.pool.num_blocks * BLOCK
        prompt = prompt[: room - 1]
        params = SamplingParams(max_new_tokens=min(new, room - len(prompt)))
        self.requests += 1
        request = Request(str(self.requests), prompt, params)
        labels = range(1000 * self.requests, 1000 * self.requests + samples)
        members = [Sequence(request, label, math.inf) for label in labels]
        self.sampled |= {id(m): 0 for m in members}
        self.alive += members
        self.scheduler.submit(members[0].prompt, members)

    def step(self) -> None:
        """One pass: move, write what the pass computes, share tails, and let full-grown samples finish."""
        scheduler = self.scheduler
        batch = scheduler.schedule()
        if batch.moves:
            source, target = map(list, zip(*batch.moves, strict=True))
            self.memory[target] = self.memory[source]
        self.check()
        for sequence in scheduler.running:
            position = int(scheduler.lengths[sequence.slot])
            assert self.pool.owners[self._block(sequence, position)] == 1
            self._write(sequence, position, sequence.sample_index)
        for prefill, start, length in batch.chunks:
            first = prefill.members[0]
            self.computed += length
            for position in range(start, start + length):
                full = position < prefill.ids.size // BLOCK * BLOCK
                assert full or self.pool.owners[self._block(first, position)] == 1
                self._write(first, position, prefill.ids[position])
        for prefill in batch.starting:
            tails = [scheduler.blocks_of(m)[-1] for m in prefill.members]
            if prefill.ids.size % BLOCK:
                for tail in tails[1:]:
                    self.memory[tail] = self.memory[tails[0]]
        scheduler.advance(batch)
        for sequence in scheduler.running:
            self.sampled[id(sequence)] += 1
        self.check_contents()
        done = [s for s in scheduler.running if self.sampled[id(s)] >= s.request.params.max_new_tokens]
        for sequence in done:
            self.save(sequence)
        self.finished += done
        scheduler.finish(done)
        self.check()
        self.check_contents()

    def abort(self, which: int) -> None:
        for sequence in self.scheduler.running:
            self.save(sequence)
        self.scheduler.withdraw(lambda s: s.sample_index % 7 == which % 7)
        self.check()

    def new_weights(self, recompute: bool) -> None:
        if recompute:
            self.scheduler.preempt_all()
        self.scheduler.forget()
        self.weights += 1
        assert not self.pool.num_kept
        self.check()

    def _block(self, sequence: Sequence, position: int) -> int:
        return int(self.scheduler.blocks_of(sequence)[position // BLOCK])

    def _write(self, sequence: Sequence, position: int, token: int) -> None:
        self.memory[self._block(sequence, position), position % BLOCK] = (token, position, self.weights)

    def check(self) -> None:
        scheduler = self.scheduler
        holders = [*scheduler.running, *(m for p in scheduler.prefilling for m in p.members)]
        assert len({s.slot for s in holders}) == len(holders)
        assert all(s.slot == -1 for p in scheduler.waiting for s in p.members)
        held = Counter(int(b) for s in holders for b in scheduler.blocks_of(s))
        owners = {b: int(n) for b, n in enumerate(self.pool.owners) if n}
        assert owners == dict(held)
        assert self.pool.num_free == self.pool.num_blocks - len(held)
        kept = set(self.pool._kept)
        assert not kept & held.keys()
        assert all(block in scheduler.known for block in kept)
        for sequence in holders:  # a block is read in place by one row at most
            tables = scheduler.blocks_of(sequence)[scheduler.num_shared[sequence.slot] :]
            for other in holders:
                own = scheduler.blocks_of(other)[scheduler.num_shared[other.slot] :]
                assert other is sequence or not set(tables.tolist()) & set(own.tolist())

    def check_contents(self) -> None:
        """Running samples find their tokens, by the weights of now if they began under these; and so would whoever comes."""
        scheduler, known = self.scheduler, self.scheduler.known
        for sequence in scheduler.running:
            blocks, length = scheduler.blocks_of(sequence), int(scheduler.lengths[sequence.slot])
            read = self.memory[blocks].reshape(-1, 3)[:length]
            prompt = sequence.request.prompt_ids
            expected = [*prompt, *[sequence.sample_index] * (length - len(prompt))]
            assert read[:, 0].tolist() == expected
            assert read[:, 1].tolist() == list(range(length))
            if sequence.era == scheduler._era:
                assert (read[:, 2] == self.weights).all()
            assert length <= len(blocks) * BLOCK
        for block, (_, tokens) in known._names.items():
            held = np.frombuffer(tokens, np.int64)
            assert self.memory[block, : held.size, 0].tolist() == held.tolist()
            assert (self.memory[block, : held.size, 2] == self.weights).all()


actions = st.one_of(
    st.tuples(
        st.just("submit"),
        st.integers(1, 30),
        st.integers(1, 9),
        st.integers(1, 20),
        st.sampled_from([None, None, 1, 2]),
    ),
    st.tuples(st.just("goes_on"), st.integers(0, 50), st.integers(0, 6), st.integers(1, 3), st.integers(1, 12)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 6)),
    st.tuples(st.just("new_weights"), st.booleans()),
)


@settings(max_examples=300, deadline=None)
@given(
    blocks=st.integers(2, 40),
    slots=st.integers(1, 12),
    budget=st.integers(1, 40),
    closes_gaps=st.booleans(),
    script=st.lists(actions, max_size=25),
)
def test_every_block_is_accounted_for(
    blocks: int, slots: int, budget: int, closes_gaps: bool, script: list[tuple]
) -> None:
    simulation = Simulation(blocks, slots, budget, closes_gaps)
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
    simulation.scheduler.forget()
    assert simulation.pool._empty == blocks
    assert len(simulation.scheduler.known) == len(simulation.scheduler.known._tails) == 0


def run_out(simulation: Simulation) -> int:
    """Prompt tokens that are computed until all is done."""
    before = simulation.computed
    while not simulation.scheduler.idle:
        simulation.step()
    return simulation.computed - before


@pytest.mark.parametrize("closes_gaps", [True, False])
def test_the_next_turn_computes_only_what_is_new(closes_gaps: bool) -> None:
    simulation = Simulation(blocks=100, slots=8, budget=64, closes_gaps=closes_gaps)
    for kind in range(5):
        simulation.submit(prompt=4 + kind, samples=1, new=10 + kind, kind=kind)
    assert run_out(simulation) == sum(4 + kind for kind in range(5))
    for turn in range(3):
        for which in range(5):
            simulation.goes_on(5 * turn + which, more=3, samples=1, new=6)
        # The last token that a sample wrote was never run through the model.
        assert run_out(simulation) == 5 * (1 + 3)


def test_prompts_that_come_together_are_computed_once_and_later_only_behind_their_last_full_block() -> None:
    simulation = Simulation(blocks=100, slots=16, budget=64)
    for _ in range(6):
        simulation.submit(prompt=14, samples=1, new=3, kind=5)
    assert run_out(simulation) == 14
    simulation.submit(prompt=14, samples=4, new=3, kind=5)
    assert run_out(simulation) == 14 - 12
    simulation.submit(prompt=21, samples=1, new=3, kind=5)
    simulation.submit(prompt=30, samples=1, new=3, kind=5)  # begins with blocks that the one beside it computes
    assert run_out(simulation) == 21 - 12 + 30 - 20


def test_what_is_kept_is_given_up_before_anybody_is_preempted_and_the_oldest_first() -> None:
    simulation = Simulation(blocks=20, slots=8, budget=64)
    for kind in (1, 2, 3):
        simulation.submit(prompt=16, samples=1, new=4, kind=kind)
        run_out(simulation)
    assert simulation.pool.num_kept == 15
    simulation.submit(prompt=32, samples=1, new=4, kind=4)  # needs nine: five are empty, and the end of the first goes
    assert run_out(simulation) == 32
    assert simulation.scheduler.preemptions == 0
    simulation.goes_on(0, more=2, samples=1, new=1)
    assert run_out(simulation) == 22 - 4  # its first block would have been the last to go
    simulation.goes_on(2, more=2, samples=1, new=1)
    assert run_out(simulation) == 3


def test_new_weights_leave_nothing_known() -> None:
    simulation = Simulation(blocks=40, slots=8, budget=64)
    simulation.submit(prompt=9, samples=1, new=4, kind=1)
    run_out(simulation)
    simulation.submit(prompt=9, samples=1, new=9, kind=2)
    simulation.step()
    simulation.new_weights(recompute=False)
    simulation.goes_on(0, more=1, samples=1, new=1)
    assert run_out(simulation) == 14
    simulation.goes_on(-1, more=1, samples=1, new=1)  # it was in the middle: part of it is by the old weights
    assert simulation.finished[-1].request.request_id == "2"
    assert run_out(simulation) == 19


def test_a_full_cache_preempts_the_last_to_come_and_all_finish() -> None:
    simulation = Simulation(blocks=8, slots=8, budget=64)
    for _ in range(4):
        simulation.submit(prompt=4, samples=1, new=20)
    for _ in range(500):
        if simulation.scheduler.idle:
            break
        simulation.step()
    assert simulation.scheduler.idle
    assert simulation.scheduler.preemptions > 0
    assert simulation.finished[0].request.request_id == "1"
    assert len(simulation.finished) == 4


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


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(["low", "high", "release"]), max_size=200), st.integers(1, 12), st.randoms())
def test_blocks_come_from_the_end_that_was_asked_for_and_their_list_does_not_grow(events, blocks, random):
    pool, held = BlockPool(blocks), set()
    for event in events:
        if event == "release" and held:
            block = random.choice(sorted(held))
            pool.release([block])
            held.remove(block)
        elif event != "release" and pool.num_free:
            free = set(range(blocks)) - held
            block = pool.take(from_high_end=event == "high")
            assert block == (max(free) if event == "high" else min(free))
            held.add(block)
    assert pool.num_free == blocks - len(held)
    assert len(pool._low) <= blocks
    assert len(pool._high) <= blocks
