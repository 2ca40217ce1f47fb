"""Workers called one by one: a death is the dead one's alone, and a new process takes its slot."""

from __future__ import annotations

import pytest
from example_workers import Plain

from quadriga.controller import RayClassWithInitArgs, RayWorkerGroup
from quadriga.controller.calls import WorkersDied
from quadriga.controller.members import create_colocated_worker_cls
from quadriga.controller.single_calls import SingleCalls
from quadriga.errors import WorkerError


def all_answers(calls: SingleCalls, count: int) -> dict:
    answers: dict = {}
    while len(answers) < count:
        answers |= calls.answers()
    return answers


def test_one_dies_the_other_goes_on_and_a_new_one_takes_its_place(pool_of):
    host = RayWorkerGroup(pool_of([2]), create_colocated_worker_cls({"plain": RayClassWithInitArgs(Plain, offset=7)}))
    group = host.spawn(["plain"])["plain"]
    pids, calls = group.pid(), SingleCalls(group)
    calls.start(0, "echo", "here")
    calls.start(1, "kill_self", 1)
    answers = all_answers(calls, 2)
    assert answers[0] == "here"
    assert isinstance(answers[1], WorkersDied)
    assert f"plain rank 1 of 2 (node {group.seats[1].node_ip}, pid {pids[1]}) died during kill_self" in str(answers[1])
    group.replace([1])
    assert group.whoami() == [(0, 2, 7), (1, 2, 7)], "the same rank, made with the same arguments"
    now = group.pid()
    assert now[0] == pids[0]
    assert now[1] != pids[1]
    assert [seat.pid for seat in group.seats] == now
    assert [environment["RANK"] for environment in group.environment("RANK")] == ["0", "1"]


def test_a_worker_that_does_not_answer_in_time_counts_as_dead(pool_of):
    group = RayWorkerGroup(pool_of([2]), RayClassWithInitArgs(Plain), call_timeout_s=2.0)
    group.wait_ready()
    calls = SingleCalls(group)
    calls.start(0, "echo", "here")
    calls.start(1, "sleep_for_ever")
    answers = all_answers(calls, 2)
    assert answers[0] == "here"
    assert isinstance(answers[1], WorkersDied)
    assert "no answer to sleep_for_ever within 2 s" in str(answers[1])


def test_those_that_have_not_answered_can_be_ended(pool_of):
    group = RayWorkerGroup(pool_of([1]), RayClassWithInitArgs(Plain))
    group.wait_ready()
    calls = SingleCalls(group)
    assert not calls.stop(), "there are none"
    calls.start(0, "sleep_for_ever")
    assert calls.stop()
    assert isinstance(calls.answers()[0], WorkersDied)


def test_what_a_worker_raises_is_raised(pool_of):
    calls = SingleCalls(RayWorkerGroup(pool_of([1]), RayClassWithInitArgs(Plain)))
    calls.start(0, "raise_on", 0)
    with pytest.raises(WorkerError, match="no such thing"):
        calls.answers()
