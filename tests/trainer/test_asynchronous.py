"""Generation ahead of training: exact in ordered mode, complete in free mode, and kept in checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from tiny_policy import write_task

from quadriga.config.load import load_config
from quadriga.config.needs import correction_of
from quadriga.errors import ConfigError, DataError
from quadriga.trainer.main_ppo import run_ppo
from quadriga.trainer.ppo.stream import Window

STEPS = 5
MEASURED = (
    "timing_s/",
    "perf/",
    "memory/",
    "reward/seconds",
    "stream/groups",
    "stream/samples",
    "stream/engines",
    "time",
)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    task = write_task(tmp_path_factory.mktemp("task"))

    def run(*changes: dict, folder: Path | None = None, steps: int = STEPS) -> Path:
        torch.set_num_threads(1)
        folder = folder or tmp_path_factory.mktemp("run")
        trainer = {"total_training_steps": steps, "test_freq": 2, "save_freq": 2, "default_local_dir": str(folder)}
        short = {"trainer": trainer, "actor_rollout_ref": {"rollout": {"n": 4}}, "algorithm": {"adv_estimator": "grpo"}}
        run_ppo(OmegaConf.merge(task, short, *changes))
        return folder

    return run


def ahead(staleness: int, mode: str = "ordered", **more: Any) -> dict:
    chosen = {"mode": mode} if staleness else {}
    return {"async_training": {"staleness": staleness, **chosen, **more}}


def untouched(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def metrics(run: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in untouched(run)]


def weights(run: Path, step: int = STEPS) -> dict:
    return load_file(run / "checkpoints" / f"global_step_{step}" / "huggingface" / "model.safetensors")


def samples(run: Path) -> list[dict]:
    files = sorted((run / "samples").glob("train_*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def assert_same(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    ours, theirs = weights(a), weights(b)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def ordered(train):
    """Undisturbed runs, by staleness."""
    return {k: train(ahead(k)) for k in (0, 1, 3)}


def test_samples_of_a_step_come_from_the_weights_exactly_so_many_steps_back(ordered):
    for k, run in ordered.items():
        lines = [line for line in metrics(run) if line["step"]]
        assert [line["stream/staleness/mean"] for line in lines] == [min(k, step) for step in range(STEPS)]
        assert [line["stream/staleness/max"] for line in lines] == [min(k, step) for step in range(STEPS)]


def test_prompts_come_in_the_order_of_the_dataset_whatever_runs_ahead(ordered):
    first, *others = [[s["uid"] for s in samples(run)] for run in ordered.values()]
    assert all(other == first for other in others)


def test_the_loss_compares_with_who_sampled_older_samples(ordered):
    """Its ratio is 1 where nothing is older, and the importance weight where something is; nothing is computed again."""
    assert all(line["actor/ppo_kl"] == 0 for line in metrics(ordered[0]) if line["step"])
    distance = [abs(line["actor/ppo_kl"]) for line in metrics(ordered[1]) if line["step"]]
    assert distance[0] < 1e-6 < min(distance[1:])
    assert not any("timing_s/old_log_prob" in line for line in untouched(ordered[1]))


def test_older_samples_are_weighted_where_the_loss_has_no_ratio(train):
    run = train(ahead(1), {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "gpg"}}}}, steps=3)
    assert all("rollout_corr/is_mean" in line for line in metrics(run) if line["step"])


@pytest.mark.parametrize(
    ("changes", "bypass", "weights"),
    [
        ({}, True, None),
        ({"rollout": {"top_p": 0.9}}, None, "token"),
        ({"rollout": {"name": "vllm"}}, None, "token"),
        ({"actor": {"policy_loss": {"loss_mode": "dro", "dro_beta": 0.1}}}, None, "token"),
    ],
)
def test_how_older_samples_are_corrected_unless_it_is_said(changes, bypass, weights):
    given = {"actor_rollout_ref": changes, "algorithm": {"adv_estimator": "grpo"}, "async_training": {"staleness": 1}}
    config = load_config(OmegaConf.merge({"actor_rollout_ref": {"rollout": {"n": 2}}}, given))
    assert (correction_of(config).bypass_mode, correction_of(config).rollout_is) == (bypass, weights)
    config.algorithm.rollout_correction.bypass_mode = False  # said: recomputed, and nothing else
    assert (correction_of(config).bypass_mode, correction_of(config).rollout_is) == (False, None)


def cut_off(run: Path, after: int, into: Path) -> Path:
    """What a run leaves that is killed when its checkpoint of step `after` is the newest."""
    shutil.copytree(run, into, symlinks=True)
    for checkpoint in (into / "checkpoints").glob("global_step_*"):
        if int(checkpoint.name.removeprefix("global_step_")) > after:
            shutil.rmtree(checkpoint)
    return into


@pytest.mark.parametrize("k", [1, 3])
def test_a_killed_run_goes_on_with_what_was_generated_ahead(train, ordered, tmp_path, k):
    folder = cut_off(ordered[k], 2, tmp_path / "run")
    kept = sorted(file.name for file in (folder / "checkpoints" / "global_step_2" / "window").iterdir())
    assert kept == [f"step_{step:08d}.dataproto" for step in range(3, min(STEPS, 3 + k) + 1)]
    train(ahead(k), {"trainer": {"resume_mode": "auto"}}, folder=folder)
    assert_same(folder, ordered[k])


@pytest.mark.parametrize("changes", [{}, {"partial_rollout": False}, {"partial_rollout_recompute": True}])
def test_free_mode_loses_no_group_and_uses_none_twice(train, changes):
    run = train(ahead(2, "free", **changes))
    uids = [s["uid"] for s in samples(run)]
    assert len(uids) == STEPS * 8 * 4
    assert all(uids.count(uid) == 4 for uid in uids)
    assert all(line["stream/staleness/max"] <= 4 for line in metrics(run))
    assert all(line["stream/groups_ready"] <= 2 * 8 for line in untouched(run)), "what training has had waits no more"


@pytest.mark.parametrize("partial", [True, False])
def test_samples_go_on_under_new_weights_or_are_finished_first(train, partial):
    few = {"actor_rollout_ref": {"rollout": {"max_num_seqs": 8}}}
    weighted = {"algorithm": {"rollout_correction": {"rollout_is": "token"}}}
    # While the scores of a step are waited for, all that was drawn may get finished; not in every one of so many steps.
    run = train(ahead(4, "free", partial_rollout=partial), few, weighted, steps=12)
    told = [line for line in metrics(run) if line["step"]]
    most = max(line["rollout_corr/versions_in_row_max"] for line in told)
    assert most >= 2 if partial else most == 1
    assert max(line["stream/staleness/max"] for line in told) > 0


def test_free_mode_resumes_with_every_group(train, tmp_path):
    folder = cut_off(train(ahead(2, "free")), 2, tmp_path / "run")
    train(ahead(2, "free"), {"trainer": {"resume_mode": "auto"}}, folder=folder)
    uids = [s["uid"] for s in samples(folder)]
    assert len(uids) == STEPS * 8 * 4
    assert all(uids.count(uid) == 4 for uid in uids)


@pytest.mark.parametrize("mode", ["ordered", "free"])
def test_dynamic_sampling_fills_the_batch_ahead_of_training_too(train, mode):
    groups = {"algorithm": {"filter_groups": {"enable": True, "max_num_gen_batches": 20}}}
    run = train(ahead(1, mode), groups, steps=3)
    rows = samples(run)
    assert len(rows) == 3 * 8 * 4
    for uid in {row["uid"] for row in rows}:
        assert len({row["score"] for row in rows if row["uid"] == uid}) > 1
    assert all(line["training/num_gen_batches"] >= 1 for line in metrics(run))


def test_free_mode_runs_ahead_to_the_end_though_half_of_the_groups_are_left_out(train, tmp_path):
    (tmp_path / "half.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 0.0 if extra_info['index'] % 2 else sum(map(ord, solution_str)) % 1000 / 1000\n"
    )
    reward = {"custom_reward_function": {"path": str(tmp_path / "half.py"), "name": "score"}}
    groups = {"algorithm": {"filter_groups": {"enable": True, "max_num_gen_batches": 8}}}
    told = [line for line in untouched(train(ahead(2, "free"), groups, reward, steps=6)) if line["step"]]
    assert all(line["training/num_gen_batches"] > 1 for line in told)
    assert max(line["stream/staleness/max"] for line in told[-3:]) > 0


def test_a_window_larger_than_the_run_is_refused(train):
    with pytest.raises(ConfigError, match="has only 5 steps"):
        train(ahead(5))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"async_training": {"mode": "free"}}, "async_training.staleness=0"),
        ({"async_training": {"staleness": 1, "partial_rollout": False}}, "async_training.mode=ordered"),
        ({"async_training": {"staleness": -1}}, "staleness"),
        ({"async_training": {"staleness": 1, "mode": "chaotic"}}, "ordered"),
    ],
)
def test_keys_without_effect_and_impossible_values_are_refused(train, changes, why):
    with pytest.raises(ConfigError, match=why):
        train(changes)


def test_the_window_says_what_may_start():
    synchronous, one, free = Window(0, True), Window(1, True), Window(2, False)
    assert [synchronous.version_for(step) for step in (1, 2, 5)] == [0, 1, 4]
    assert [one.version_for(step) for step in (1, 2, 5)] == [0, 0, 3]
    assert free.version_for(5) is None
    assert not synchronous.may_draw(1, 0, 0, 8)
    assert one.may_draw(2, 0, 8, 8)
    assert not one.may_draw(3, 0, 16, 8)
    assert free.may_draw(9, 0, 16, 8)
    assert not free.may_draw(9, 0, 17, 8)


def test_groups_that_were_kept_can_be_trained_on_again(train, tmp_path):
    """Generate without training, then train without generating: the same tokens, and the second run learns from them."""
    folder = {"write_to": str(tmp_path / "groups")}
    written = train({"episodes": {**folder, "generate_only": True}}, steps=3)
    assert sorted(file.name for file in (tmp_path / "groups").iterdir()) == [
        f"step_{step:08d}_0.dataproto" for step in (1, 2, 3)
    ]
    assert "actor/grad_norm" not in metrics(written)[-1]
    reading = {"episodes": {"read_from": str(tmp_path / "groups")}}
    read = train(reading, steps=3)
    assert [(s["uid"], s["response"], s["score"]) for s in samples(read)] == [
        (s["uid"], s["response"], s["score"]) for s in samples(written)
    ]
    assert all("actor/grad_norm" in line and "actor/ppo_kl" in line for line in metrics(read))
    alone = train(reading, steps=1)
    assert metrics(alone)[0]["actor/pg_loss"] == metrics(read)[0]["actor/pg_loss"], "a step is done again alone"
    with pytest.raises(DataError, match=r"step 4: .* is not there; it has 3"):
        train(reading, steps=4)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"generate_only": True}, "nobody keeps"),
        ({"read_from": "/nowhere"}, "is no folder"),
    ],
)
def test_kept_groups_that_cannot_be_are_refused(train, changes, why):
    with pytest.raises((ConfigError, DataError), match=why):
        train({"episodes": changes})
