from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "training_engine.md"


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert names["old"].shape == (8, 10)
    assert names["metrics"]["actor/ppo_kl"] == 0
    assert names["metrics"]["skipped"] == 0
