"""The table of families on the GPU page is the one that the code gives."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_of_families_is_what_the_program_prints() -> None:
    spec = importlib.util.spec_from_file_location("families", ROOT / "bench" / "families.py")
    assert spec is not None
    assert spec.loader is not None
    families = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(families)
    assert families.table() in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8"), "run python bench/families.py"
