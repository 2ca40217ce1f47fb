"""Ranks that split their sequences, or keep copies of the weights, take the same step as one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_cases import tiny_policy
from sequence_job import LAYOUTS

from quadriga.config.parallel import heads_problem
from quadriga.engine import TrainingEngine
from quadriga.errors import ConfigError

HERE = Path(__file__).parent
CASES = [
    "policy",
    "small micro-batches",
    "shared prompts",
    "checkpointing",
    "windows and capped scores",
    "critic",
    "budgets that differ",
    "experts",
    "experts, evened",
    "scores",
]
EVENED = "experts, evened"
"""An auxiliary loss depends on which tokens are in a micro-batch together: on which rows a set of ranks has."""
PAIRS = [
    (case, layout)
    for case in CASES
    for layout in LAYOUTS
    if layout[0] > 1 and (case != EVENED or layout[0] == layout[1])
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of sequence_job.py by layout."""
    folder = tmp_path_factory.mktemp("layouts")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, HERE / "sequence_job.py", folder]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    return {layout: torch.load(folder / "-".join(map(str, layout))) for layout in LAYOUTS}


@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_gradients_are_those_of_one_rank(results, case, layout):
    ours, expected = results[layout][case]["gradients"], results[1, 1, -1][case]["gradients"]
    assert ours.keys() == expected.keys()
    for name in expected:
        assert (ours[name] - expected[name]).abs().max() <= 1e-6, name
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-3, "else there is nothing to compare"


@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_metrics_are_those_of_one_rank(results, case, layout):
    ours, expected = results[layout][case]["metrics"], results[1, 1, -1][case]["metrics"]
    same_rows_together = layout[0] == layout[1]
    for name in expected.keys() - {"micro_batches", "token_budget"}:
        if name.startswith("router") and not same_rows_together:
            continue
        assert ours[name] == pytest.approx(expected[name], abs=2e-6), name


@pytest.mark.parametrize(("case", "layout"), [pair for pair in PAIRS if pair[0] != "scores"])
def test_log_probs_and_values_are_those_of_one_rank(results, case, layout):
    torch.testing.assert_close(results[layout][case]["tokens"], results[1, 1, -1][case]["tokens"], atol=1e-5, rtol=1e-5)


def test_ranks_that_share_a_sequence_share_its_token_budget(results):
    """Half the budget each for two that share: as many micro-batches as one rank with all of it."""
    for layout in ((1, 1, -1), (2, 2, -1), (4, 4, -1)):
        assert results[layout]["small micro-batches"]["metrics"]["micro_batches"] == pytest.approx(
            results[1, 1, -1]["small micro-batches"]["metrics"]["micro_batches"]
        )


@pytest.mark.parametrize(
    ("size", "heads", "key_heads", "valid"),
    [(3, 4, 2, "2 or 4"), (8, 4, 2, "4"), (6, 12, 4, "4 or 12"), (7, 28, 4, "4 or 28")],
)
def test_heads_that_cannot_be_shared_name_the_nearest_size(size, heads, key_heads, valid):
    what, fix = heads_problem(size, heads, key_heads)
    assert f"{heads} attention heads" in what
    assert fix == f"set it to {valid}"
    assert all(heads_problem(int(s), heads, key_heads) is None for s in valid.split(" or "))


def test_one_rank_has_nobody_to_share_with():
    with pytest.raises(ConfigError, match="does not divide 1 workers"):
        TrainingEngine(tiny_policy(), sequence_parallel=2)
