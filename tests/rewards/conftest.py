"""Real pools, and a way to find every process that descends from one."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reward_samples import HOSTILE


@pytest.fixture
def hostile() -> str:
    """The reward function that does what the response says."""
    return f"{HOSTILE}:behave"


@pytest.fixture
def patience() -> float:
    """2 s, as promised, on a machine that has a free core; more where others compete for it."""
    return 2.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """Pids of all living processes started since, by whomever below us: they inherit a mark in their environment."""
    mark = f"QUADRIGA_TEST_MARK_{uuid.uuid4().hex}"
    monkeypatch.setenv(mark, "1")

    def find() -> list[int]:
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    # A zombie has an empty environment and is nobody's burden.
                    if mark.encode() in Path(f"/proc/{entry}/environ").read_bytes():
                        found.append(int(entry))
                except OSError:
                    continue
        return found

    yield find
    deadline = time.monotonic() + 5.0
    while find() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert find() == [], "processes outlived their pool"
