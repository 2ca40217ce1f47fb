"""How much of what episodes had computed before was found again."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from quadriga.rollout.interface import Request
from quadriga.rollout.service import Sample

REMEMBERED = 8192
"""Episodes whose last context is remembered, the latest."""


class ReuseMeter:
    """Compares the prompt of each later call of an episode with what its call before had run through the model.

    That is prompt and response without its last token, which nobody has run yet. What of it the new prompt begins with could come
    from a cache; an engine says in `Sample.cached_tokens` how much did. An engine that was new to the episode, was given other
    weights since, or had no memory for it, computes it again.
    """

    def __init__(self) -> None:
        self._computed: OrderedDict[str, tuple[str, np.ndarray]] = OrderedDict()
        """Affinity → the request that was answered last, and the tokens it has run."""
        self._known = self._taken = 0

    def note(self, request: Request, sample: Sample) -> None:
        """Take account of a finished sample; of several of one request the first counts."""
        if request.affinity is None:
            return
        last, before = self._computed.pop(request.affinity, ("", np.zeros(0, np.int32)))
        prompt = np.array(request.prompt_ids, np.int32)
        if last != request.request_id:
            if request.call:
                length = min(before.size, prompt.size - 1)
                differs = np.flatnonzero(before[:length] != prompt[:length])
                known = int(differs[0]) if differs.size else length
                self._known += known
                self._taken += min(known, sample.cached_tokens)
            last, before = request.request_id, np.concatenate([prompt, sample.token_ids[:-1]])
        self._computed[request.affinity] = last, before
        if len(self._computed) > REMEMBERED:
            self._computed.popitem(last=False)

    def figures(self) -> dict[str, float]:
        """`rollout/prefix_reuse` since the last time; nothing where no episode had a second call."""
        known, taken, self._known, self._taken = self._known, self._taken, 0, 0
        return {"rollout/prefix_reuse": taken / known} if known else {}
