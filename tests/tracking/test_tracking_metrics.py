from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np

from quadriga.tracking import metric_names
from quadriga.tracking.figures import plain_metrics
from quadriga.tracking.metric_names import DOCS_PAGE, METRICS, describe, format_value, is_known, render_page

PACKAGE = Path(metric_names.__file__).parents[1]
FIRST_PARTS = sorted({name.partition("/")[0] for name in METRICS})
METRIC_LITERAL = re.compile(rf"""["']((?:{"|".join(FIRST_PARTS)})/[\w/@]+)["']""")


def test_documentation_page_is_the_table() -> None:
    assert DOCS_PAGE.read_text(encoding="utf-8") == render_page(), (
        "write it anew: python -m quadriga.tracking.metric_names --write"
    )


def test_every_metric_that_the_package_names_is_listed() -> None:
    named = {
        (name, path.relative_to(PACKAGE).as_posix())
        for path in PACKAGE.rglob("*.py")
        if path.name != "metric_names.py" and "compat" not in path.parts  # there they are names of others
        for name in METRIC_LITERAL.findall(path.read_text(encoding="utf-8"))
    }
    assert ("actor/ppo_kl", "algorithms/policy_losses.py") in named
    families = {name.rpartition("/")[0] for name in METRICS}  # "critic/score" of f"critic/score/{which}"
    unlisted = sorted(f"{name} in {where}" for name, where in named if not is_known(name) and name not in families)
    assert unlisted == [], "add them to quadriga/tracking/metric_names.py and write docs/metrics.md anew"


def test_names_with_placeholders_match_whatever_stands_there() -> None:
    assert describe("val/openai/gsm8k/acc/mean@4") is METRICS["val/<data_source>/acc/mean@<n>"]
    assert describe("val/arithmetic/acc/maj@16") is METRICS["val/<data_source>/acc/maj@<n>"]
    assert describe("reward/extra/format") is METRICS["reward/extra/<key>"]
    assert not is_known("val/acc/mean@")


def test_every_metric_has_a_meaning_a_unit_and_a_format_that_works() -> None:
    for name, metric in METRICS.items():
        assert metric.meaning, name
        assert metric.unit, name
        assert format_value(name, 0.125), name


def test_metrics_named_by_the_rewards_and_losses_are_listed() -> None:
    from quadriga.rewards.result import OUTCOMES, RewardResult, metrics

    results = [RewardResult(score=1.0, outcome=outcome, seconds=0.1, extra={"format": 1}) for outcome in OUTCOMES]
    assert [name for name in metrics(results) if not is_known(name)] == []


def test_a_metric_of_the_user_is_allowed_and_printed_plainly() -> None:
    assert not is_known("mine/curiosity")
    assert format_value("mine/curiosity", 0.123456) == "0.1235"
    assert describe("val/arithmetic/acc/mean@8").format == ".1%"
    assert format_value("reward/correct", None) == "–"


def test_numbers_of_numpy_and_torch_become_plain_ones() -> None:
    import torch

    values, problems = plain_metrics({"a": np.float32(0.5), "b": torch.tensor(3), "c": True, "d": np.int64(7), "e": 2})
    assert values == {"a": 0.5, "b": 3, "c": 1.0, "d": 7, "e": 2}
    assert {type(value) for value in values.values()} <= {int, float}
    assert problems == {}


def test_what_is_not_a_finite_number_becomes_null_and_is_named() -> None:
    values, problems = plain_metrics(
        {
            "nan": float("nan"),
            "inf": np.float64("-inf"),
            "text": "high",
            "list": [1, 2],
            "array": np.zeros(3),
            "none": None,
        }
    )
    assert set(values.values()) == {None}
    assert problems["nan"] == "nan"
    assert problems["inf"] == "-inf"
    assert "str" in problems["text"]
    assert set(problems) == set(values)


def test_every_metric_that_is_listed_is_named_by_the_package() -> None:
    """Each fixed part of a name stands in some text or argument of the package, or nobody could record it."""
    words: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name != "metric_names.py" and "compat" not in path.parts:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    words.update(re.split(r"[/@]", node.value))
                elif isinstance(node, (ast.keyword, ast.arg)) and node.arg:
                    words.add(node.arg)
    ghosts = [name for name in METRICS if not set(re.split(r"[/@]", re.sub(r"<\w+>", "", name))) - {""} <= words]
    assert ghosts == []
