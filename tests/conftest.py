"""Fixtures used by the whole suite."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

# Set before torch or ray start anywhere in the suite: deterministic, quiet, and no telemetry.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell that starts the suite in the background has it ignore Ctrl-C; the programs it starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder `shared/` that lies beside the checkout; tests that need its data skip where it is absent."""
    folder = REPO.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs the shared/ folder beside the checkout (public datasets, seeds); it is not here")
    return folder


@pytest.fixture
def chance() -> random.Random:
    """Random numbers of a test that injects faults. Their seed is shown when it fails; the variable repeats them."""
    seed = int(os.environ.get("QUADRIGA_TEST_SEED", time.time_ns() % 1_000_000))
    print(f"\nQUADRIGA_TEST_SEED={seed} repeats this test")
    return random.Random(seed)
