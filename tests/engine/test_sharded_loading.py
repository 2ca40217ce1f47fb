"""Ranks read their parts of a model from its files: the same weights as ever, and nobody ever holds the whole model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from load_job import LARGE_BYTES

HERE = Path(__file__).parent
MODELS = ["tied", "untied", "experts", "frozen", "adapter", "critic", "scorer"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of load_job.py by number of ranks."""
    folder = tmp_path_factory.mktemp("models")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, HERE / "load_job.py", folder], env=environment, capture_output=True, text=True, timeout=170
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return {world: torch.load(folder / str(world)) for world in (1, 2, 4)}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_shards_that_are_read_are_those_of_a_model_that_was_loaded_whole(results, model, world):
    ours, expected = results[world]["weights"][model], results[1]["weights"][model]
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
    assert any(weight.abs().max() > 0 for weight in expected.values())


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_everything_else_is_the_same_too(results, model, world):
    ours, expected = results[world]["state"][model], results[1]["state"][model]
    for fact in ("trained", "training", "config"):
        assert ours[fact] == expected[fact], fact
    assert ours["buffers"].keys() == expected["buffers"].keys()
    assert all(torch.equal(ours["buffers"][name], expected["buffers"][name]) for name in expected["buffers"])
    if model in ("adapter", "frozen", "scorer"):
        assert all("lora_" in name for name in ours["trained"])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_weight_that_only_one_rank_reads_stops_all_of_them(results, world):
    for (not_finite, tied), _ in results[world]["ranks"]:
        assert "model.norm.weight has 1 of" in not_finite
        assert "tie_word_embeddings: true, but its weights hold an output head that differs" in tied


def test_no_rank_ever_holds_the_whole_model(results):
    if not Path("/proc/self/statm").exists():
        pytest.skip("the memory of a process can only be told on Linux")
    ((_, whole),) = results[1]["ranks"]
    assert whole > 0.9 * LARGE_BYTES
    for _, grown in results[4]["ranks"]:
        assert grown < 0.45 * LARGE_BYTES, "a quarter in float32, and a weight at work"
