"""Every configuration key of a PPO-family run: name, type, default, unit and meaning. This file is the truth.

Units: a *prompt* is one dataset row; a *row* is one response to it, so a step has `data.train_batch_size *
rollout.n` rows. "per GPU" means per worker process, also on a machine without GPUs. `${a.b}` follows another key.
"""

# ruff: noqa: RUF009  (key and section return dataclass fields, which is what a dataclass default must be)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quadriga.config.fields import LONGEST, key, section
from quadriga.config.names import (
    ADV_ESTIMATORS,
    DISTILLATION_LOSSES,
    DISTILLATION_TAILS,
    KL_ESTIMATORS,
    LENGTH_REWARDS,
    METRIC_SINKS,
    PF_PPO_METHODS,
)
from quadriga.config.schema_models import (
    ActorConfig,
    CriticConfig,
    ModelConfig,
    ProfilerConfig,
    RefConfig,
    RewardModelConfig,
    RolloutConfig,
)


@dataclass
class SamplerConfig:
    class_path: str | None = key(None, "Python file or dotted module of your own sampler; null: the built-in one")
    class_name: str | None = key(None, "class in that module")


@dataclass
class CustomClassConfig:
    path: str | None = key(None, "Python file or dotted module of your own dataset class; null: the built-in one")
    name: str | None = key(None, "class in that module")


@dataclass
class DataConfig:
    train_files: str | list[str] = key(
        "builtin:arithmetic/train", "parquet, json or jsonl file, or a list of them; builtin:… is generated, not read"
    )
    val_files: str | list[str] = key("builtin:arithmetic/test", "like train_files, for validation")
    prompt_key: str = key("prompt", "column with the chat messages, or with a plain string")
    reward_fn_key: str = key("data_source", "column that chooses the scoring function")
    train_batch_size: int = key(64, "prompts per step, over all workers", unit="prompts", at_least=1)
    val_batch_size: int | None = key(
        None, "prompts per validation batch; null: all at once", unit="prompts", at_least=1
    )
    max_prompt_length: int = key(
        512, "longest prompt; batches are padded to their own longest row", unit="tokens", at_least=1, at_most=LONGEST
    )
    max_response_length: int = key(512, "most new tokens per response", unit="tokens", at_least=1, at_most=LONGEST)
    shuffle: bool = key(True, "visit the rows of an epoch in an order drawn from (seed, epoch)")
    seed: int = key(1, "seed of the row order", at_least=0)
    train_max_samples: int = key(-1, "use at most so many training rows; -1: all", unit="rows", at_least=-1)
    val_max_samples: int = key(-1, "use at most so many validation rows; -1: all", unit="rows", at_least=-1)
    filter_overlong_prompts: bool = key(False, "drop prompts over max_prompt_length, and report how many and which")
    truncation: str = key(
        "error", "what to do with a prompt over max_prompt_length", choices=("error", "left", "right", "middle")
    )
    chat_template: str | None = key(None, "Jinja template, or a file with one, instead of the tokenizer's own")
    apply_chat_template_kwargs: dict[str, Any] = key({}, "extra arguments of the chat template, e.g. enable_thinking")
    sampler: SamplerConfig = section(SamplerConfig, "own sampler, e.g. a curriculum")
    custom_cls: CustomClassConfig = section(CustomClassConfig, "own dataset class")


@dataclass
class ActorRolloutRefConfig:
    model: ModelConfig = section(ModelConfig, "the policy, shared by actor, rollout and reference")
    actor: ActorConfig = section(ActorConfig, "policy update")
    ref: RefConfig = section(RefConfig, "reference policy: the frozen start of the actor, for the KL term")
    rollout: RolloutConfig = section(RolloutConfig, "generation")
    nccl_timeout: int = key(600, "a collective of the workers may take so long", unit="s", at_least=1)


@dataclass
class CustomRewardFunctionConfig:
    path: str | None = key(None, "Python file, or pkg.mod:fn, of your own reward function; null: chosen by data source")
    name: str = key("compute_score", "function in that file")
    reward_kwargs: dict[str, Any] = key({}, "extra keyword arguments given to it")


@dataclass
class RewardConfig:
    num_workers: int = key(2, "scoring processes", unit="processes", at_least=1)
    timeout_s: float = key(30.0, "a sample's scoring is killed after so long", unit="s", at_least=0.01)
    on_error: float | str = key(0.0, "score of a sample whose scoring crashed or timed out, or 'stop' to end the run")
    max_error_rate: float = key(
        0.5, "stop the run when a larger share of a batch crashed or timed out", at_least=0, at_most=1
    )
    max_retries: int = key(0, "score a crashed or timed-out sample again so often", at_least=0)
    memory_limit_mb: int | None = key(4096, "memory of one scoring process, children included", unit="MB", at_least=64)
    require_isolation: bool = key(True, "do not run programs the model writes where the machine cannot shut them in")
    max_concurrent: int = key(256, "async functions: most samples in flight in one scoring process", at_least=1)


@dataclass
class AsyncTrainingConfig:
    staleness: int = key(
        0,
        "generation may run so many steps ahead of training; 0: a step generates, then trains",
        unit="steps",
        at_least=0,
    )
    mode: str = key(
        "ordered",
        "ordered: a step's samples come from the weights exactly `staleness` steps back, whatever the timing; "
        "free: from the newest weights, in the order in which they are finished",
        choices=("ordered", "free"),
    )
    partial_rollout: bool = key(
        True, "free: samples in the middle go on under new weights; false: an engine finishes them first"
    )
    partial_rollout_recompute: bool = key(
        False, "free: samples that go on compute their keys and values anew with the new weights"
    )


@dataclass
class EpisodesConfig:
    write_to: str | None = key(
        None, "folder that keeps the groups of every step: token ids, log-probs, versions, scores"
    )
    read_from: str | None = key(None, "train on the groups that a run kept in this folder, instead of generating")
    generate_only: bool = key(False, "generate and score the groups of every step, and train on none; needs write_to")


@dataclass
class KLControlConfig:
    type: str = key("fixed", "keep kl_coef, or adapt it towards target_kl", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "weight of the KL penalty (its start, when adaptive)", at_least=0)
    horizon: int = key(10000, "adaptive: rows over which the weight may move", unit="rows", at_least=1)
    target_kl: float = key(0.1, "adaptive: KL to steer to", unit="nats per token", above=0)


@dataclass
class FilterGroupsConfig:
    enable: bool = key(False, "dynamic sampling: drop groups whose answers all score the same and draw further prompts")
    metric: str = key("score", "what must differ inside a group: score, or a key of the reward's extra information")
    max_num_gen_batches: int = key(10, "give up after so many generation batches for one step", at_least=1)


@dataclass
class RolloutCorrectionConfig:
    rollout_is: str | None = key(
        None, "importance weights trainer/rollout, by token or sequence; null: none", choices=("token", "sequence")
    )
    rollout_is_threshold: float | str = key(
        2.0, "truncate the weights at this value; two as lo_hi (0.5_2.0): set those outside to 0", above=0
    )
    rollout_is_batch_normalize: bool = key(False, "divide the weights by their mean")
    rollout_rs: str | None = key(
        None,
        "reject tokens or sequences by {token,seq_sum,seq_mean,seq_max}_{k1,k2,k3}, several with commas; null: none",
    )
    rollout_rs_threshold: float | str | None = key(
        None,
        "bounds of rollout_rs, one for each name or for all: C or lo_hi of the ratio for k1, else upper",
    )
    bypass_mode: bool = key(False, "take the rollout's log-probs as the old ones instead of recomputing them")
    loss_type: str = key(
        "ppo_clip",
        "with bypass_mode: the policy loss on that ratio, or the plain policy gradient times the importance weights",
        choices=("ppo_clip", "reinforce"),
    )
    m2po_threshold: float | None = key(
        None, "drop the tokens of largest squared log-ratio until its mean is below this (0.04); null: none", above=0
    )


@dataclass
class PFPPOConfig:
    reweight_method: str = key(
        "pow", "chance of a row: by abs(score)^weight_pow, or by its rank", choices=PF_PPO_METHODS
    )
    weight_pow: float = key(2.0, "exponent of pow", at_least=0)


@dataclass
class GiGPOConfig:
    step_weight: float = key(1.0, "weight of the comparison of single steps", at_least=0)
    gamma: float = key(0.95, "discount per step", at_least=0, at_most=1)
    norm_steps_by_std: bool = key(False, "divide that comparison by its standard deviation")


@dataclass
class AlgorithmConfig:
    adv_estimator: str = key(
        "gae", "advantage estimator; gae has a critic", choices=ADV_ESTIMATORS, own="module:function"
    )
    gamma: float = key(1.0, "discount per token", at_least=0, at_most=1)
    lam: float = key(1.0, "lambda of GAE", at_least=0, at_most=1)
    f_norm: float = key(1.0, "gpg: divisor of the advantages", above=0)
    norm_adv_by_std_in_grpo: bool = key(True, "divide by the group's standard deviation; False is Dr.GRPO")
    gdpo_reward_keys: list[str] = key([], "gdpo: the rewards to compare, keys of what the reward function returns")
    gdpo_reward_weights: list[float] | None = key(None, "gdpo: their weights; null: 1 each")
    gigpo: GiGPOConfig = section(GiGPOConfig, "gigpo: comparison of the steps of trajectories")
    handle_zero_tail: bool = key(True, "token baselines: none where only the longest row of a group is left")
    use_pf_ppo: bool = key(False, "PF-PPO: draw the rows of the update with replacement, by their scores")
    pf_ppo: PFPPOConfig = section(PFPPOConfig, "how they are drawn")
    length_reward: str | None = key(None, "add a reward for short responses; null: none", choices=LENGTH_REWARDS)
    length_reward_weight: float | None = key(None, "its weight; null: 1.0 for kimi, 0.25 for prime_rl", above=0)
    overlong_filter: bool = key(False, "responses of full length leave the loss and its counts")
    use_kl_in_reward: bool = key(False, "subtract the KL to the reference from the reward")
    kl_penalty: str = key("kl", "KL estimator in the reward", choices=KL_ESTIMATORS, own="module:function")
    kl_ctrl: KLControlConfig = section(KLControlConfig, "weight of the KL in the reward")
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig, "dynamic sampling of prompt groups")
    rollout_correction: RolloutCorrectionConfig = section(
        RolloutCorrectionConfig, "correct for the gap between rollout and trainer log-probs"
    )


@dataclass
class WatchdogConfig:
    soft_s: float | None = key(
        60.0,
        "report a phase, with the stacks of all ranks, that takes longer than this; null: never",
        unit="s",
        above=0,
    )
    soft_factor: float = key(5.0, "and longer than so many times its usual time", at_least=1)
    hard_s: float | None = key(
        1800.0, "replace the workers in a phase that takes longer than this; null: never", unit="s", above=0
    )
    hard_factor: float = key(20.0, "and longer than so many times its usual time", at_least=1)


@dataclass
class TrainerConfig:
    project_name: str = key("quadriga", "first part of the run directory's name")
    experiment_name: str | None = key(
        None,
        "second part of it; null: the model and the time, a new run each time. A name is what a later command resumes",
    )
    logger: list[str] = key(["console"], "metric sinks besides metrics.jsonl", choices=METRIC_SINKS)
    nnodes: int = key(1, "nodes", unit="nodes", at_least=1)
    n_gpus_per_node: int = key(
        1, "worker slots per node: GPUs, or processes when device is cpu", unit="slots", at_least=1
    )
    device: str | None = key(
        None, "accelerator; null: the first of these that the machine has", choices=("cuda", "npu", "cpu")
    )
    placement: str | dict[str, Any] = key(
        "colocated",
        "colocated: all roles in one pool; split: actor and critic in halves; or {pools: {name: [slots]}, roles: {role: pool}}",
    )
    deterministic: str = key(
        "fast",
        "exact: on one CUDA device, bits that depend on no batch: generation equals training, runs repeat and resume equal",
        choices=("fast", "exact"),
    )
    executor: str = key("ray", "local: all in one process, for a debugger", choices=("ray", "local"))
    resource_wait_s: float = key(0.0, "wait so long for a cluster that is still growing", unit="s", at_least=0)
    total_epochs: int = key(30, "passes over the training set", unit="epochs", at_least=1)
    total_training_steps: int | None = key(
        None, "stop after so many steps; null: total_epochs decides", unit="steps", at_least=1
    )
    val_before_train: bool = key(True, "validate before the first step")
    val_only: bool = key(False, "validate and stop")
    test_freq: int = key(-1, "validate every so many steps; 0 or -1: only at the end", unit="steps", at_least=-1)
    save_freq: int = key(
        -1, "write a checkpoint every so many steps; 0 or -1: only at the end", unit="steps", at_least=-1
    )
    critic_warmup: int = key(0, "steps in which only the critic learns", unit="steps", at_least=0)
    balance_batch: bool = key(True, "even out the tokens between ranks; never changes what a mini-batch holds")
    default_local_dir: str = key(
        "outputs/${trainer.project_name}/${trainer.experiment_name}",
        "run directory: metrics, samples, logs, checkpoints",
    )
    resume_mode: str = key(
        "auto", "auto: from the newest complete checkpoint", choices=("auto", "disable", "resume_path")
    )
    resume_from_path: str | None = key(None, "checkpoint folder for resume_mode=resume_path")
    max_actor_ckpt_to_keep: int | None = key(None, "keep only the newest checkpoints; null: all", at_least=1)
    max_restarts: int = key(3, "when workers die, go on with new ones, at most so often", at_least=0)
    watchdog: WatchdogConfig = section(
        WatchdogConfig, "deadlines of the phases of a step, learnt from the steps before"
    )
    steering: bool = key(False, "let `quadriga tell` save, validate, stop or change keys of the live run")
    log_sample_tokens: int = key(
        8192,
        "keep the log-probs of so many response tokens with the samples of a step; 0: of none, -1: of all",
        unit="tokens",
        at_least=-1,
    )
    log_val_generations: int = key(0, "show so many validation answers", unit="rows", at_least=0)
    rollout_data_dir: str | None = key(None, "write every step's samples as jsonl here")
    validation_data_dir: str | None = key(None, "write every validation's samples as jsonl here")


@dataclass
class ControllerConfig:
    cpus_per_slot: float = key(1.0, "CPUs reserved for each worker slot", unit="CPUs", above=0)
    start_timeout_s: float = key(300.0, "workers must be up within", unit="s", above=0)
    call_timeout_s: float = key(7200.0, "a call to a worker group must return within", unit="s", above=0)


@dataclass
class RayKwargsConfig:
    ray_init: dict[str, Any] = key({}, "arguments of ray.init, e.g. num_cpus, address, runtime_env")
    timeline_json_file: str | None = key(None, "write Ray's timeline here when the run ends, also after a failure")


@dataclass
class TransferQueueConfig:
    enable: bool = key(False, "rollout data stays with the workers; the driver passes handles")


@dataclass
class DistillationLossConfig:
    loss_mode: str | None = key(
        None,
        "divergence from the teacher: of sampled tokens (+: with the gradient of the reverse KL), or on its top k; "
        "null: k1 with use_policy_gradient, else k3+",
        choices=DISTILLATION_LOSSES,
    )
    use_policy_gradient: bool = key(False, "add minus the divergence of each token to the advantages, without a loss")
    use_task_rewards: bool = key(True, "learn from the rewards too; False: from the teacher alone")
    distillation_loss_coef: float = key(1.0, "weight of the distillation beside the rewards", at_least=0)
    topk: int = key(128, "*_topk: how many of the teacher's likeliest tokens", unit="tokens", at_least=1)
    tail: str = key("bucket", "*_topk: what becomes of the other tokens", choices=DISTILLATION_TAILS)
    jsd_beta: float = key(0.5, "jsd_topk: share of the teacher; 0: forward KL, 1: reverse KL", at_least=0, at_most=1)
    loss_max_clamp: float | None = key(
        None, "hold a token's divergence within ± this; null: no bound, 10 with use_policy_gradient", above=0
    )
    log_prob_min_clamp: float | None = key(None, "count lower log-probs as this; null: as they are")


@dataclass
class DistillationConfig:
    enabled: bool = key(False, "learn from teachers: they say how likely the policy's own tokens are")
    teacher_models: dict[str, Any] = key(
        {},
        "NAME: {model_path: a model, a run directory or self, or endpoint: http://…/v1 with model and api_key_env; key: whose rows}",
    )
    teacher_key: str = key("data_source", "column whose value chooses the teacher by its key")
    hint: str = key(
        "none", "what the teacher sees beside the prompt: none, sibling (a successful response), or a column with text"
    )
    hint_template: str = key(
        "A solution for reference: {hint} Now answer yourself.", "how the hint is put, with {hint}"
    )
    hint_min_score: float = key(1.0, "sibling: score from which a response is successful")
    nnodes: int = key(
        0, "nodes of a pool of the teachers' own; 0: they share the reference's", unit="nodes", at_least=0
    )
    n_gpus_per_node: int = key(1, "slots per node of that pool", unit="slots", at_least=1)
    timeout_s: float = key(
        120.0,
        "an endpoint must answer within; one that cannot be reached is asked again for a minute",
        unit="s",
        above=0,
    )
    max_concurrent: int = key(16, "requests to endpoints at the same time", at_least=1)
    distillation_loss: DistillationLossConfig = section(DistillationLossConfig, "how it is learnt")
    profiler: ProfilerConfig = section(ProfilerConfig, "profile of this role")


@dataclass
class GlobalProfilerConfig:
    tool: str | None = key(
        None, "torch: a trace of each call; nsys: NVTX ranges for Nsight Systems; null: none", choices=("torch", "nsys")
    )
    steps: list[int] | None = key(None, "in which steps", unit="steps", at_least=1)
    save_path: str | None = key(
        None, "folder of the traces, step_<n>/<role>_<rank>_<call>.json.gz; null: profile in the run directory"
    )


@dataclass
class Config:
    """A whole run."""

    data: DataConfig = section(DataConfig, "prompts")
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig, "the policy: actor, rollout, reference")
    critic: CriticConfig = section(CriticConfig, "value model, for adv_estimator=gae")
    reward_model: RewardModelConfig = section(RewardModelConfig, "reward manager, and optionally a reward model")
    custom_reward_function: CustomRewardFunctionConfig = section(CustomRewardFunctionConfig, "own reward function")
    reward: RewardConfig = section(RewardConfig, "the pool of scoring processes")
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "what is optimised")
    distillation: DistillationConfig = section(DistillationConfig, "on-policy distillation")
    global_profiler: GlobalProfilerConfig = section(GlobalProfilerConfig, "profiles of the roles' calls")
    trainer: TrainerConfig = section(TrainerConfig, "the run: size, schedule, output")
    async_training: AsyncTrainingConfig = section(AsyncTrainingConfig, "generation ahead of training")
    episodes: EpisodesConfig = section(EpisodesConfig, "what was generated, kept and used again")
    controller: ControllerConfig = section(ControllerConfig, "worker processes and their deadlines")
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig, "Ray itself")
    transfer_queue: TransferQueueConfig = section(TransferQueueConfig, "data plane")
