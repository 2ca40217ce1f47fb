"""verl's four asynchronous trainers under --from-verl: where the engines live, how far they run ahead, whose log-probs are the old ones."""

from __future__ import annotations

from typing import Any

from quadriga.compat.translation import Translation, translate
from quadriga.config import load_config
from quadriga.config.needs import correction_of
from quadriga.config.placement import placement_of

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
V1, BYPASS = "trainer.v1", "algorithm.rollout_correction.bypass_mode"
GRPO = (
    "algorithm.adv_estimator=grpo",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.n=4",
    "data.train_batch_size=64",
    f"{ACTOR}.ppo_mini_batch_size=16",
    "trainer.n_gpus_per_node=4",
)
APART = {"training": [4], "generation": [2, 2]}


def checked(*arguments: str) -> tuple[Translation, Any]:
    """The translation, and the configuration that it leads to."""
    translation = translate([*GRPO, *arguments])
    assert translation.refusals == []
    return translation, load_config(translation.nested())


def ahead(config: Any) -> tuple[int, str, bool | None]:
    return config.async_training.staleness, config.async_training.mode, correction_of(config).bypass_mode


def test_batches_in_flight_on_the_trainers_gpus() -> None:
    _, config = checked(f"{V1}.trainer_mode=colocate_async", f"{V1}.colocate_async.num_warmup_batches=2")
    assert ahead(config) == (2, "free", False)
    assert config.trainer.placement == "colocated"
    _, config = checked(f"{V1}.trainer_mode=colocate_async", f"{BYPASS}=True")
    assert ahead(config) == (1, "free", True)


def test_engines_apart_of_the_trainer() -> None:
    translation, config = checked(
        f"{V1}.trainer_mode=separate_async",
        f"{V1}.separate_async.parameter_sync_step=4",
        "data.gen_batch_size=1",
        f"{ROLLOUT}.nnodes=2",
        f"{ROLLOUT}.n_gpus_per_node=2",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.optim.lr_warmup_steps=10",
    )
    assert placement_of(config).pools == APART
    assert ahead(config) == (1, "free", False)
    assert config.actor_rollout_ref.actor.optim.lr_warmup_steps == 3
    assert "set aside" in translation.rows["data.gen_batch_size"].verdict


def test_one_step_off_policy_is_ordered_and_one_step_behind() -> None:
    _, config = checked("rollout.nnodes=2", "rollout.n_gpus_per_node=2", "actor_rollout_ref.hybrid_engine=False")
    assert placement_of(config).pools == APART
    assert ahead(config) == (1, "ordered", True)


def test_a_step_of_the_fully_asynchronous_trainer_is_what_lies_between_two_syncs() -> None:
    own = (
        "data.train_batch_size=0",
        "data.gen_batch_size=1",
        "actor_rollout_ref.hybrid_engine=False",
        "rollout.nnodes=2",
        "rollout.n_gpus_per_node=2",
        "rollout.total_rollout_steps=1000",
        "rollout.test_freq=5",
        "async_training.staleness_threshold=0.5",
        "async_training.trigger_parameter_sync_step=4",
        "async_training.require_batches=2",
        "async_training.partial_rollout=False",
    )
    translation, config = checked(*own)
    assert placement_of(config).pools == APART
    assert ahead(config) == (1, "free", True)
    assert not config.async_training.partial_rollout
    assert (config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size) == (16 * 4 * 2, 16)
    assert (config.trainer.total_training_steps, config.trainer.test_freq) == (1000 // 128, 5)
    assert "how many steps old" in translation.rows["async_training.staleness_threshold"].note
    _, config = checked(*own, "async_training.use_rollout_log_probs=False")
    assert ahead(config)[2] is False
    _, config = checked(*own, "async_training.use_rollout_log_probs=True", "async_training.compute_prox_log_prob=True")
    assert ahead(config)[2] is False
    _, config = checked(*own, "async_training.staleness_threshold=0")
    assert ahead(config) == (0, "ordered", True)


def test_a_reward_model_and_a_teacher_keep_their_pools_beside_the_engines() -> None:
    _, config = checked(
        "rollout.nnodes=1",
        "rollout.n_gpus_per_node=2",
        "reward.reward_model.enable=True",
        "reward.reward_model.model_path=rm",
        "reward.reward_model.enable_resource_pool=True",
        "reward.reward_model.nnodes=1",
        "reward.reward_model.n_gpus_per_node=1",
        "distillation.enabled=True",
        "distillation.nnodes=1",
        "distillation.n_gpus_per_node=2",
        "distillation.teacher_models.teacher_model.model_path=t",
        f"{BYPASS}=False",
    )
    assert placement_of(config).pools == {"training": [4], "generation": [2], "rm": [1], "teacher": [2]}
