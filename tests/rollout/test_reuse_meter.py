"""How much of what an episode had computed came from the cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from quadriga.rollout.interface import Request
from quadriga.rollout.reuse import ReuseMeter
from quadriga.rollout.service import Sample


def answered(meter: ReuseMeter, prompt: list[int], wrote: list[int], cached: int = 0, **more: Any) -> None:
    request = Request(**{"request_id": f"{len(prompt)}", "prompt_ids": prompt, "affinity": "e"} | more)
    zeros = np.zeros(len(wrote), np.float32)
    sample = Sample(request.request_id, 0, np.array(wrote, np.int32), zeros, zeros, "stop", ((0, len(wrote)),), cached)
    meter.note(request, sample)


def test_the_share_is_that_of_the_tokens_which_the_call_before_had_run() -> None:
    meter = ReuseMeter()
    answered(meter, [1, 2, 3], [4, 5])
    assert meter.figures() == {}
    answered(meter, [1, 2, 3, 4, 5, 9], [6], cached=4, call=1)
    assert meter.figures() == {"rollout/prefix_reuse": 1.0}  # the last token that it wrote had not been run
    answered(meter, [1, 2, 3, 4, 5, 9, 6, 7], [8], cached=3, call=2)
    assert meter.figures() == {"rollout/prefix_reuse": 3 / 6}
    assert meter.figures() == {}


def test_a_context_that_was_written_anew_counts_up_to_the_change_and_other_episodes_do_not_count() -> None:
    meter = ReuseMeter()
    answered(meter, [1, 2, 3], [4, 5])
    answered(meter, [1, 2, 8, 8, 8, 8], [6], cached=2, call=1)
    assert meter.figures() == {"rollout/prefix_reuse": 1.0}
    answered(meter, [5, 5, 5], [6], cached=2, call=1, affinity="other")
    answered(meter, [5, 5, 5, 5], [6], cached=2, call=1, affinity=None)
    assert meter.figures() == {}


def test_of_several_samples_of_a_request_the_first_counts() -> None:
    meter = ReuseMeter()
    answered(meter, [1, 2, 3], [4, 5], request_id="a")
    answered(meter, [1, 2, 3], [7, 7], request_id="a")
    for _ in range(3):
        answered(meter, [1, 2, 3, 4, 5], [6], cached=4, request_id="b", call=1)
    assert meter.figures() == {"rollout/prefix_reuse": 1.0}
