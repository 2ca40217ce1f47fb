"""One, two and four processes must take the same step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from engine_cases import tiny_causal_lm

HERE = Path(__file__).parent
CASES = ["policy", "policy, uneven rows", "policy, weights kept", "critic"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of rank_job.py by world size."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, HERE / "rank_job.py", folder]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert run.returncode == 0, run.stderr[-3000:]
    return {world: torch.load(folder / str(world)) for world in (1, 2, 4)}


def assert_close(ours, expected, tolerance):
    assert ours.keys() == expected.keys()
    for name in expected:
        assert ours[name].shape == expected[name].shape
        assert (ours[name] - expected[name]).abs().max() <= tolerance, name


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_gradients_do_not_depend_on_the_number_of_ranks(results, case, world):
    assert_close(results[world][case]["gradients"], results[1][case]["gradients"], 1e-6)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_metrics_are_those_of_the_whole_mini_batch(results, case, world):
    ours, expected = results[world][case]["metrics"], results[1][case]["metrics"]
    for name in expected.keys() - {"micro_batches"}:
        assert ours[name] == pytest.approx(expected[name], abs=2e-6), name


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_log_probs_and_values_do_not_depend_on_the_number_of_ranks(results, case, world):
    torch.testing.assert_close(results[world][case]["tokens"], results[1][case]["tokens"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", ["clip_cov", "kl_cov", "reinforce"])
def test_what_is_chosen_from_the_whole_mini_batch_does_not_depend_on_the_number_of_ranks(results, case, world):
    ours, expected = results[world][case], results[1][case]
    assert_close(ours["gradients"], expected["gradients"], 1e-6)
    for name in expected["metrics"].keys() - {"micro_batches"}:
        assert ours["metrics"][name] == pytest.approx(expected["metrics"][name], abs=2e-5, rel=1e-4), name
    figures = expected["metrics"]
    assert figures["distillation/loss_min"] < figures["distillation/loss"] < figures["distillation/loss_max"]
    assert 0 < figures["rollout_corr/masked_fraction" if case == "reinforce" else "actor/pg_clipfrac"] < 1


@pytest.mark.parametrize("world", [2, 4])
def test_the_norm_that_clips_is_that_of_the_whole_gradient(results, world):
    ours, expected = results[world], results[1]
    assert ours["clipped"]["grad_norm"] == pytest.approx(expected["clipped"]["grad_norm"], rel=1e-5)
    assert_close(ours["clipped gradients"], expected["clipped gradients"], 1e-6)
    total = sum(float(g.square().sum()) for g in ours["clipped gradients"].values()) ** 0.5
    assert total == pytest.approx(0.01, rel=1e-3)


def test_ranks_recompute_activations_all_or_none(results):
    assert results[1]["recomputes"] == [False]
    assert results[2]["recomputes"] == [True] * 2, "the smallest device decides for all"
    assert results[4]["recomputes"] == [True] * 4


@pytest.mark.parametrize("world", [1, 4])
def test_whole_weights_have_the_names_and_shapes_of_the_hugging_face_model(results, world):
    weights = results[world]["policy"]["weights"]
    model = transformers.AutoModelForCausalLM.from_config(tiny_causal_lm().config, attn_implementation="sdpa")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) == {"lm_head.weight"}, "tied to the embedding, so it comes once"
