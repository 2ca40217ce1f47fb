"""Whole training runs on a tiny model: every way to train that the configuration offers learns, and tells what it does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_policy import write_task

from quadriga.errors import ConfigError, DataError, RewardError
from quadriga.protocol import DataProto
from quadriga.trainer.main_ppo import run_ppo
from quadriga.trainer.ppo.groups import from_table


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def train(task, tmp_path):
    """Run the tiny task with changes, from the start; returns its metrics, one dict a step."""

    def run(**changes) -> list[dict]:
        trainer = {"default_local_dir": str(tmp_path / "run"), "resume_mode": "disable"}
        config = _merged(task, {"trainer": trainer}, changes)
        run_ppo(config)
        lines = (Path(config["trainer"]["default_local_dir"]) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return run


def _merged(*parts):
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.merge(*parts))


def scores(metrics: list[dict]) -> list[float]:
    return [m["critic/score/mean"] for m in metrics if "critic/score/mean" in m]


CRITIC = {"critic": {"optim": {"lr": 1e-2}}}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"algorithm": {"adv_estimator": "gae"}, **CRITIC}, id="gae"),
        pytest.param({"algorithm": {"adv_estimator": "grpo"}}, id="grpo"),
        pytest.param({"algorithm": {"adv_estimator": "rloo"}}, id="rloo"),
        pytest.param({"algorithm": {"adv_estimator": "reinforce_plus_plus"}}, id="reinforce_plus_plus"),
        pytest.param(
            {"algorithm": {"adv_estimator": "reinforce_plus_plus_baseline"}}, id="reinforce_plus_plus_baseline"
        ),
        pytest.param({"algorithm": {"adv_estimator": "remax"}}, id="remax"),
        pytest.param({"algorithm": {"adv_estimator": "opo"}}, id="opo"),
        pytest.param(
            {
                "algorithm": {"adv_estimator": "gpg"},
                "actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "gpg"}}},
            },
            id="gpg",
        ),
    ],
)
def test_every_estimator_learns(train, changes):
    told = scores(train(**changes))
    assert len(told) == 12
    assert sum(told[-3:]) / 3 > told[0] + 0.2


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "cispo", "geo_mean"])
def test_every_policy_loss_learns_over_several_mini_batches_and_passes(train, loss_mode):
    actor = {
        "ppo_mini_batch_size": 4,
        "ppo_epochs": 2,
        "shuffle": True,
        "policy_loss": {"loss_mode": loss_mode},
        "optim": {"lr": 5e-3},
    }
    metrics = train(
        algorithm={"adv_estimator": "grpo"}, actor_rollout_ref={"actor": actor}, trainer={"total_training_steps": 8}
    )
    assert sum(scores(metrics)[-2:]) / 2 > scores(metrics)[0] + 0.15
    assert all("timing_s/old_log_prob" in m for m in metrics)
    assert any(abs(m["actor/ppo_kl"]) > 1e-6 for m in metrics), "later mini-batches are off-policy"


def test_strictly_on_policy_has_ratio_one_and_skips_old_log_probs(train):
    metrics = train(algorithm={"adv_estimator": "grpo"}, trainer={"total_training_steps": 3})
    for m in metrics:
        assert "timing_s/old_log_prob" not in m
        assert m["actor/ppo_kl"] == 0.0
        assert m["actor/pg_clipfrac"] == 0.0
        assert m["rollout/logprob_diff_mean"] < 1e-5


def test_kl_in_the_loss_and_in_the_reward_hold_the_policy_back(train):
    free = train(algorithm={"adv_estimator": "grpo"})
    in_loss = train(
        algorithm={"adv_estimator": "grpo"}, actor_rollout_ref={"actor": {"use_kl_loss": True, "kl_loss_coef": 10.0}}
    )
    in_reward = train(
        algorithm={
            "adv_estimator": "reinforce_plus_plus",
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "kl_coef": 5.0, "target_kl": 0.01, "horizon": 64},
        }
    )
    assert scores(in_loss)[-1] < scores(free)[-1] - 0.1
    assert in_loss[-1]["actor/kl_loss"] > 0
    assert "timing_s/ref" in in_loss[-1]
    coefficients = [m["actor/reward_kl_penalty_coeff"] for m in in_reward]
    assert coefficients[0] == 5.0
    assert len(set(coefficients)) > 1, "the adaptive controller moves"


def test_critic_warm_up_leaves_the_policy_alone(train):
    metrics = train(
        algorithm={"adv_estimator": "gae"}, trainer={"total_training_steps": 4, "critic_warmup": 2}, **CRITIC
    )
    assert ["actor/pg_loss" in m for m in metrics] == [False, False, True, True]
    assert all("critic/vf_loss" in m for m in metrics)


def test_dynamic_sampling_fills_the_batch_with_groups_that_differ(train, tmp_path):
    metrics = train(
        episodes={"write_to": str(tmp_path / "groups")},
        algorithm={
            "adv_estimator": "grpo",
            "filter_groups": {"enable": True, "metric": "acc", "max_num_gen_batches": 9},
        },
        actor_rollout_ref={"actor": {"optim": {"lr": 1e-3}}, "rollout": {"n": 2}},
        trainer={"total_training_steps": 2},
    )
    assert all(m["training/num_gen_batches"] > 1 for m in metrics), (
        "pairs of answers are often both right or both wrong"
    )
    for m in metrics:  # what is told covers every batch that was generated for the step
        files = (tmp_path / "groups").glob(f"step_{m['step']:08d}_*.dataproto")
        groups = [group for file in files for group in from_table(DataProto.load_from_disk(file))[2]]
        assert len(groups) == 8 * m["training/num_gen_batches"]
        assert m["training/groups_dropped"] == len(groups) - 8
        results = [score.result() for group in groups for score in group.scores]
        assert m["reward/score"] == pytest.approx(sum(r.score for r in results) / len(results))
        assert m["reward/seconds_max"] == max(r.seconds for r in results)
    with pytest.raises(DataError, match="groups that differ in always_one"):
        train(
            algorithm={"adv_estimator": "grpo", "filter_groups": {"enable": True, "metric": "always_one"}},
            trainer={"total_training_steps": 1},
        )


def test_rollout_correction_reports_the_gap(train):
    metrics = train(
        algorithm={"adv_estimator": "grpo", "rollout_correction": {"rollout_is": "token"}},
        trainer={"total_training_steps": 2},
    )
    assert metrics[0]["rollout_corr/ess"] == pytest.approx(1.0, abs=1e-4)
    assert "timing_s/old_log_prob" in metrics[0]


def test_lora_trains_an_adapter_and_uses_the_base_as_reference(train):
    metrics = train(
        algorithm={"adv_estimator": "grpo"},
        actor_rollout_ref={"model": {"lora_rank": 8}, "actor": {"use_kl_loss": True, "optim": {"lr": 5e-2}}},
        trainer={"total_training_steps": 25},
    )
    assert metrics[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[-1]["actor/kl_loss"] > 0
    assert scores(metrics)[-1] > scores(metrics)[0] + 0.1


def test_validation_samples_and_timeline_are_in_the_run_directory(train, tmp_path):
    metrics = train(
        algorithm={"adv_estimator": "grpo"},
        actor_rollout_ref={"rollout": {"val_kwargs": {"n": 2}}},
        trainer={
            "val_before_train": True,
            "test_freq": 2,
            "total_training_steps": 3,
            "rollout_data_dir": str(tmp_path / "rollouts"),
        },
    )
    with_validation = [m["step"] for m in metrics if "val/letters/acc/mean@2" in m]
    assert with_validation == [0, 2, 3]
    assert {"val/letters/score/best@2", "val/letters/acc/maj@2"} <= set(metrics[0])
    run = tmp_path / "run"
    rows = [json.loads(line) for line in (run / "samples" / "train_00000001.jsonl").read_text().splitlines()]
    assert len(rows) == 64
    assert {"uid", "prompt", "response", "score", "ground_truth", "sample_index"} <= set(rows[0])
    assert len(list((tmp_path / "rollouts").iterdir())) == 3
    assert (run / "config.yaml").exists()
    names = {e["name"] for e in json.loads((run / "timeline.json").read_text()) if "name" in e}
    assert {"step", "gen", "reward", "update_actor"} <= names


def test_same_seed_same_run_other_seed_other_run(train):
    first, again = (
        scores(train(algorithm={"adv_estimator": "grpo"}, trainer={"total_training_steps": 4})) for _ in range(2)
    )
    assert first == again
    other = train(
        algorithm={"adv_estimator": "grpo"},
        actor_rollout_ref={"rollout": {"seed": 7}},
        trainer={"total_training_steps": 4},
    )
    assert scores(other) != first


CURRICULUM = '''
class OnlyWhatWasSeenBest:
    """File order until it knows scores; from then on the row that scored best, again and again."""

    def __init__(self, data_source, data_config):
        self.rows, self.best = len(data_source), {}

    def __len__(self):
        return self.rows

    def __iter__(self):
        for position in range(self.rows):
            yield max(self.best, key=self.best.get) if self.best else position

    def update(self, batch):
        for index, score in zip(batch.non_tensor_batch["index"], batch.batch["score"].tolist()):
            self.best[int(index)] = max(score, self.best.get(int(index), 0.0))

    def state_dict(self):
        return {"best": {str(k): v for k, v in self.best.items()}}

    def load_state_dict(self, state):
        self.best = {int(k): v for k, v in state["best"].items()}
'''


@pytest.mark.parametrize("in_store", [False, True], ids=["plain", "data plane"])
def test_a_sampler_of_ones_own_learns_from_every_step(train, tmp_path, in_store):
    (tmp_path / "curriculum.py").write_text(CURRICULUM)
    train(
        algorithm={"adv_estimator": "grpo"},
        data={"sampler": {"class_path": str(tmp_path / "curriculum.py"), "class_name": "OnlyWhatWasSeenBest"}},
        transfer_queue={"enable": in_store},
        trainer={"total_training_steps": 2},
    )
    first, second = (
        [
            json.loads(line)
            for line in (tmp_path / "run" / "samples" / f"train_0000000{k}.jsonl").read_text().splitlines()
        ]
        for k in (1, 2)
    )
    best = max(first, key=lambda row: row["score"])
    assert {row["prompt"] for row in second} == {best["prompt"]}


def test_a_reward_that_is_not_a_number_stops_the_run_and_names_it(train, tmp_path):
    (tmp_path / "bad.py").write_text(
        "def bad(data_source, solution_str, ground_truth, extra_info=None):\n    return float('nan')\n"
    )
    with pytest.raises(RewardError, match="nan"):
        train(
            custom_reward_function={"path": str(tmp_path / "bad.py"), "name": "bad"},
            algorithm={"adv_estimator": "grpo"},
        )


def test_a_missing_model_is_named(train):
    with pytest.raises(ConfigError, match="no-such-model"):
        train(actor_rollout_ref={"model": {"path": "./no-such-model"}}, algorithm={"adv_estimator": "grpo"})


def test_workers_of_a_world_of_two_write_the_same_tokens_as_one(task, tmp_path):
    """On real Ray: same seed, same samples and nearly the same losses at world size 1 and 2."""
    import ray

    ray.shutdown()
    told = []
    for world in (1, 2):
        run = tmp_path / f"world{world}"
        config = _merged(
            task,
            {
                "algorithm": {"adv_estimator": "gae"},
                "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 4, "optim": {"lr": 1e-3}}},
                "ray_kwargs": {"ray_init": {"num_cpus": 2, "log_to_driver": False}},
                "trainer": {
                    "executor": "ray",
                    "n_gpus_per_node": world,
                    "total_training_steps": 3,
                    "default_local_dir": str(run),
                },
            },
        )
        run_ppo(config)
        samples = []
        for step in (1, 2, 3):
            lines = (run / "samples" / f"train_{step:08d}.jsonl").read_text().splitlines()
            samples.append(sorted((r["uid"], r["sample_index"], r["response"]) for r in map(json.loads, lines)))
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        told.append((samples, metrics))
    ray.shutdown()
    (samples_1, metrics_1), (samples_2, metrics_2) = told
    assert samples_1 == samples_2
    for name in ("actor/pg_loss", "critic/vf_loss", "actor/grad_norm", "actor/entropy"):
        one, two = (torch.tensor([m[name] for m in metrics]) for metrics in (metrics_1, metrics_2))
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"algorithm": {"adv_estimator": "grpo"}}, id="grpo"),
        pytest.param(
            {
                "algorithm": {
                    "adv_estimator": "gae",
                    "use_kl_in_reward": True,
                    "kl_ctrl": {"type": "adaptive", "kl_coef": 0.5, "target_kl": 0.01, "horizon": 64},
                },
                "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 4}},
                **CRITIC,
            },
            id="ppo with adaptive kl",
        ),
    ],
)
def test_a_resumed_run_equals_one_that_was_never_stopped(task, tmp_path, changes):
    """Bit for bit: metrics, tokens and weights; the checkpoint lies beyond an epoch border (4 steps)."""
    import torch
    from safetensors.torch import load_file

    def run(folder: str, steps: int) -> tuple[list[dict], dict]:
        directory = tmp_path / folder
        trainer = {"default_local_dir": str(directory), "total_training_steps": steps}
        run_ppo(_merged(task, changes, {"trainer": trainer}))
        metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        weights = load_file(directory / "checkpoints" / f"global_step_{steps}" / "huggingface" / "model.safetensors")
        return metrics, weights

    whole, whole_weights = run("whole", 9)
    run("halves", 5)
    halves, halves_weights = run("halves", 9)
    ignored = ("time", "timing_s/", "perf/", "memory/", "reward/seconds", "stream/")
    for one, two in zip(whole, halves, strict=True):
        same = {k: v for k, v in one.items() if not k.startswith(("val/", *ignored))}
        assert same == {k: v for k, v in two.items() if not k.startswith(("val/", *ignored))}
    for step in range(1, 10):
        name = f"samples/train_{step:08d}.jsonl"
        assert (tmp_path / "whole" / name).read_text() == (tmp_path / "halves" / name).read_text()
    assert all(torch.equal(whole_weights[k], halves_weights[k]) for k in whole_weights)


def test_a_new_adapter_is_the_same_in_every_run(train, tmp_path):
    """Its weights are drawn, from a seed and not from the clock."""
    changes = {
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {"model": {"lora_rank": 4}},
        "trainer": {"total_training_steps": 2},
    }
    first, again = (train(**changes), train(**changes))
    assert first[-1]["actor/grad_norm"] == again[-1]["actor/grad_norm"]


def test_a_run_that_starts_anew_puts_the_checkpoints_of_the_former_one_aside(task, tmp_path):
    """What `disable` has turned away must not come back with a later `auto`."""
    directory = tmp_path / "run"
    trainer = {"default_local_dir": str(directory), "total_training_steps": 3, "save_freq": 1}
    base = _merged(task, {"algorithm": {"adv_estimator": "grpo"}, "trainer": trainer})
    run_ppo(base)
    (tmp_path / "bad.py").write_text("def bad(data_source, solution_str, ground_truth, extra_info=None):\n    1 / 0\n")
    failing = {"custom_reward_function": {"path": str(tmp_path / "bad.py"), "name": "bad"}}
    with pytest.raises(RewardError):
        run_ppo(_merged(base, failing, {"trainer": {"resume_mode": "disable"}}))
    assert not list((directory / "checkpoints").glob("global_step_*"))
    assert (directory / "earlier" / "1" / "checkpoints" / "global_step_3" / "manifest.json").exists()
    run_ppo(_merged(base, {"trainer": {"total_training_steps": 2}}))
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2], "a new run, not the old one gone on"


def test_a_run_that_is_stopped_early_does_not_end_well(task, tmp_path):
    """Ctrl-C asks it to stop after the step at hand: a checkpoint is there, and the exit status says that steps are missing."""
    from quadriga.errors import QuadrigaError
    from quadriga.trainer.main_ppo import TaskRunner

    class StopsEarly(TaskRunner):
        @property
        def events(self):
            return self._events

        @events.setter
        def events(self, log):
            append = log.append

            def watch(kind, payload=None):
                append(kind, payload)
                if kind == "phase" and payload["open"] == ["step", "gen"] and payload["step"] == 2:
                    self.stop()

            log.append = watch
            self._events = log

    trainer = {"default_local_dir": str(tmp_path), "total_training_steps": 5}
    config = _merged(task, {"algorithm": {"adv_estimator": "grpo"}, "trainer": trainer})
    with pytest.raises(QuadrigaError, match="stopped after step 2 of 5"):
        run_ppo(config, StopsEarly)
    assert (tmp_path / "checkpoints" / "global_step_2").exists()


def test_a_run_is_not_resumed_on_other_data(task, tmp_path):
    """As many rows as before, but other prompts: the cursor would point at something else."""
    from tiny_policy import write_prompts

    from quadriga.errors import CheckpointError

    prompts = write_prompts(tmp_path / "prompts.jsonl")
    trainer = {"default_local_dir": str(tmp_path / "run"), "total_training_steps": 1}
    config = _merged(task, {"algorithm": {"adv_estimator": "grpo"}, "trainer": trainer})
    config["data"]["train_files"] = str(prompts)
    run_ppo(config)
    prompts.write_text(prompts.read_text().replace("say c0", "say d9"))
    config["trainer"]["total_training_steps"] = 2
    with pytest.raises(CheckpointError, match="the training set is not the one"):
        run_ppo(config)
