"""Real processes that hold one model together, for tests of tensor parallel generation."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

from rollout_models import tiny_model

from quadriga.models.outline import outline
from quadriga.rollout.native.engine import NativeEngine
from quadriga.rollout.native.sharded import ShardedModel
from quadriga.rollout.rank_set import Meeting, RankSet, SetOpening


def in_a_set(
    size: int, work: Callable[..., Any], *arguments: Any, timeout_s: float = 300.0, device: str = "cpu"
) -> list[Any]:
    """`work(ranks, *arguments)` in `size` processes at the same time; their answers, or the first one's traceback raised.

    Args:
        device: where the model is; on an accelerator all processes share one device.
    """
    opening = SetOpening(timeout_s)
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    members = [
        context.Process(target=_member, args=(answers, rank, size, opening.meeting, timeout_s, device, work, arguments))
        for rank in range(size)
    ]
    for member in members:
        member.start()
    told: dict[int, Any] = {}
    try:
        while len(told) < size:
            rank, answer, problem = answers.get(timeout=timeout_s)
            if problem:
                raise AssertionError(f"rank {rank}:\n{problem}")
            told[rank] = answer
    finally:
        for member in members:
            member.join(5 if len(told) == size else 0.1)
            member.kill()
    return [told[rank] for rank in range(size)]


def _member(
    answers: Any,
    rank: int,
    size: int,
    meeting: Meeting,
    timeout_s: float,
    device: str,
    work: Callable[..., Any],
    arguments: Any,
) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        answers.put((rank, work(RankSet(rank, size, meeting, timeout_s, device, shared_device=True), *arguments), ""))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))


def sharded(family: str, ranks: RankSet, device: str = "cpu", **engine: Any) -> tuple[ShardedModel, NativeEngine]:
    """This member's part of a tiny model, with its weights, and an engine around it."""
    import torch

    whole = tiny_model(family)
    model = ShardedModel(outline(whole), ranks, device, torch.float32)
    made = NativeEngine(model.module, eos_token_ids=[7], max_num_seqs=8, max_model_len=96, block_size=8, **engine)
    made.update_weights(1, whole.to(device).named_parameters())
    return model, made


def plain(completions: Any) -> dict[tuple[str, int], Any]:
    """Completions by request and sample, as plain data."""
    return {(c.request_id, c.sample_index): (c.token_ids, c.full_log_probs, c.finish_reason) for c in completions}
