"""verl's asynchronous trainers: how far each lets generation run ahead of training, and on which GPUs.

| trainer | known by | here |
|---|---|---|
| V1, on the trainer's GPUs | `trainer.v1.trainer_mode=colocate_async` | free mode |
| V1, engines apart | `trainer.v1.trainer_mode=separate_async` | free mode, a pool for the engines |
| one step off policy | keys `rollout.*` | ordered mode, staleness 1, a pool for the engines |
| fully asynchronous | keys `async_training.*` that only it has | free mode, a pool for the engines; a step is what lies between two syncs |
"""

from __future__ import annotations

from math import ceil
from typing import Any

from quadriga.compat.translation import Translation, Verdict

ACTOR, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout"))
MODE, V1 = "trainer.v1.trainer_mode", "trainer.v1"
STALENESS, OURS = "async_training.staleness", "async_training.mode"
BYPASS, BATCH, MINI = (
    "algorithm.rollout_correction.bypass_mode",
    "data.train_batch_size",
    f"{ACTOR}.ppo_mini_batch_size",
)
FULLY = tuple(
    f"async_training.{name}"
    for name in (
        "staleness_threshold",
        "trigger_parameter_sync_step",
        "require_batches",
        "use_rollout_log_probs",
        "compute_prox_log_prob",
    )
)
TOTAL = "rollout.total_rollout_steps"


def run_ahead(command: Translation) -> None:
    """Decide which of verl's trainers the command line is for, and say the same in Quadriga's keys."""
    given, mode = command.given, command.given.get(MODE)
    if mode in ("colocate_async", "separate_async"):
        _v1(command, mode)
    elif any(key in given for key in (*FULLY, TOTAL)):
        _fully(command)
    elif any(key.startswith("rollout.") for key in given):
        _place_engines(command, "rollout")
        key = next(key for key in ("rollout.nnodes", *given) if key in given and key.startswith("rollout."))
        _set(command, STALENESS, 1, key, "verl's one-step-off-policy trainer, with a pool for its engines")
        _assume(command, BYPASS, True, "that trainer takes the rollout's log-probs for the old ones")
    else:
        return
    for key, note in {
        "data.gen_batch_size": "prompts are drawn as engines have room",
        "actor_rollout_ref.hybrid_engine": "said by trainer.placement",
    }.items():
        if key in given:
            command.set_aside(key, note)


def _v1(command: Translation, mode: str) -> None:
    ahead = f"{V1}.{mode}.num_warmup_batches"
    steps = command.given.get(ahead, 1)
    source = ahead if ahead in command.given else MODE
    _set(command, STALENESS, steps if isinstance(steps, int) else 1, source)
    _set(command, OURS, "free", MODE, "samples in flight go on under new weights")
    _assume(command, BYPASS, False, "verl recomputes them, and corrects nothing unless told to")
    if mode == "separate_async":
        _place_engines(command, ROLLOUT)
        syncs = f"{V1}.separate_async.parameter_sync_step"
        rounds = command.given.get(syncs, 4)
        if syncs in command.given:
            command.set_aside(syncs, f"weights are handed over after the mini-batches of {BATCH}")
        _count_warm_up(command, rounds)


def _fully(command: Translation) -> None:
    """A step here is what verl trains between two syncs: so many rounds of so many mini-batches."""
    given = command.given
    threshold, syncs, batches, sampled, proximal = FULLY
    mini = command.get(MINI)
    rounds, each = given.get(syncs, 4), given.get(batches, 1)
    if not all(isinstance(number, int) for number in (mini, rounds, each)):
        return  # the check of the keys' values says what is wrong
    prompts = mini * rounds * each
    note = f"between two syncs verl trains {rounds} rounds of {each} mini-batches"
    for key in (syncs, batches):
        if key in given:
            command.set_aside(key, f"part of {BATCH}")
    _set(command, BATCH, prompts, BATCH if BATCH in given else syncs if syncs in given else MINI, note)
    share = given.get(threshold, 0.1)
    ahead = ceil(share) if isinstance(share, int | float) else 1
    note = "verl bounds the share of samples that are older, Quadriga how many steps old they may be"
    _set(command, STALENESS, ahead, threshold if threshold in given else TOTAL, note)
    if ahead:
        _set(command, OURS, "free", threshold if threshold in given else TOTAL, note)
    recomputed = proximal if given.get(proximal) is True else sampled if given.get(sampled) is False else None
    if recomputed:
        _set(command, BYPASS, False, recomputed, "recomputed with the weights of the step's start")
        if recomputed == proximal and sampled in given:
            command.set_aside(sampled, f"said by {BYPASS}")
    else:
        _assume(command, BYPASS, True, "that trainer takes the rollout's log-probs for the old ones")
        if sampled in given:
            command.set_aside(sampled, f"said by {BYPASS}")
    _place_engines(command, "rollout")
    total = given.get(TOTAL)
    if isinstance(total, int):
        _set(command, "trainer.total_training_steps", max(1, total // prompts), TOTAL, f"steps of {prompts} prompts")
    _count_warm_up(command, rounds)


def _place_engines(command: Translation, section: str) -> None:
    """Engines in a pool of their own."""
    given, nodes, gpus = command.given, f"{section}.nnodes", f"{section}.n_gpus_per_node"
    default = command.get("trainer.n_gpus_per_node") if section == ROLLOUT else 8
    asked = [key for key in (gpus, nodes) if key in given]
    key = asked[0] if asked else next((key for key in given if key.startswith("rollout.")), MODE)
    roles = {"actor_rollout": "training", "rollout": "generation"}
    needed = {
        "critic": command.get("algorithm.adv_estimator") == "gae",
        "ref": command.get("algorithm.use_kl_in_reward") or command.get(f"{ACTOR}.use_kl_loss"),
        "rm": command.get("reward_model.enable"),
        "teacher": command.get("distillation.enabled"),
    }
    pools: dict[str, Any] = {
        "training": [command.get("trainer.n_gpus_per_node")] * int(command.get("trainer.nnodes")),
        "generation": [given.get(gpus, default)] * int(given.get(nodes, 1)),
    }
    for role in (role for role, is_there in needed.items() if is_there):
        home, size = {"rm": "reward_model", "teacher": "distillation"}.get(role, ""), 0
        if (
            role == "teacher"
            or given.get(f"{home}.enable_resource_pool")
            or given.get(f"reward.{home}.enable_resource_pool")
        ):
            size = int(command.get(f"{home}.nnodes") or 0)
        roles[role] = role if size else "training"
        if size:
            pools[role] = [command.get(f"{home}.n_gpus_per_node")] * size
    for other in asked[1:]:
        command.set_aside(other, "part of trainer.placement")
    _set(command, "trainer.placement", {"pools": pools, "roles": roles}, key, "engines in a pool of their own")


def _count_warm_up(command: Translation, rounds: Any) -> None:
    """verl's schedule moves on with every round, ours with every step."""
    for section in (f"{ACTOR}.optim", "critic.optim"):
        key = f"{section}.lr_warmup_steps"
        steps = command.settings.get(key)
        if isinstance(steps, int) and steps > 0 and isinstance(rounds, int):
            command.set(key, ceil(steps / rounds), command.source[key], f"verl counts rounds, {rounds} to a step")


def _set(command: Translation, path: str, value: Any, key: str, note: str = "") -> None:
    """Like `set`; what another key said of the same path is forgotten."""
    command.source.pop(path, None)
    command.set(path, value, key, note)


def _assume(command: Translation, path: str, value: Any, note: str) -> None:
    if path not in command.settings:
        command.set(path, value, path, f"not on the command line; {note}", Verdict.DEFAULT)
