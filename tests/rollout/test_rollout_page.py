"""The example of docs/rollout.md runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "rollout.md"


def test_the_pages_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    from quadriga.config.schema_models import ModelConfig
    from quadriga.models.load import load_policy, load_tokenizer

    names: dict[str, Any] = {
        "model": load_policy(ModelConfig("builtin:arithmetic")).huggingface,
        "tokenizer": load_tokenizer("builtin:arithmetic"),
    }
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(example.replace("Two and two is", "2+2="), names)
    assert len(capsys.readouterr().out.splitlines()) >= 4
