"""Every key of the schemas: somebody reads it, and its numbers have bounds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import quadriga
from quadriga.config import Config
from quadriga.config.fields import LARGEST, KeySpec
from quadriga.config.supervised_schema import SCHEMAS
from quadriga.config.typed import Key, all_keys

PACKAGE = Path(quadriga.__file__).parent
ABOUT_KEYS = ("config", "compat")
"""Rooms that speak of keys without doing what they say."""
DECIDES = ("needs.py", "placement.py", "rollout_correction.py", "distillation.py")
"""Files of `config` that others ask what a key means."""


@cache
def words_of_the_package() -> frozenset[str]:
    """Every attribute, argument and text in the rooms that do something."""
    words: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        if file.relative_to(PACKAGE).parts[0] not in ABOUT_KEYS or file.name in DECIDES:
            words.update(_words(ast.parse(file.read_text(encoding="utf-8"))))
    return frozenset(words)


def _words(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
            yield node.value.rpartition(".")[2]
        elif (isinstance(node, ast.keyword) and node.arg) or isinstance(node, ast.arg):
            yield node.arg


def keys() -> list[tuple[type, str]]:
    return [(schema, path) for schema in (Config, *SCHEMAS.values()) for path in all_keys(schema)]


def test_every_key_is_read_by_somebody() -> None:
    """Sections of one estimator or loss reach it as arguments whose names begin with the section's."""
    words = words_of_the_package()
    ghosts = {path for _, path in keys() if not {path.split(".")[-1], "_".join(path.split(".")[-2:])} & words}
    assert ghosts == set()


@pytest.mark.parametrize("schema", [Config, *SCHEMAS.values()])
def test_no_number_may_be_absurdly_large_or_a_divisor_absurdly_small(schema: type) -> None:
    """A weight of 1e-30 is none at all, which is fine; a deadline, a clip range or a divisor of it is not."""
    for path, known in all_keys(schema).items():
        if not any(kind in str(known.hint) for kind in ("int", "float")) or known.spec.choices:
            continue
        assert refused(known, path, 1e30), path
        assert refused(known, path, -1e30), path
        allows_none_at_all = known.spec.at_least is not None and known.spec.at_least <= 0
        means_a_level = known.spec.at_least is None and known.spec.above is None
        may_be_a_word = "str" in str(known.hint)  # the combination is judged elsewhere
        assert refused(known, path, 1e-30) or allows_none_at_all or means_a_level or may_be_a_word, path


def refused(known: Key, path: str, value: float) -> bool:
    try:
        known.typed(path, [value] if "list" in str(known.hint) else value)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("reward.num_workers", LARGEST),
        ("actor_rollout_ref.rollout.n", 10**12),
        ("data.train_batch_size", 10**15),
        ("actor_rollout_ref.rollout.max_num_seqs", 10**12),
        ("data.seed", 2**70),
        ("actor_rollout_ref.rollout.seed", 2**70),
        ("controller.call_timeout_s", 1e-9),
        ("trainer.watchdog.soft_s", 1e-9),
        ("trainer.nnodes", 10**6),
        ("actor_rollout_ref.rollout.temperature", 1e-30),
    ],
)
def test_values_that_once_broke_something_later_are_refused(load, problem, path: str, value: float) -> None:
    assert path in problem({path: value})


def test_a_seed_of_63_bits_is_fine(load) -> None:
    load({"data.seed": 2**63 - 1, "actor_rollout_ref.rollout.seed": 2**63 - 1})
    assert KeySpec("").at_most is None, "the general bound is applied where values are checked"
