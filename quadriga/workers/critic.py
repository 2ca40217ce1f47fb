"""The value model in a slot."""

from __future__ import annotations

from quadriga.workers.base import RunWorker


class CriticWorker(RunWorker):
    """The value model in a slot."""
