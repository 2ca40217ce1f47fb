"""docs/rewards.md: its examples run, and it names what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from quadriga.rewards import RewardPool, RewardSample, metrics, scorers
from quadriga.rewards.result import RewardResult

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_example_function_works_in_a_pool(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(EXAMPLES[0])
    with RewardPool(f"{tmp_path}/my.py:compute_score") as pool:
        result = pool.score_all([RewardSample("any", "it is 5", 5)])[0]
    assert (result.score, result.extra) == (1.0, {"length": 7})


def test_the_example_with_a_column_works_in_a_pool(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(EXAMPLES[1])
    with RewardPool(f"{tmp_path}/my.py:compute_score") as pool:
        assert pool.score_all([RewardSample("custom", "it is 5", None, {"answer": 5})])[0].score == 1.0


def test_the_example_of_a_manager_changes_scores() -> None:
    space: dict[str, Any] = {}
    exec(EXAMPLES[3], space)
    manager = space["BriefRewardManager"](None, 0)
    assert manager.adjust(RewardResult(1.0, "correct"), 100).score == pytest.approx(0.9)


def test_the_example_of_the_pool_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(EXAMPLES[2], {})
    assert sorted(capsys.readouterr().out.splitlines()) == ["0.0 unparsed", "0.5", "1.0 correct"]


def test_sources_scorers_and_metrics_on_the_page_exist() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (`[^|]*`)", PAGE.partition("## The pool")[0], flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(scorers._BUILT_IN)
    for name, sources in rows:
        for source in re.findall(r"`([^`]+)`", sources):
            assert scorers.target_of(source) == scorers._BUILT_IN[name][0]
    for metric in metrics([RewardResult(1.0, "correct")]):
        assert f"`{metric}`" in PAGE
