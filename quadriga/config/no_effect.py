"""Values without effect: a key that the user set although the switch it hangs on is off.

One rule a row: its keys (`section.*` for all in it), when they have no effect, why, and which switch would change that.
`actor`, `rollout`, `ref` and `model` stand for the sections of `actor_rollout_ref`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from quadriga.config.distillation import divergence_of
from quadriga.config.names import ADV_ESTIMATORS, GROUP_ESTIMATORS, POLICY_LOSSES, TOKEN_BASELINES
from quadriga.config.needs import need_critic, need_reference_policy, need_reward_model, uses_token_budget
from quadriga.config.schema import Config
from quadriga.config.typed import Problems


class Facts:
    """Short names for what the rules ask about."""

    def __init__(self, config: Config) -> None:
        self.data, self.trainer, self.reward = config.data, config.trainer, config.reward
        self.algorithm, self.critic, self.reward_model = config.algorithm, config.critic, config.reward_model
        self.distillation, self.profiler = config.distillation, config.global_profiler
        self.teaching = config.distillation.distillation_loss
        entries = config.distillation.teacher_models.values()
        self.has_endpoint = any(hasattr(entry, "get") and entry.get("endpoint") for entry in entries)
        policy = config.actor_rollout_ref
        self.actor, self.rollout, self.ref, self.model = policy.actor, policy.rollout, policy.ref, policy.model
        self.has_critic, self.has_ref = need_critic(config), need_reference_policy(config)
        self.has_reward_model = need_reward_model(config)
        self.estimator, self.loss = config.algorithm.adv_estimator, self.actor.policy_loss.loss_mode
        self.asynchronous, self.episodes = config.async_training, config.episodes
        self.own_reward = config.custom_reward_function.path
        self.kl_in_reward, self.correction = config.algorithm.use_kl_in_reward, config.algorithm.rollout_correction

    def token_budget_users(self) -> list[Any]:
        """The sections whose passes are filled by tokens; all follow the actor's budget unless they set their own."""
        sections = [self.actor, self.rollout]
        sections += [self.ref] * self.has_ref + [self.critic] * self.has_critic
        return [s for s in [*sections, *[self.reward_model] * self.has_reward_model] if uses_token_budget(s)]

    def aggregations(self) -> list[str | None]:
        return [self.actor.loss_agg_mode, *[self.critic.loss_agg_mode] * self.has_critic]


class Rule(NamedTuple):
    keys: str
    idle: Callable[[Facts], bool]
    why: str
    switch: str
    zero_is_fine: bool = False
    """The value 0, or nothing, says the same as having no effect (a KL weight where there is no KL)."""


NO_RATIO_BOUND = tuple(name for name in POLICY_LOSSES if name not in ("vanilla", "dppo_tv", "dppo_kl"))
NO_CLIP = ("gpg", "sapo", "dro", "vespo", "kl_cov")
LOSS_OPTIONS = {
    "tau_*": "sapo",
    "clip_cov_*": "clip_cov",
    "kl_cov_ratio": "kl_cov",
    "ppo_kl_coef": "kl_cov",
    "dro_beta": "dro",
    "vespo_*": "vespo",
    "prime_*": "prime_rl",
    "behaviour_*": "decoupled",
    "proximal": "decoupled",
}
"""Keys of actor.policy_loss, and the loss that each belongs to."""
NO_LAMBDA = (*GROUP_ESTIMATORS, "reinforce_plus_plus", "remax")
NO_DISCOUNT = (*GROUP_ESTIMATORS, "remax")
DIVIDED = ("grpo", "grpo_vectorized", "grpo_passk", "gdpo", "gigpo")
NO_DEVIATION = tuple(name for name in ADV_ESTIMATORS if name not in DIVIDED)


def _others_than(*names: str) -> tuple[str, ...]:
    return tuple(name for name in ADV_ESTIMATORS if name not in names)


NO_CRITIC, NO_REF, NO_REWARD_MODEL = (
    f"there is no {who} in this run" for who in ("critic", "reference", "reward model")
)
BY_TOKENS, BY_ROWS = "passes are filled up to a token budget", "passes have a fixed number of rows"

RULES: tuple[Rule, ...] = (
    Rule("critic.*", lambda f: not f.has_critic, NO_CRITIC, "algorithm.adv_estimator=gae"),
    Rule("trainer.critic_warmup", lambda f: not f.has_critic, NO_CRITIC, "algorithm.adv_estimator=gae"),
    # Where a reference keeps its weights (ref.fsdp_config) says nothing about the run where there is none, or where with
    # LoRA it is the actor without its adapter: it is no mistake to have said it.
    Rule("ref.log_prob_*", lambda f: not f.has_ref, NO_REF, "actor.use_kl_loss=True"),
    Rule("reward_model.model.*", lambda f: not f.has_reward_model, NO_REWARD_MODEL, "reward_model.enable=True"),
    Rule("reward_model.*_len_per_gpu", lambda f: not f.has_reward_model, NO_REWARD_MODEL, "reward_model.enable=True"),
    Rule("reward_model.*_size_per_gpu", lambda f: not f.has_reward_model, NO_REWARD_MODEL, "reward_model.enable=True"),
    Rule("reward_model.*_pool", lambda f: not f.has_reward_model, NO_REWARD_MODEL, "reward_model.enable=True"),
    Rule(
        "reward_model.n_gpus_per_node reward_model.nnodes",
        lambda f: not f.reward_model.enable_resource_pool,
        "the reward model has no pool of its own",
        "reward_model.enable_resource_pool=True",
    ),
    Rule(
        "trainer.watchdog.* trainer.max_restarts",
        lambda f: f.trainer.executor == "local",
        "a local run has no workers beside this process",
        "trainer.executor=ray",
    ),
    Rule(
        "trainer.watchdog.soft_factor",
        lambda f: f.trainer.watchdog.soft_s is None,
        "there is no soft deadline",
        "trainer.watchdog.soft_s",
    ),
    Rule(
        "trainer.watchdog.hard_factor",
        lambda f: f.trainer.watchdog.hard_s is None,
        "there is no hard deadline",
        "trainer.watchdog.hard_s",
    ),
    Rule(
        "async_training.mode async_training.partial_rollout*",
        lambda f: f.asynchronous.staleness == 0,
        "a step generates, then trains",
        "async_training.staleness=1",
    ),
    Rule(
        "async_training.partial_rollout*",
        lambda f: f.asynchronous.staleness > 0 and f.asynchronous.mode == "ordered",
        "in ordered mode every sample is written by one version of the weights",
        "async_training.mode=free",
    ),
    Rule(
        "async_training.partial_rollout_recompute",
        lambda f: f.asynchronous.mode == "free" and not f.asynchronous.partial_rollout,
        "no sample goes on under new weights",
        "async_training.partial_rollout=True",
    ),
    Rule(
        "async_training.*",
        lambda f: f.episodes.read_from is not None,
        "nothing is generated for training: the groups are read",
        "episodes.read_from=null",
    ),
    # Advantages
    Rule("algorithm.lam", lambda f: f.estimator in NO_LAMBDA, "lambda belongs to GAE", "algorithm.adv_estimator=gae"),
    Rule(
        "algorithm.gamma",
        lambda f: f.estimator in NO_DISCOUNT,
        "this estimator judges a response as a whole",
        "algorithm.adv_estimator to gae or reinforce_plus_plus",
    ),
    Rule(
        "algorithm.norm_adv_by_std_in_grpo",
        lambda f: f.estimator in NO_DEVIATION,
        "this estimator does not divide by the group's deviation",
        "algorithm.adv_estimator=grpo",
    ),
    Rule(
        "algorithm.f_norm",
        lambda f: f.estimator in _others_than("gpg"),
        "it belongs to gpg",
        "algorithm.adv_estimator=gpg",
    ),
    Rule(
        "algorithm.gdpo_*",
        lambda f: f.estimator in _others_than("gdpo"),
        "it belongs to gdpo",
        "algorithm.adv_estimator=gdpo",
    ),
    Rule(
        "algorithm.gigpo.*",
        lambda f: f.estimator in _others_than("gigpo"),
        "it belongs to gigpo",
        "algorithm.adv_estimator=gigpo",
    ),
    Rule(
        "algorithm.handle_zero_tail",
        lambda f: f.estimator in _others_than(*TOKEN_BASELINES),
        "it belongs to the token baselines",
        "algorithm.adv_estimator=optimal_token_baseline",
    ),
    Rule(
        "algorithm.pf_ppo.*",
        lambda f: not f.algorithm.use_pf_ppo,
        "rows are not drawn",
        "algorithm.use_pf_ppo=True",
    ),
    Rule(
        "algorithm.length_reward_weight",
        lambda f: f.algorithm.length_reward is None,
        "short responses get no reward",
        "algorithm.length_reward=kimi",
    ),
    Rule(
        "algorithm.filter_groups.*",
        lambda f: not f.algorithm.filter_groups.enable,
        "groups are not filtered",
        "algorithm.filter_groups.enable=True",
    ),
    Rule(
        "algorithm.rollout_correction.rollout_is_threshold algorithm.rollout_correction.rollout_is_batch_normalize",
        lambda f: f.correction.rollout_is is None,
        "no importance weights are used",
        "algorithm.rollout_correction.rollout_is=token",
    ),
    Rule(
        "algorithm.rollout_correction.rollout_is*",
        lambda f: f.correction.bypass_mode and f.correction.loss_type == "ppo_clip",
        "with bypass_mode the clipped ratio is the importance weight",
        "algorithm.rollout_correction.loss_type=reinforce",
    ),
    Rule(
        "algorithm.rollout_correction.rollout_rs_threshold",
        lambda f: f.correction.rollout_rs is None,
        "nothing is rejected",
        "algorithm.rollout_correction.rollout_rs=token_k1",
    ),
    Rule(
        "distillation.*",
        lambda f: not f.distillation.enabled,
        "there is no distillation",
        "distillation.enabled=True",
        zero_is_fine=True,
    ),
    Rule(
        "distillation.distillation_loss.topk distillation.distillation_loss.tail",
        lambda f: f.distillation.enabled and not divergence_of(f.teaching).endswith("_topk"),
        "the divergence is that of the sampled tokens",
        "distillation.distillation_loss.loss_mode=forward_kl_topk",
    ),
    Rule(
        "distillation.distillation_loss.jsd_beta",
        lambda f: f.distillation.enabled and divergence_of(f.teaching) != "jsd_topk",
        "it belongs to jsd_topk",
        "distillation.distillation_loss.loss_mode=jsd_topk",
    ),
    Rule(
        "distillation.distillation_loss.distillation_loss_coef",
        lambda f: f.distillation.enabled and not f.teaching.use_task_rewards,
        "there is nothing else to weigh it against",
        "distillation.distillation_loss.use_task_rewards=True",
    ),
    Rule(
        "distillation.n_gpus_per_node",
        lambda f: f.distillation.enabled and f.distillation.nnodes == 0,
        "the teachers have no pool of their own",
        "distillation.nnodes=1",
    ),
    Rule(
        "distillation.hint_template",
        lambda f: f.distillation.enabled and f.distillation.hint == "none",
        "the teachers see no hint",
        "distillation.hint",
    ),
    Rule(
        "distillation.hint_min_score",
        lambda f: f.distillation.enabled and f.distillation.hint != "sibling",
        "no sibling is shown to the teachers",
        "distillation.hint=sibling",
    ),
    Rule(
        "distillation.timeout_s distillation.max_concurrent",
        lambda f: f.distillation.enabled and not f.has_endpoint,
        "no teacher is a server",
        "distillation.teacher_models.NAME.endpoint",
    ),
    # KL
    Rule("actor.kl_loss_coef", lambda f: not f.actor.use_kl_loss, "the loss has no KL", "actor.use_kl_loss=True", True),
    Rule("actor.kl_loss_type", lambda f: not f.actor.use_kl_loss, "the loss has no KL", "actor.use_kl_loss=True"),
    Rule(
        "algorithm.kl_ctrl.* algorithm.kl_penalty",
        lambda f: not f.kl_in_reward,
        "the reward has no KL",
        "algorithm.use_kl_in_reward=True",
        zero_is_fine=True,
    ),
    Rule(
        "algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl",
        lambda f: f.kl_in_reward and f.algorithm.kl_ctrl.type == "fixed",
        "the KL weight is fixed",
        "algorithm.kl_ctrl.type=adaptive",
    ),
    # Generation
    Rule(
        "rollout.max_model_len rollout.enable_chunked_prefill rollout.engine_kwargs.vllm",
        lambda f: f.rollout.name != "vllm",
        "it belongs to vLLM, and the native engine generates",
        "rollout.name=vllm",
    ),
    # Policy loss
    Rule(
        "actor.clip_ratio",
        lambda f: f.actor.clip_ratio_low is not None and f.actor.clip_ratio_high is not None,
        "clip_ratio_low and clip_ratio_high replace it",
        "actor.clip_ratio alone",
    ),
    Rule(
        "actor.clip_ratio_c",
        lambda f: f.loss in NO_RATIO_BOUND,
        "only vanilla and dppo_* have it",
        "actor.policy_loss.loss_mode=vanilla",
    ),
    Rule(
        "actor.clip_ratio actor.clip_ratio_low actor.clip_ratio_high",
        lambda f: f.loss in NO_CLIP,
        "this loss does not clip",
        "actor.policy_loss.loss_mode=vanilla",
    ),
    Rule(
        "actor.clip_ratio",
        lambda f: f.loss == "luspo",
        "luspo has bounds of its own",
        "actor.clip_ratio_low and actor.clip_ratio_high",
    ),
    *(
        Rule(
            f"actor.policy_loss.{keys}",
            lambda f, loss=loss: f.loss in POLICY_LOSSES and f.loss != loss,  # type: ignore[misc]
            f"it belongs to the loss {loss}",
            f"actor.policy_loss.loss_mode={loss}",
        )
        for keys, loss in LOSS_OPTIONS.items()
    ),
    Rule(
        "actor.adaptive_entropy.*",
        lambda f: not f.actor.adaptive_entropy.enable,
        "the entropy bonus is fixed",
        "actor.adaptive_entropy.enable=True",
    ),
    Rule(
        "actor.loss_scale_factor",
        lambda f: "seq-mean-token-sum-norm" not in f.aggregations(),
        "it is the divisor of seq-mean-token-sum-norm",
        "actor.loss_agg_mode=seq-mean-token-sum-norm",
    ),
    Rule(
        "model.lora_alpha model.target_modules model.exclude_modules",
        lambda f: f.model.lora_rank == 0 and f.model.lora_adapter_path is None,
        "there is no LoRA",
        "model.lora_rank=32",
    ),
    Rule(
        "*.profiler.* global_profiler.steps global_profiler.save_path",
        lambda f: f.profiler.tool is None,
        "nothing is profiled",
        "global_profiler.tool=torch",
    ),
    # Schedules
    Rule(
        "actor.optim.min_lr_ratio",
        lambda f: f.actor.optim.lr_scheduler_type == "constant",
        "the learning rate is constant",
        "actor.optim.lr_scheduler_type=cosine",
    ),
    Rule(
        "critic.optim.min_lr_ratio",
        lambda f: f.has_critic and f.critic.optim.lr_scheduler_type == "constant",
        "the learning rate is constant",
        "critic.optim.lr_scheduler_type=cosine",
    ),
    # Rows per pass
    Rule(
        "actor.ppo_micro_batch_size_per_gpu",
        lambda f: uses_token_budget(f.actor),
        BY_TOKENS,
        "actor.use_dynamic_bsz=False",
    ),
    Rule(
        "actor.ppo_max_token_len_per_gpu", lambda f: not f.token_budget_users(), BY_ROWS, "actor.use_dynamic_bsz=True"
    ),
    Rule(
        "rollout.log_prob_micro_batch_size_per_gpu",
        lambda f: uses_token_budget(f.rollout),
        BY_TOKENS,
        "rollout.log_prob_use_dynamic_bsz=False",
    ),
    Rule(
        "rollout.log_prob_max_token_len_per_gpu",
        lambda f: not uses_token_budget(f.rollout),
        BY_ROWS,
        "rollout.log_prob_use_dynamic_bsz=True",
    ),
    Rule(
        "ref.log_prob_micro_batch_size_per_gpu",
        lambda f: f.has_ref and uses_token_budget(f.ref),
        BY_TOKENS,
        "ref.log_prob_use_dynamic_bsz=False",
    ),
    Rule(
        "ref.log_prob_max_token_len_per_gpu",
        lambda f: f.has_ref and not uses_token_budget(f.ref),
        BY_ROWS,
        "ref.log_prob_use_dynamic_bsz=True",
    ),
    Rule(
        "critic.ppo_micro_batch_size_per_gpu",
        lambda f: f.has_critic and uses_token_budget(f.critic),
        BY_TOKENS,
        "critic.use_dynamic_bsz=False",
    ),
    Rule(
        "critic.ppo_max_token_len_per_gpu",
        lambda f: f.has_critic and not uses_token_budget(f.critic),
        BY_ROWS,
        "critic.use_dynamic_bsz=True",
    ),
    Rule(
        "reward_model.max_token_len_per_gpu",
        lambda f: f.has_reward_model and not uses_token_budget(f.reward_model),
        BY_ROWS,
        "reward_model.micro_batch_size_per_gpu=null",
    ),
    # Sampling
    Rule(
        "rollout.temperature rollout.top_p rollout.top_k",
        lambda f: not f.rollout.do_sample,
        "rollout is greedy",
        "rollout.do_sample=True",
        zero_is_fine=True,
    ),
    Rule(
        "rollout.val_kwargs.temperature rollout.val_kwargs.top_p rollout.val_kwargs.top_k",
        lambda f: not f.rollout.val_kwargs.do_sample,
        "validation is greedy",
        "rollout.val_kwargs.do_sample=True",
        zero_is_fine=True,
    ),
    # Data, rewards, run
    Rule("data.seed", lambda f: not f.data.shuffle, "rows are taken in file order", "data.shuffle=True"),
    Rule(
        "data.truncation",
        lambda f: f.data.filter_overlong_prompts,
        "overlong prompts are dropped before",
        "data.filter_overlong_prompts=False",
    ),
    Rule(
        "data.sampler.class_name",
        lambda f: f.data.sampler.class_path is None,
        "the sampler is the built-in one",
        "data.sampler.class_path",
    ),
    Rule(
        "data.custom_cls.name",
        lambda f: f.data.custom_cls.path is None,
        "the dataset is the built-in one",
        "data.custom_cls.path",
    ),
    Rule(
        "custom_reward_function.name",
        lambda f: f.own_reward is None,
        "there is no reward function of your own",
        "custom_reward_function.path",
    ),
    Rule(
        "custom_reward_function.name",
        lambda f: ":" in (f.own_reward or ""),
        "the path names the function already",
        "custom_reward_function.path without the part from the colon on",
    ),
    Rule(
        "reward.max_error_rate",
        lambda f: f.reward.on_error == "stop",
        "the first error stops the run already",
        "reward.on_error to a score",
    ),
    Rule(
        "trainer.resume_from_path",
        lambda f: f.trainer.resume_mode != "resume_path",
        "only resume_mode=resume_path reads it",
        "trainer.resume_mode=resume_path",
    ),
)

SWITCHES = ("critic.enable",)
"""Keys of an idle section that are its switch, not a part of it."""


def report_values_without_effect(config: Config, set_by_user: Collection[str], problems: Problems) -> None:
    """One problem for each rule that fires, naming all the keys it hits."""
    for (why, switch), paths in values_without_effect(config, set_by_user).items():
        listed = ", ".join(f"{path}={_value(config, path)}" for path in paths)
        has, it = ("has", "it") if len(paths) == 1 else ("have", "them")
        problems.add(f"{listed} {has} no effect: {why}", f"remove {it}, or set {switch}")


def values_without_effect(config: Config, set_by_user: Collection[str]) -> dict[tuple[str, str], list[str]]:
    """(why, the switch that would change it) → the keys, of those set by the user, that have no effect."""
    facts = Facts(config)
    hits: dict[tuple[str, str], list[str]] = {}
    for rule in RULES:
        patterns = full_names(rule.keys).split()
        set_here = [p for p in set_by_user if p not in SWITCHES and any(fnmatchcase(p, k) for k in patterns)]
        if set_here and rule.idle(facts):
            hit = [p for p in set_here if not (rule.zero_is_fine and _says_nothing(_value(config, p)))]
            hits.setdefault((rule.why, full_names(rule.switch)), []).extend(sorted(hit))
    return {reason: paths for reason, paths in hits.items() if paths}


def full_names(text: str) -> str:
    """`actor.x` -> `actor_rollout_ref.actor.x`, and so on for the other sections of the policy."""
    return re.sub(r"(?<![\w.])(actor|rollout|ref|model)\.", r"actor_rollout_ref.\1.", text)


def _says_nothing(value: Any) -> bool:
    """0, null, or a section of nothing else."""
    if isinstance(value, dict):
        return all(_says_nothing(inner) for inner in value.values())
    return value is None or value == 0


def _value(config: Config, path: str) -> Any:
    node: Any = config
    for part in path.split("."):
        node = getattr(node, part)
    return node
