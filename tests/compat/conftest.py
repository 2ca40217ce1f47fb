"""Command lines that verl's own example scripts end in, where the shared data are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def commands(shared_dir: Path) -> list[dict[str, Any]]:
    """`{script, version, in_scope, overrides}` of each recorded command line."""
    file = shared_dir / "data" / "verl-commands" / "commands.jsonl"
    if not file.is_file():
        pytest.skip(f"needs the recorded command lines in {file}")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
