"""The fault tests use the tiny model of the trainer tests; a test that fails or hangs leaves nothing to its neighbours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from mortal_workers import free_slots
from tiny_policy import write_task
from user_run import end_all_runs


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """Model, prompts and reward of a run whose steps take a fraction of a second."""
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    end_all_runs()
    free_slots()
