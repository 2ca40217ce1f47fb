"""Keys of verl's that have Quadriga's name and another meaning: bounds, losses, defaults and switches that change the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quadriga.compat.translation import Translation, Verdict
from quadriga.config.rollout_correction import turned
from quadriga.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
LOSS, CORRECTION = f"{ACTOR}.policy_loss.loss_mode", "algorithm.rollout_correction"
TEACHING = "distillation.distillation_loss"
SEQUENCE_LOSSES = ("gspo", "sapo", "geo_mean")
"""Losses for which verl always averages over sequences, whatever loss_agg_mode says."""
LONE_ESTIMATORS = ("grpo", "grpo_vectorized", "rloo", "opo")
"""Group estimators that give a lone response its raw score in verl."""
OLD_REJECTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Names of rollout_rs of late 2025, whose bounds were of trainer/rollout."""
MEGATRON_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
NO_BOUND = 1_000_000
PACKAGES = ("torchao.optim", "bitsandbytes.optim")
"""Other sources of verl's optimisers than torch. torchao's `_AdamW` is AdamW that can round weights of 16 bits at random."""
WEIGHTS_OF_2025 = (
    "algorithm.rollout_is",
    *(f"algorithm.rollout_is_{name}" for name in ("threshold", "level", "mode", "threshold_lower", "veto_threshold")),
)
"""Where importance weights were configured before `algorithm.rollout_correction`: the switch first, the veto last."""
NEVER = 1e300
"""An upper bound of ratios that holds back none."""


def defaults_by_choice(command: Translation) -> dict[str, Any]:
    """verl's defaults that only count with another choice on the command line, where they are not Quadriga's."""
    given = command.settings
    held: dict[str, Any] = {}
    if str(given.get(LOSS)).startswith("dppo_"):
        held[f"{ACTOR}.clip_ratio_c"] = 3.0
    if given.get("algorithm.filter_groups.enable") is True:
        held["algorithm.filter_groups.max_num_gen_batches"] = NO_BOUND
    if f"{MODEL}.lora.rank" in command.given:
        held[f"{MODEL}.lora_alpha"] = 32
    if any(given.get(f"{ROLLOUT}.multi_turn.{name}") for name in ("tool_config_path", "function_tool_path")):
        held[f"{ROLLOUT}.multi_turn.tool_rewards"] = False
    if given.get("distillation.enabled") is True:
        mode = given.get(f"{TEACHING}.loss_mode", "k3")
        held[f"{TEACHING}.loss_mode"] = mode
        if str(mode).endswith("_topk"):
            whole = command.given.get(f"{TEACHING}.loss_mode") == "forward_kl_topk_tail"
            held |= {f"{TEACHING}.topk": 32, f"{TEACHING}.tail": "bucket" if whole else "dropped"}
        if given.get(f"{TEACHING}.use_policy_gradient") is True:
            held[f"{TEACHING}.loss_max_clamp"] = float(NO_BOUND)
    return held


# ---- Losses and estimators


def drop_dead_aggregation(command: Translation) -> None:
    loss, key = command.settings.get(LOSS), f"{ACTOR}.loss_agg_mode"
    if key not in command.settings:
        return
    if loss in SEQUENCE_LOSSES:
        command.set_aside(command.source[key], f"verl always averages over sequences with {loss}")
    elif command.settings[key] == "seq-mean-token-sum-norm":
        note = "divided by the rows of the mini-batch too, as verl of August 2026 does; January's did not"
        command.say(command.source[key], note)


def replace_loss_in_bypass(command: Translation) -> None:
    """verl's bypass mode puts a loss of its own into the place of the configured one."""
    key = f"{CORRECTION}.bypass_mode"
    if command.settings.get(LOSS) == "bypass_mode":
        source = command.source[LOSS]
        command.settings.pop(LOSS)
        command.set(key, True, source, "and PPO's clip, unless loss_type says otherwise")
    elif command.settings.get(key) is True and command.settings.get(LOSS) not in (None, "vanilla"):
        command.set_aside(command.source[LOSS], "verl's bypass_mode replaces the loss by that of loss_type")


def judge_lone_responses(command: Translation) -> None:
    """A group of one response has its raw score as advantage in verl, and 0 here, with which nothing would be learned."""
    key = "algorithm.adv_estimator"
    if command.settings.get(key) in LONE_ESTIMATORS and command.get(f"{ROLLOUT}.n") == 1:
        note = "with one response a prompt verl's advantage is the raw score"
        command.set(key, f"{__name__}:{raw_score.__name__}", command.source[key], note)


def raw_score(*, token_level_rewards: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """REINFORCE without a baseline: the row's score on each of its tokens, as advantages and as returns `[B, T]`."""
    advantages = token_level_rewards.sum(-1, keepdim=True) * (response_mask != 0)
    return advantages, advantages


def draw_rows_with_gae_alone(command: Translation) -> None:
    """verl's PF-PPO hangs on the branch for GAE."""
    key, estimator = "algorithm.use_pf_ppo", command.get("algorithm.adv_estimator")
    if command.settings.get(key) is True and estimator != "gae":
        command.set_aside(command.source[key], f"verl reads it with adv_estimator=gae alone, not with {estimator}")


def leave_idle_critic_out(command: Translation) -> None:
    """verl trains a critic that is asked for even where no advantage reads its values."""
    key, estimator = "critic.enable", command.get("algorithm.adv_estimator")
    if command.settings.get(key) is True and estimator != "gae":
        command.set_aside(command.source[key], f"{estimator} does not read its values")


def count_critic_warm_up(command: Translation) -> None:
    """verl's actor takes part *in* step critic_warmup, ours after so many steps."""
    key = "trainer.critic_warmup"
    steps = command.settings.get(key)
    if isinstance(steps, int) and steps > 0:
        command.set(key, steps - 1, command.source[key], f"verl's actor learns from step {steps} on")


def refuse_filter_by_final_reward(command: Translation) -> None:
    key, kl = "algorithm.filter_groups.metric", "algorithm.use_kl_in_reward"
    if command.given.get(key) == "seq_final_reward" and command.settings.get(kl) is True:
        command.refuse(key, f"groups are compared by their scores, without the KL of {kl}", f"set {key}=score")


# ---- Rollout correction


def turn_rejection_bounds(command: Translation) -> None:
    """k1 is bounded by the ratio rollout/trainer in verl and by trainer/rollout here; older names had the latter."""
    tests, bounds = f"{CORRECTION}.rollout_rs", f"{CORRECTION}.rollout_rs_threshold"
    lower = f"{bounds}_lower"
    name, bound = command.settings.get(tests), command.settings.get(bounds)
    if name in OLD_REJECTIONS:
        note = "verl's name of late 2025; its bounds were those of trainer/rollout, as here"
        command.set(tests, OLD_REJECTIONS[name], command.source[tests], note)
        if lower in command.given and bound is not None and "_" not in str(bound):
            command.set(bounds, f"{command.given[lower]}_{bound}", command.source[bounds])
            command.set_aside(lower, f"part of {bounds}")
        return
    if not isinstance(name, str) or bound is None:
        return
    try:
        here = turned(name, bound)
    except ConfigError:
        return  # the check of the combination says what is wrong
    if here != str(bound):
        command.set(bounds, here, command.source[bounds], "bounds of trainer/rollout here, of rollout/trainer in verl")


def correct_as_in_2025(command: Translation) -> None:
    """Keys of 2025 for what `rollout_correction` says: a cap of its own, four keys without a section, and the veto."""
    level, bounds = f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_is_threshold"
    cap = command.given.get(f"{ACTOR}.tis_imp_ratio_cap")
    if isinstance(cap, int | float) and cap > 0 and command.settings.get(level) is None:
        command.set(bounds, float(cap), f"{ACTOR}.tis_imp_ratio_cap", f"and {level}=token")
        command.settings[level] = "token"
    elif isinstance(cap, int | float):
        command.set_aside(f"{ACTOR}.tis_imp_ratio_cap", f"{level} decides" if cap > 0 else "there is no cap below 0")
    if any(key in command.given for key in WEIGHTS_OF_2025) and not isinstance(
        command.given.get("algorithm.rollout_is"), str
    ):
        _weigh_as_in_2025(command, level)
    if command.given.get(f"{CORRECTION}.use_policy_gradient") is True and command.settings.get(
        f"{CORRECTION}.bypass_mode"
    ):
        command.set(f"{CORRECTION}.loss_type", "reinforce", f"{CORRECTION}.use_policy_gradient")
    for key in (f"{CORRECTION}.rollout_token_veto_threshold", WEIGHTS_OF_2025[-1]):
        _veto(command, key)


def _weigh_as_in_2025(command: Translation, path: str) -> None:
    """Weights were on where `rollout_is` was true and a threshold given; else their figures alone were measured."""
    switch, bound, kind, mode, lower, veto = WEIGHTS_OF_2025
    given = command.given
    on = given.get(switch) is True and given.get(bound) is not None
    level = given.get(kind, "token")
    if switch in given:
        command.set_aside(switch, f"said by {path}" if on else "off: the figures are measured in every run")
    if not on:
        for key in (bound, kind, mode, lower, veto):
            if key in given:
                command.set_aside(key, "weights are off")
    elif level in ("token", "sequence") and given.get(mode, "truncate") == "truncate":
        command.set(path, level, kind if kind in given else switch, "truncated")
        if lower in given:
            command.set_aside(lower, "truncated weights have no lower bound")


def _veto(command: Translation, key: str) -> None:
    """A row with a token that the trainer finds that much less likely than the rollout was left out."""
    tests, bounds = f"{CORRECTION}.rollout_rs", f"{CORRECTION}.rollout_rs_threshold"
    least, names, others = command.given.get(key), command.settings.get(tests), command.settings.get(bounds)
    refused = key in command.rows and command.rows[key].verdict is Verdict.REFUSED
    if not refused or not isinstance(least, int | float) or not 0 < least < 1 or (names is not None and others is None):
        return
    command.settings[tests] = "seq_max_k1" if names is None else f"{names},seq_max_k1"
    command.source.setdefault(tests, key)
    veto = f"{least}_{NEVER:g}"
    command.set(bounds, veto if names is None else f"{others},{veto}", key, f"with {tests}={command.settings[tests]}")


# ---- Sampling


def sample_as_verl_does(command: Translation) -> None:
    """verl's servers sample at the temperature that they are given, greedily at 0; do_sample was read by older ways to generate."""
    switch, temperature = f"{ROLLOUT}.do_sample", command.settings.get(f"{ROLLOUT}.temperature")
    if switch in command.settings:
        command.set_aside(command.source[switch], "verl's servers do not read it: rollout.temperature decides")
    if temperature == 0:
        key = command.source[f"{ROLLOUT}.temperature"]
        command.set(switch, False, key, "temperature 0 is greedy")
    section = f"{ROLLOUT}.val_kwargs"
    temperature, key = command.settings.get(f"{section}.temperature"), f"{section}.do_sample"
    if isinstance(temperature, int | float) and temperature > 0 and key not in command.settings:
        note = f"and {key}=True: verl samples wherever the temperature is above 0"
        command.settings[key] = True
        command.source[key] = f"{section}.temperature"
        command.set(f"{section}.temperature", temperature, f"{section}.temperature", note)
    responses = command.settings.get(f"{section}.n")
    if isinstance(responses, int) and responses > 1 and not temperature:
        command.set(f"{section}.n", 1, command.source[f"{section}.n"], "greedy responses to a prompt are all the same")


# ---- Rewards and models


def refuse_function_beside_model(command: Translation) -> None:
    """With a reward model, verl either hands it to the function, as a judge, or does not call the function at all."""
    keys = [key for key in command.given if key.endswith("custom_reward_function.path") and command.given[key]]
    if keys and command.settings.get("reward_model.enable") is True and keys[0] in command.rows:
        why = (
            "beside a reward model verl hands it that model, as a judge, or never calls it; here both scores are added"
        )
        how = "remove one of them, or set reward_model.reward_manager=judge without --from-verl; see docs/rewards.md"
        command.refuse(keys[0], why, how)


def let_adapter_decide(command: Translation) -> None:
    """An adapter's own rank, alpha and modules win over the keys."""
    if command.settings.get(f"{MODEL}.lora_adapter_path"):
        for path in (f"{MODEL}.lora_rank", f"{MODEL}.lora_alpha", f"{MODEL}.target_modules"):
            if path in command.settings:
                command.set_aside(command.source[path], "the adapter of lora_adapter_path decides")


def name_layers(command: Translation) -> None:
    """Megatron's names of layers as those of the model."""
    path = f"{MODEL}.target_modules"
    names = command.settings.get(path)
    if isinstance(names, list) and any(name in MEGATRON_LAYERS for name in names):
        here = [layer for name in names for layer in MEGATRON_LAYERS.get(str(name), (name,))]
        command.set(path, here, command.source[path], "Megatron's names")


def choose_optimizer(command: Translation) -> None:
    """AdamW is AdamW, whichever package implements it there; with moments of 8 bits it has a name of its own here."""
    for section in (f"{ACTOR}.optim", "critic.optim", "optim"):
        key, package = f"{section}.optimizer", f"{section}.optimizer_impl"
        name, of = command.given.get(key), command.given.get(package)
        if name in ("AdamW8bit", "PagedAdamW8bit"):
            command.set(f"{section}.name", "adamw_8bit", key, "moments of one byte each, rounded at random")
        elif name == "_AdamW" or (name in (None, "AdamW") and of in PACKAGES):
            if name is not None:
                command.set_aside(key, f"AdamW, as {section}.name is unless set")
        else:
            continue
        if of in ("torch.optim", *PACKAGES):
            command.set_aside(package, f"part of {section}.name")


# ---- Distillation


def teach_as_verl_does(command: Translation) -> None:
    """The teachers' part has a clipped loss of its own in verl, and reads its floor of log-probs on the top k alone."""
    settings = command.settings
    if settings.get("distillation.enabled") is not True:
        return
    mode, floor = str(command.get(f"{TEACHING}.loss_mode")), f"{TEACHING}.log_prob_min_clamp"
    if floor in settings and not mode.endswith("_topk"):
        command.set_aside(command.source[floor], f"verl reads it on the top k alone, not with loss_mode={mode}")
    temperature = settings.get(f"{ROLLOUT}.temperature")
    if isinstance(temperature, int | float) and temperature not in (0, 1):
        key = command.source[f"{ROLLOUT}.temperature"]
        command.say(key, "local teachers judge at this temperature too, verl's at 1")
    if settings.get(f"{TEACHING}.use_policy_gradient") is True:
        _clip_as_the_teachers(command)


def _clip_as_the_teachers(command: Translation) -> None:
    """Here their advantages go into the policy loss, so that one must clip as theirs does."""
    loss = command.get(LOSS)
    clip = {side: command.given.get(f"{TEACHING}.clip_ratio_{side}", 0.2) for side in ("low", "high")}
    here = {side: command.settings.get(f"{ACTOR}.clip_ratio_{side}") for side in clip}
    here = {side: command.get(f"{ACTOR}.clip_ratio") if value is None else value for side, value in here.items()}
    if loss == "vanilla" and clip == here:
        return
    if command.get(f"{TEACHING}.use_task_rewards"):
        key = f"{TEACHING}.use_policy_gradient"
        why = "the teachers' advantages go into the policy loss of the task, which in verl has another clip range or loss_mode"
        command.refuse(
            command.source[key], why, "give both the same clip_ratio_low and clip_ratio_high, and loss_mode=vanilla"
        )
        return
    for side, value in clip.items():
        path = f"{ACTOR}.clip_ratio_{side}"
        command.set(path, value, command.source.get(path, path), "the teachers' loss clips so")
    if loss != "vanilla":
        command.set_aside(command.source[LOSS], "the teachers' loss is vanilla, and there is no other")


RULES: tuple[Callable[[Translation], None], ...] = (
    replace_loss_in_bypass,
    drop_dead_aggregation,
    draw_rows_with_gae_alone,
    leave_idle_critic_out,
    count_critic_warm_up,
    refuse_filter_by_final_reward,
    turn_rejection_bounds,
    correct_as_in_2025,
    sample_as_verl_does,
    refuse_function_beside_model,
    let_adapter_decide,
    name_layers,
    choose_optimizer,
    teach_as_verl_does,
    judge_lone_responses,
)
