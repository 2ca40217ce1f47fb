"""What the processes of slots do before they have workers, in tests."""

from __future__ import annotations

import os


def note_threads() -> None:
    """Leave a trace that a worker can see, with the number of threads known at this time."""
    os.environ["PREPARED_WITH"] = os.environ["OMP_NUM_THREADS"]


def fail() -> None:
    raise ImportError("nothing like this is installed")
