"""The part of the schema that describes models and what is done with them. See `schema.py` for the conventions."""

# ruff: noqa: RUF009  (key and section return dataclass fields, which is what a dataclass default must be)

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from quadriga.config.fields import key, section
from quadriga.config.names import KL_LOSSES, LOSS_AGGREGATIONS, OPTIMISERS, POLICY_LOSSES, REWARD_MANAGERS

ACTOR = "actor_rollout_ref.actor"


@dataclass
class ModelConfig:
    path: str = key("builtin:arithmetic", "Hugging Face name or folder; builtin:arithmetic is the embedded tiny model")
    tokenizer_path: str | None = key(None, "tokenizer name or folder; null: the model's")
    trust_remote_code: bool = key(False, "run Python code that comes with the model")
    override_config: dict[str, Any] = key({}, "changes to the model's own config, e.g. attention dropout")
    enable_gradient_checkpointing: bool | str = key(
        False,
        "recompute activations in the backward pass: less memory, a third more time; auto: where the plan says that all would not fit",
        choices=(True, False, "auto"),
    )
    lora_rank: int = key(0, "rank of a LoRA adapter; 0: train all weights", at_least=0, at_most=8192)
    lora_alpha: int = key(16, "LoRA scale", at_least=1)
    target_modules: str | list[str] = key("all-linear", "modules that get an adapter")
    exclude_modules: str | list[str] | None = key(None, "modules among them that get none; a text is a pattern")
    lora_adapter_path: str | None = key(
        None, "folder of a LoRA adapter to start from, as peft writes it; its rank, alpha and modules hold"
    )


@dataclass
class AuxModelConfig:
    """Model of the critic or of the reward model."""

    path: str = key("${actor_rollout_ref.model.path}", "Hugging Face name or folder")
    trust_remote_code: bool = key(
        "${actor_rollout_ref.model.trust_remote_code}", "run Python code that comes with the model"
    )
    override_config: dict[str, Any] = key({}, "changes to the model's own config")
    enable_gradient_checkpointing: bool | str = key(
        "${actor_rollout_ref.model.enable_gradient_checkpointing}",
        "recompute activations in the backward pass",
        choices=(True, False, "auto"),
    )


@dataclass
class RewardModelPathConfig(AuxModelConfig):
    tokenizer_path: str | None = key(
        None, "its tokenizer; null: the model's. Where it is not the policy's, responses are written anew with it"
    )


@dataclass
class OptimConfig:
    name: str = key(
        "adamw",
        "optimiser; adamw_8bit and adamw_bf16: AdamW with moments of 2 or 4 bytes a weight instead of 8, rounded at random",
        choices=OPTIMISERS,
    )
    lr: float = key(1e-6, "peak learning rate", at_least=0)
    lr_warmup_steps: int = key(
        -1, "steps of linear warm-up; -1: lr_warmup_steps_ratio decides", unit="steps", at_least=-1
    )
    lr_warmup_steps_ratio: float = key(0.0, "warm-up as a share of all steps", at_least=0, at_most=1)
    lr_scheduler_type: str = key("constant", "after the warm-up", choices=("constant", "linear", "cosine", "wsd"))
    min_lr_ratio: float = key(0.0, "lowest learning rate as a share of lr", at_least=0, at_most=1)
    weight_decay: float = key(0.01, "AdamW weight decay", at_least=0)
    betas: list[float] = key([0.9, 0.999], "AdamW betas")


@dataclass
class FSDPConfig:
    param_offload: bool = key(False, "keep the weights in host memory while they are not used")
    optimizer_offload: bool = key(
        False, "keep the optimiser's state in host memory; a step takes it through the device in parts"
    )
    grad_dtype: str = key(
        "float32", "type of the gradients that add up over micro-batches", choices=("float32", "bfloat16")
    )
    reshard_after_forward: bool = key(True, "free gathered weights after the forward pass: less memory, more traffic")
    fsdp_size: int = key(
        -1,
        "shard over so many neighbouring workers, with a copy of the weights for each such set; -1: over all of them",
        unit="workers",
        at_least=-1,
    )


@dataclass
class RefFSDPConfig:
    param_offload: bool = key(False, "keep the weights in host memory while they are not used")
    fsdp_size: int = key(
        f"${{{ACTOR}.fsdp_config.fsdp_size}}",
        "shard over so many neighbouring workers, with a copy of the weights for each such set; -1: over all of them",
        unit="workers",
        at_least=-1,
    )


@dataclass
class TorchProfilerConfig:
    contents: list[str] = key(
        ["cpu", "cuda"], "what a trace holds", choices=("cpu", "cuda", "stack", "shapes", "memory")
    )


@dataclass
class ProfilerToolConfig:
    torch: TorchProfilerConfig = section(TorchProfilerConfig, "the torch profiler")


@dataclass
class ProfilerConfig:
    """Whether a role is profiled in the steps of `global_profiler`."""

    enable: bool = key(False, "profile this role in the steps of global_profiler")
    all_ranks: bool = key(False, "all of its ranks; False: those of ranks")
    ranks: list[int] = key([0], "which of them", at_least=0)
    tool_config: ProfilerToolConfig = section(ProfilerToolConfig, "options of the tools")


@dataclass
class PolicyLossConfig:
    loss_mode: str = key("vanilla", "policy loss; vanilla is PPO's clip", choices=POLICY_LOSSES, own="module:function")
    tau_pos: float = key(1.0, "sapo: temperature of the gate for positive advantages", above=0)
    tau_neg: float = key(1.05, "sapo: the same for the others", above=0)
    clip_cov_ratio: float = key(2e-4, "clip_cov: share of the mini-batch's tokens that is held", above=0, at_most=1)
    clip_cov_lb: float = key(1.0, "clip_cov: a token may be held from this covariance on")
    clip_cov_ub: float = key(5.0, "clip_cov: and up to this one")
    kl_cov_ratio: float = key(2e-4, "kl_cov: share of the mini-batch's tokens with a penalty", above=0, at_most=1)
    ppo_kl_coef: float = key(0.1, "kl_cov: weight of their penalty", at_least=0)
    dro_beta: float | None = key(None, "dro: pull towards the old policy; must be set", above=0)
    vespo_k_pos: float = key(2.0, "vespo: exponent k of the weight, advantages ≥ 0", at_least=0)
    vespo_lambda_pos: float = key(3.0, "vespo: decay λ of the weight, advantages ≥ 0", at_least=0)
    vespo_k_neg: float = key(3.0, "vespo: k, negative advantages", at_least=0)
    vespo_lambda_neg: float = key(2.0, "vespo: λ, negative advantages", at_least=0)
    prime_advantage_weight: float = key(1.0, "prime_rl: factor of the advantages", above=0)
    prime_kl_coef: float = key(1e-3, "prime_rl: weight of the squared log-ratio", at_least=0)
    behaviour_level: str = key(
        "token", "decoupled: importance weight to who sampled, by", choices=("token", "sequence")
    )
    behaviour_cap: float = key(5.0, "decoupled: largest such weight", above=0)
    behaviour_bound: str = key(
        "mask", "decoupled: weights above the cap become 0, or the cap", choices=("mask", "clamp")
    )
    proximal: str = key(
        "recomputed",
        "decoupled: the policy that is clipped around: a pass at the step's start, or A-3PO's log-linear estimate",
        choices=("recomputed", "loglinear"),
    )
    opsm_delta: float | None = key(
        None,
        "with any loss: drop rows of negative advantage whose mean log-prob fell by more than this since sampling; null: none",
        unit="nats per token",
        at_least=0,
    )
    entropy_top_ratio: float | None = key(
        None,
        "with any loss: only on this share of the mini-batch's tokens, those of highest entropy",
        above=0,
        at_most=1,
    )


@dataclass
class AdaptiveEntropyConfig:
    enable: bool = key(False, "let the entropy bonus start at entropy_coeff and move by itself")
    target: float = key(
        0.2, "the bonus grows, and counts, while the entropy is not above this", unit="nats", at_least=0
    )
    step_size: float = key(0.005, "its change per step", above=0)
    max_coeff: float = key(1.0, "its largest value", above=0)


@dataclass
class ActorConfig:
    ppo_mini_batch_size: int = key(
        "${data.train_batch_size}", "prompts per optimiser step, over all workers", unit="prompts", at_least=1
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "rows per forward-backward pass; null: use_dynamic_bsz", unit="rows", at_least=1
    )
    use_dynamic_bsz: bool | None = key(
        None, "fill micro-batches up to a token budget; null: yes unless ppo_micro_batch_size_per_gpu is set"
    )
    ppo_max_token_len_per_gpu: int | str = key(
        "auto",
        "token budget of a micro-batch; auto: what fits into the GPU's memory (CPU: 16384)",
        unit="tokens",
        at_least=1,
    )
    ppo_epochs: int = key(1, "passes over a step's rows", unit="epochs", at_least=1)
    shuffle: bool = key(False, "redraw the mini-batches in every pass")
    clip_ratio: float = key(0.2, "PPO clip range around 1", above=0)
    clip_ratio_low: float | None = key(None, "lower side of it; null: clip_ratio", above=0)
    clip_ratio_high: float | None = key(None, "upper side of it; null: clip_ratio", above=0)
    clip_ratio_c: float | None = key(
        None,
        "bound of the ratio: of vanilla's dual clip for negative advantages (null: 3.0), of dppo_* (null: 20)",
        above=1,
    )
    loss_agg_mode: str | None = key(
        None,
        "how token losses become one number; null: token-mean (gspo, geo_mean, sapo: seq-mean-token-mean; luspo: -token-sum)",
        choices=LOSS_AGGREGATIONS,
    )
    loss_scale_factor: float | None = key(
        None, "divisor of seq-mean-token-sum-norm; null: data.max_response_length", above=0
    )
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "which policy loss, and its options")
    entropy_coeff: float = key(0.0, "weight of the entropy bonus")
    adaptive_entropy: AdaptiveEntropyConfig = section(AdaptiveEntropyConfig, "an entropy bonus that keeps itself up")
    calculate_sum_pi_squared: bool | None = key(
        None, "give an estimator Σπ² of every token; null: the token baselines, which need it"
    )
    use_kl_loss: bool = key(False, "add the KL to the reference to the loss")
    kl_loss_coef: float = key(0.001, "its weight", at_least=0)
    kl_loss_type: str = key(
        "low_var_kl",
        "KL estimator in the loss; with +: its value, but the gradient of k2",
        choices=KL_LOSSES,
        own="module:function",
    )
    router_aux_loss_coef: float = key(
        0.0, "mixture of experts: weight of the loss that evens the experts' load", at_least=0
    )
    grad_clip: float = key(1.0, "largest norm of the gradient", above=0)
    optim: OptimConfig = section(OptimConfig, "optimiser")
    ulysses_sequence_parallel_size: int = key(
        1,
        "so many neighbouring workers share their rows and split each sequence; token budgets stay per worker",
        unit="workers",
        at_least=1,
    )
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding")
    profiler: ProfilerConfig = section(ProfilerConfig, "profile of this role")


@dataclass
class RefConfig:
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "rows per forward pass; null: log_prob_use_dynamic_bsz", unit="rows", at_least=1
    )
    log_prob_use_dynamic_bsz: bool | None = key(f"${{{ACTOR}.use_dynamic_bsz}}", "see actor.use_dynamic_bsz")
    log_prob_max_token_len_per_gpu: int | str = key(
        f"${{{ACTOR}.ppo_max_token_len_per_gpu}}", "token budget of a forward pass", unit="tokens", at_least=1
    )
    ulysses_sequence_parallel_size: int = key(
        f"${{{ACTOR}.ulysses_sequence_parallel_size}}",
        "so many neighbouring workers share their rows and split each sequence; token budgets stay per worker",
        unit="workers",
        at_least=1,
    )
    fsdp_config: RefFSDPConfig = section(RefFSDPConfig, "sharding")
    profiler: ProfilerConfig = section(ProfilerConfig, "profile of this role")


@dataclass
class ValKwargsConfig:
    n: int = key(1, "responses per validation prompt", unit="rows", at_least=1)
    do_sample: bool = key(False, "sample; False: greedy")
    temperature: float = key(0.0, "sampling temperature", at_least=0)
    top_p: float = key(1.0, "nucleus", above=0, at_most=1)
    top_k: int = key(-1, "keep the k likeliest tokens; -1: all", at_least=-1)


@dataclass
class EngineKwargsConfig:
    vllm: dict[str, Any] = key({}, "more arguments of vLLM's engine, e.g. block_size")


@dataclass
class MultiTurnConfig:
    max_assistant_turns: int | None = key(
        None, "most answers of the policy in an episode; null: no limit", unit="turns", at_least=1
    )
    max_user_turns: int | None = key(
        None, "most times that it reads an observation or a tool's answer; null: no limit", unit="turns", at_least=0
    )
    max_tokens_per_turn: int | None = key(
        None, "most tokens of one answer of the policy; null: what is left of the response", unit="tokens", at_least=1
    )
    max_parallel_calls: int = key(1, "most tool calls of one answer that are made", unit="calls", at_least=1)
    max_tool_response_length: int = key(
        256, "longest answer of a tool that the policy reads", unit="characters", at_least=1
    )
    tool_response_truncate_side: str = key("middle", "where a longer one is cut", choices=("left", "right", "middle"))
    format: str = key("hermes", "how the policy writes tool calls", own="module:function")
    tools: list[str] = key([], "tools: calculator, python (the sandbox), or your own as file.py:name")
    tool_timeout_s: float = key(30.0, "a tool call is killed after so long", unit="s", above=0)
    tool_config_path: str | None = key(None, "YAML file of tools, as in verl; null: none")
    function_tool_path: str | None = key(None, "Python file whose functions are tools, as in verl; null: none")


@dataclass
class AgentConfig:
    num_workers: int = key(2, "processes that run agents", unit="processes", at_least=1)
    default_agent_loop: str = key(
        "single_turn",
        "agent of rows without a column agent_name: single_turn, tools, a name of agent_loop_config_path, or file.py:name",
    )
    agent_loop_config_path: str | None = key(
        None, "YAML file of agents, a list of {name, _target_, arguments}, as in verl; null: none"
    )
    max_concurrent: int = key(256, "most episodes at the same time in one process", unit="episodes", at_least=1)
    episode_timeout_s: float = key(
        300.0, "an agent's own time in an episode, without what the policy takes", unit="s", above=0
    )
    stall_s: float = key(
        60.0, "a process whose event loop stands still for so long is replaced", unit="s", at_least=1.0
    )
    memory_limit_mb: int | None = key(
        None, "memory of one of these processes, children included; null: no limit", unit="MB", at_least=64
    )


@dataclass
class RolloutConfig:
    name: str = key(
        "native",
        "generation engine: native generates with the training module itself; vllm is vLLM, which must be installed",
        choices=("native", "vllm"),
    )
    n: int = key(1, "responses per prompt", unit="rows", at_least=1)
    temperature: float = key(1.0, "sampling temperature", at_least=0)
    top_p: float = key(1.0, "nucleus", above=0, at_most=1)
    top_k: int = key(-1, "keep the k likeliest tokens; -1: all", at_least=-1)
    do_sample: bool = key(True, "sample; False: greedy")
    seed: int = key(1, "seed of sampling", at_least=0)
    ignore_eos: bool = key(False, "generate to the full length")
    prompt_length: int = key("${data.max_prompt_length}", "longest prompt", unit="tokens", at_least=1)
    response_length: int = key("${data.max_response_length}", "most new tokens", unit="tokens", at_least=1)
    tensor_model_parallel_size: int = key(
        1, "neighbouring slots of a node that hold one copy of the model together to generate", unit="slots", at_least=1
    )
    max_num_seqs: int = key(256, "sequences decoded together", unit="rows", at_least=1)
    max_num_batched_tokens: int = key(8192, "prompt tokens processed together", unit="tokens", at_least=1)
    gpu_memory_utilization: float = key(0.5, "share of the device memory for the engine", above=0, at_most=1)
    free_cache_engine: bool = key(True, "give the engine's memory back during the update")
    enforce_eager: bool = key(False, "no CUDA graphs")
    enable_prefix_caching: bool = key(
        True, "a prompt that begins with tokens still in the cache computes only the rest"
    )
    max_model_len: int | None = key(
        None, "vllm: longest prompt and response; null: prompt_length + response_length", unit="tokens", at_least=1
    )
    enable_chunked_prefill: bool = key(True, "vllm: long prompts in several steps, as the native engine always does")
    engine_kwargs: EngineKwargsConfig = section(EngineKwargsConfig, "arguments of other engines")
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "rows per forward pass for old log-probs; null: log_prob_use_dynamic_bsz", unit="rows", at_least=1
    )
    log_prob_use_dynamic_bsz: bool | None = key(f"${{{ACTOR}.use_dynamic_bsz}}", "see actor.use_dynamic_bsz")
    log_prob_max_token_len_per_gpu: int | str = key(
        f"${{{ACTOR}.ppo_max_token_len_per_gpu}}", "token budget of a forward pass", unit="tokens", at_least=1
    )
    val_kwargs: ValKwargsConfig = section(ValKwargsConfig, "sampling in validation")
    multi_turn: MultiTurnConfig = section(MultiTurnConfig, "episodes of many turns")
    agent: AgentConfig = section(AgentConfig, "who conducts an episode")


@dataclass
class CriticConfig:
    enable: bool | None = key(None, "null: only when adv_estimator needs values")
    model: AuxModelConfig = section(AuxModelConfig, "trunk of the value model; its head is new")
    ppo_mini_batch_size: int = key(
        f"${{{ACTOR}.ppo_mini_batch_size}}", "prompts per optimiser step", unit="prompts", at_least=1
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        f"${{{ACTOR}.ppo_micro_batch_size_per_gpu}}", "rows per forward-backward pass", unit="rows", at_least=1
    )
    use_dynamic_bsz: bool | None = key(f"${{{ACTOR}.use_dynamic_bsz}}", "see actor.use_dynamic_bsz")
    ppo_max_token_len_per_gpu: int | str = key(
        f"${{{ACTOR}.ppo_max_token_len_per_gpu}}", "token budget of a micro-batch", unit="tokens", at_least=1
    )
    ppo_epochs: int = key(f"${{{ACTOR}.ppo_epochs}}", "passes over a step's rows", unit="epochs", at_least=1)
    shuffle: bool = key(f"${{{ACTOR}.shuffle}}", "redraw the mini-batches in every pass")
    cliprange_value: float = key(0.5, "clip range of the value around its old value", above=0)
    loss_agg_mode: str | None = key(
        f"${{{ACTOR}.loss_agg_mode}}",
        "how token losses become one number; null: token-mean",
        choices=LOSS_AGGREGATIONS,
    )
    grad_clip: float = key(1.0, "largest norm of the gradient", above=0)
    optim: OptimConfig = section(partial(OptimConfig, lr=1e-5), "optimiser")
    ulysses_sequence_parallel_size: int = key(
        1,
        "so many neighbouring workers share their rows and split each sequence; token budgets stay per worker",
        unit="workers",
        at_least=1,
    )
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding")
    profiler: ProfilerConfig = section(ProfilerConfig, "profile of this role")


@dataclass
class RewardModelConfig:
    enable: bool = key(False, "score with a reward model too")
    model: RewardModelPathConfig = section(RewardModelPathConfig, "sequence-classification model with one label")
    micro_batch_size_per_gpu: int | None = key(
        None, "rows per forward pass; null: token budget", unit="rows", at_least=1
    )
    max_token_len_per_gpu: int | str = key(
        f"${{{ACTOR}.ppo_max_token_len_per_gpu}}", "token budget of a forward pass", unit="tokens", at_least=1
    )
    enable_resource_pool: bool = key(False, "a pool of its own instead of the shared one")
    n_gpus_per_node: int = key(1, "slots per node of that pool", unit="slots", at_least=1)
    nnodes: int = key(1, "nodes of that pool", unit="nodes", at_least=1)
    reward_manager: str = key("naive", "turns scores into rewards", choices=REWARD_MANAGERS, own="module:class")
    reward_kwargs: dict[str, Any] = key({}, "extra arguments of the manager, e.g. overlong_buffer_cfg")
    profiler: ProfilerConfig = section(ProfilerConfig, "profile of this role")
