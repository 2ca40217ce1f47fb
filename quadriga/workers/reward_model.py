"""The reward model in a slot."""

from __future__ import annotations

from quadriga.workers.base import RunWorker


class RewardModelWorker(RunWorker):
    """The reward model in a slot."""
