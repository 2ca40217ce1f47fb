"""The fault tests use the tiny model of the trainer tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from tiny_policy import write_task


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """Model, prompts and reward of a run whose steps take a fraction of a second."""
    return write_task(tmp_path_factory.mktemp("task"))
