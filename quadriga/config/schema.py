"""Every configuration key of a PPO-family run: name, type, default, unit and meaning. This file is the truth.

Units: a *prompt* is one dataset row; a *row* is one response to it, so a step has `data.train_batch_size *
rollout.n` rows. "per GPU" means per worker process, also on a machine without GPUs. `${a.b}` follows another key.
"""

# ruff: noqa: RUF009  (key and section return dataclass fields, which is what a dataclass default must be)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quadriga.config.fields import LARGEST_SEED, LONGEST, LONGEST_S, MOST_PROCESSES, SHORTEST_S, key, section
from quadriga.config.names import METRIC_SINKS
from quadriga.config.schema_algorithm import AlgorithmConfig, DistillationConfig
from quadriga.config.schema_models import ModelConfig
from quadriga.config.schema_roles import ActorConfig, CriticConfig, RefConfig, RewardModelConfig
from quadriga.config.schema_rollout import RolloutConfig


@dataclass
class SamplerConfig:
    class_path: str | None = key(None, "Python file or dotted module of your own sampler; null: the built-in one")
    class_name: str | None = key(None, "class in that module", only_if=".class_path")


@dataclass
class CustomClassConfig:
    path: str | None = key(None, "Python file or dotted module of your own dataset class; null: the built-in one")
    name: str | None = key(None, "class in that module", only_if=".path")


@dataclass
class DataConfig:
    train_files: str | list[str] = key(
        "builtin:arithmetic/train", "parquet, json or jsonl file, or a list of them; builtin:… is generated, not read"
    )
    val_files: str | list[str] = key("builtin:arithmetic/test", "like train_files, for validation")
    prompt_key: str = key("prompt", "column with the chat messages, or with a plain string")
    reward_fn_key: str = key("data_source", "column that chooses the scoring function")
    train_batch_size: int = key(64, "prompts per step, over all workers", unit="prompts", at_least=1, at_most=LONGEST)
    val_batch_size: int | None = key(
        None, "prompts per validation batch; null: all at once", unit="prompts", at_least=1
    )
    max_prompt_length: int = key(
        512, "longest prompt; batches are padded to their own longest row", unit="tokens", at_least=1, at_most=LONGEST
    )
    max_response_length: int = key(512, "most new tokens per response", unit="tokens", at_least=1, at_most=LONGEST)
    shuffle: bool = key(True, "visit the rows of an epoch in an order drawn from (seed, epoch)")
    seed: int = key(1, "seed of the row order", at_least=0, at_most=LARGEST_SEED, only_if=".shuffle=True")
    train_max_samples: int = key(-1, "use at most so many training rows; -1: all", unit="rows", at_least=-1)
    val_max_samples: int = key(-1, "use at most so many validation rows; -1: all", unit="rows", at_least=-1)
    filter_overlong_prompts: bool = key(False, "drop prompts over max_prompt_length, and report how many and which")
    truncation: str = key(
        "error",
        "what to do with a prompt over max_prompt_length",
        choices=("error", "left", "right", "middle"),
        only_if=".filter_overlong_prompts=False",
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
    nccl_timeout: int = key(
        600, "a collective of the workers may take so long", unit="s", at_least=1, at_most=LONGEST_S
    )


@dataclass
class CustomRewardFunctionConfig:
    path: str | None = key(None, "Python file, or pkg.mod:fn, of your own reward function; null: chosen by data source")
    name: str = key("compute_score", "function in that file", only_if=".path")
    reward_kwargs: dict[str, Any] = key({}, "extra keyword arguments given to it")


@dataclass
class RewardConfig:
    num_workers: int = key(2, "scoring processes", unit="processes", at_least=1, at_most=MOST_PROCESSES)
    timeout_s: float = key(
        30.0, "a sample's scoring is killed after so long", unit="s", at_least=0.01, at_most=LONGEST_S
    )
    on_error: float | str = key(0.0, "score of a sample whose scoring crashed or timed out, or 'stop' to end the run")
    max_error_rate: float = key(
        0.5,
        "stop the run when a larger share of a batch crashed or timed out",
        at_least=0,
        at_most=1,
        only_if=".on_error!=stop",
    )
    max_retries: int = key(0, "score a crashed or timed-out sample again so often", at_least=0)
    memory_limit_mb: int | None = key(4096, "memory of one scoring process, children included", unit="MB", at_least=64)
    require_isolation: bool = key(True, "do not run programs the model writes where the machine cannot shut them in")
    max_concurrent: int = key(
        256, "async functions: most samples in flight in one scoring process", at_least=1, at_most=LONGEST
    )


@dataclass
class AsyncTrainingConfig:
    staleness: int = key(
        0,
        "generation may run so many steps ahead of training; 0: a step generates, then trains",
        unit="steps",
        at_least=0,
        at_most=1000,
    )
    mode: str = key(
        "ordered",
        "ordered: a step's samples come from the weights exactly `staleness` steps back, whatever the timing; "
        "free: from the newest weights, in the order in which they are finished",
        choices=("ordered", "free"),
        only_if=".staleness",
    )
    partial_rollout: bool = key(
        True,
        "samples in the middle go on under new weights; false: an engine finishes them first",
        only_if=".staleness and .mode=free",
    )
    partial_rollout_recompute: bool = key(
        False,
        "samples that go on compute their keys and values anew with the new weights",
        only_if=".staleness and .mode=free and .partial_rollout=True",
    )


@dataclass
class EpisodesConfig:
    write_to: str | None = key(
        None, "folder that keeps the groups of every step: token ids, log-probs, versions, scores"
    )
    read_from: str | None = key(None, "train on the groups that a run kept in this folder, instead of generating")
    generate_only: bool = key(False, "generate and score the groups of every step, and train on none; needs write_to")


@dataclass
class WatchdogConfig:
    soft_s: float | None = key(
        60.0,
        "report a phase, with the stacks of all ranks, that takes longer than this; null: never",
        unit="s",
        at_least=SHORTEST_S,
        at_most=LONGEST_S,
    )
    soft_factor: float = key(5.0, "and longer than so many times its usual time", at_least=1, only_if=".soft_s")
    hard_s: float | None = key(
        1800.0,
        "replace the workers in a phase that takes longer than this; null: never",
        unit="s",
        at_least=SHORTEST_S,
        at_most=LONGEST_S,
    )
    hard_factor: float = key(20.0, "and longer than so many times its usual time", at_least=1, only_if=".hard_s")


@dataclass
class TrainerConfig:
    project_name: str = key("quadriga", "first part of the run directory's name")
    experiment_name: str | None = key(
        None,
        "second part of it; null: the model and the time, a new run each time. A name is what a later command resumes",
    )
    logger: list[str] = key(["console"], "metric sinks besides metrics.jsonl", choices=METRIC_SINKS)
    nnodes: int = key(1, "nodes", unit="nodes", at_least=1, at_most=MOST_PROCESSES)
    n_gpus_per_node: int = key(
        1,
        "worker slots per node: GPUs, or processes when device is cpu",
        unit="slots",
        at_least=1,
        at_most=MOST_PROCESSES,
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
    resource_wait_s: float = key(
        0.0, "wait so long for a cluster that is still growing", unit="s", at_least=0, at_most=LONGEST_S
    )
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
    resume_from_path: str | None = key(None, "checkpoint folder", only_if=".resume_mode=resume_path")
    max_actor_ckpt_to_keep: int | None = key(None, "keep only the newest checkpoints; null: all", at_least=1)
    max_restarts: int = key(
        3, "when workers die, go on with new ones, at most so often", at_least=0, only_if=".executor=ray"
    )
    watchdog: WatchdogConfig = section(
        WatchdogConfig,
        "deadlines of the phases of a step, learnt from the steps before",
        only_if="trainer.executor=ray",
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
    cpus_per_slot: float = key(
        1.0, "CPUs reserved for each worker slot", unit="CPUs", at_least=1e-3, at_most=MOST_PROCESSES
    )
    start_timeout_s: float = key(300.0, "workers must be up within", unit="s", at_least=SHORTEST_S, at_most=LONGEST_S)
    call_timeout_s: float = key(
        7200.0, "a call to a worker group must return within", unit="s", at_least=SHORTEST_S, at_most=LONGEST_S
    )


@dataclass
class RayKwargsConfig:
    ray_init: dict[str, Any] = key({}, "arguments of ray.init, e.g. num_cpus, address, runtime_env")
    timeline_json_file: str | None = key(None, "write Ray's timeline here when the run ends, also after a failure")


@dataclass
class TransferQueueConfig:
    enable: bool = key(False, "rollout data stays with the workers; the driver passes handles")


@dataclass
class GlobalProfilerConfig:
    tool: str | None = key(
        None, "torch: a trace of each call; nsys: NVTX ranges for Nsight Systems; null: none", choices=("torch", "nsys")
    )
    steps: list[int] | None = key(None, "in which steps", unit="steps", at_least=1, only_if=".tool")
    save_path: str | None = key(
        None,
        "folder of the traces, step_<n>/<role>_<rank>_<call>.json.gz; null: profile in the run directory",
        only_if=".tool",
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
    distillation: DistillationConfig = section(
        DistillationConfig, "on-policy distillation", only_if="distillation.enabled=True", zero_is_off=True
    )
    global_profiler: GlobalProfilerConfig = section(GlobalProfilerConfig, "profiles of the roles' calls")
    trainer: TrainerConfig = section(TrainerConfig, "the run: size, schedule, output")
    async_training: AsyncTrainingConfig = section(
        AsyncTrainingConfig, "generation ahead of training", only_if="episodes.read_from=null"
    )
    episodes: EpisodesConfig = section(EpisodesConfig, "what was generated, kept and used again")
    controller: ControllerConfig = section(ControllerConfig, "worker processes and their deadlines")
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig, "Ray itself")
    transfer_queue: TransferQueueConfig = section(TransferQueueConfig, "data plane")
