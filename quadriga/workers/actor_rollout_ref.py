"""The policy in a slot."""

from __future__ import annotations

from quadriga.workers.base import RunWorker


class ActorRolloutRefWorker(RunWorker):
    """The policy in a slot: it is trained (actor), it generates (rollout), and its frozen start is the reference (ref)."""
