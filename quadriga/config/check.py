"""What can only be judged on a configuration as a whole, of either kind of run: combinations that cannot work."""

from __future__ import annotations

from typing import Any

from quadriga.config.algorithm_check import report_algorithm
from quadriga.config.batch_arithmetic import report_batch_sizes
from quadriga.config.distillation import check_distillation
from quadriga.config.exactness import report_exactness
from quadriga.config.needs import (
    SECTIONS_OF_ROLES,
    need_critic,
    need_reference_policy,
    need_reward_model,
    profiler_section,
    uses_token_budget,
)
from quadriga.config.parallel import SEQUENCE_KEY, report_experts, report_parallel, report_tensor_parallel
from quadriga.config.placement import placement_of
from quadriga.config.run_name import name_problems
from quadriga.config.schema import Config
from quadriga.config.supervised_schema import SFTConfig
from quadriga.config.typed import Problems
from quadriga.config.vllm import report_vllm
from quadriga.errors import ConfigError

LOWEST_TEMPERATURE = 0.01
ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"


def check(config: Config, problems: Problems) -> None:
    """Note every impossible combination."""
    try:
        placement_of(config)
        check_distillation(config)
    except ConfigError as error:
        problems.add(error.what, error.fix)
        return
    report_batch_sizes(config, problems)
    _data(config, problems)
    report_algorithm(config, problems)
    _parallel_update(config, problems)
    _passes(config, problems)
    _sampling(config, problems)
    report_vllm(config, problems)
    _optimisers(config, problems)
    _rewards(config, problems)
    _episodes(config, problems)
    _run(config, problems)
    report_exactness(config, problems)
    report_tensor_parallel(config, problems)
    report_experts(config, problems)


def _data(config: Config, problems: Problems) -> None:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    for name, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        if not files or (isinstance(files, list) and not all(files)):
            problems.add(f"{name}={files!r} names no file", f"set {name} to a parquet, json or jsonl file")
    for name, most in (
        ("data.train_max_samples", data.train_max_samples),
        ("data.val_max_samples", data.val_max_samples),
    ):
        if most == 0:
            problems.add(f"{name}=0 leaves no rows", f"set {name}=-1 for all rows")
    if 0 < data.train_max_samples < data.train_batch_size:
        problems.add(
            f"data.train_max_samples={data.train_max_samples} rows do not fill one step of "
            f"data.train_batch_size={data.train_batch_size} prompts",
            f"set data.train_batch_size={data.train_max_samples} or less, or data.train_max_samples=-1",
        )
    for source, copy, here, there in (
        ("data.max_prompt_length", f"{ROLLOUT}.prompt_length", data.max_prompt_length, rollout.prompt_length),
        ("data.max_response_length", f"{ROLLOUT}.response_length", data.max_response_length, rollout.response_length),
    ):
        if here != there:
            problems.add(
                f"{source}={here} and {copy}={there} must be equal", f"set only {source}; the other follows it"
            )
    for path_key, name_key, path, class_name in (
        ("data.sampler.class_path", "data.sampler.class_name", data.sampler.class_path, data.sampler.class_name),
        ("data.custom_cls.path", "data.custom_cls.name", data.custom_cls.path, data.custom_cls.name),
    ):
        if path is not None and class_name is None:
            problems.add(f"{path_key}={path}, but {name_key} is not set", f"set {name_key} to the class in that file")


def _parallel_update(config: Config, problems: Problems) -> None:
    """Workers that share sequences, or a copy of the weights: their numbers must divide workers and heads."""
    policy, placement = config.actor_rollout_ref, placement_of(config)
    sections: list[tuple[str, str, Any, str]] = [("actor_rollout", ACTOR, policy.actor, policy.model.path)]
    sections += [("ref", REF, policy.ref, policy.model.path)]
    sections += [("critic", "critic", config.critic, config.critic.model.path)]
    reported: set[tuple[str, int, int]] = set()
    for role, name, section, path in sections:
        if role not in placement.role_pool:
            continue
        workers, sharing, copy = (
            placement.slots(role),
            section.ulysses_sequence_parallel_size,
            section.fsdp_config.fsdp_size,
        )
        facts = (path, sharing, copy)
        if facts in reported:  # the reference follows the actor
            continue
        reported.add(facts)
        report_parallel(name, workers, sharing, copy, path, problems)


def _passes(config: Config, problems: Problems) -> None:
    """Token budgets that do not hold one sequence, and passes without any size."""
    policy = config.actor_rollout_ref
    longest = config.data.max_prompt_length + config.data.max_response_length
    sections: list[tuple[str, Any, str, str]] = [(ACTOR, policy.actor, "ppo_{}_per_gpu", "use_dynamic_bsz")]
    sections += [(ROLLOUT, policy.rollout, "log_prob_{}_per_gpu", "log_prob_use_dynamic_bsz")]
    if need_reference_policy(config):
        sections += [(REF, policy.ref, "log_prob_{}_per_gpu", "log_prob_use_dynamic_bsz")]
    if need_critic(config):
        sections += [("critic", config.critic, "ppo_{}_per_gpu", "use_dynamic_bsz")]
    if need_reward_model(config):
        sections += [("reward_model", config.reward_model, "{}_per_gpu", "")]
    too_small: dict[tuple[int, int], list[str]] = {}
    for name, section, pattern, dynamic in sections:
        budget_key, rows_key = pattern.format("max_token_len"), pattern.format("micro_batch_size")
        if uses_token_budget(section):
            budget = getattr(section, budget_key)
            if isinstance(budget, str):
                if budget != "auto":
                    problems.add(f"{name}.{budget_key}={budget} is no token budget", "set a number of tokens, or auto")
            elif budget * (sharing := _sharing(name, section, config)) < longest:
                too_small.setdefault((budget, sharing), []).append(f"{name}.{budget_key}")
        elif getattr(section, rows_key) is None:
            problems.add(
                f"{name}.{dynamic}=False, and {name}.{rows_key} is not set: the rows of a pass are not determined",
                f"set {name}.{rows_key}, e.g. to 8, or {name}.{dynamic}=True",
            )
    for (budget, sharing), keys in too_small.items():
        shared = "" if sharing == 1 else f", which {sharing} workers share"
        problems.add(
            f"{', '.join(keys)}={budget} tokens cannot hold one sequence of data.max_prompt_length + "
            f"data.max_response_length = {longest} tokens{shared}",
            f"set {keys[0]}={-(-longest // sharing)} or more{', which the others follow' if len(keys) > 1 else ''}",
        )


def _sharing(name: str, section: Any, config: Config) -> int:
    """Over how many workers the passes of a section split a sequence; rollout.log_prob_* are passes of the actor."""
    if name == ROLLOUT:
        section = config.actor_rollout_ref.actor
    return getattr(section, SEQUENCE_KEY, 1)


def _sampling(config: Config, problems: Problems) -> None:
    rollout = config.actor_rollout_ref.rollout
    for name, sampling in ((ROLLOUT, rollout), (f"{ROLLOUT}.val_kwargs", rollout.val_kwargs)):
        if sampling.do_sample and sampling.temperature == 0:
            problems.add(
                f"{name}.do_sample=True needs {name}.temperature above 0",
                f"set {name}.temperature=1.0, or {name}.do_sample=False for greedy decoding",
            )
        if sampling.do_sample and 0 < sampling.temperature < LOWEST_TEMPERATURE:
            problems.add(
                f"{name}.temperature={sampling.temperature} divides the logits beyond what numbers can hold",
                f"set {LOWEST_TEMPERATURE} or more, or {name}.do_sample=False for greedy decoding",
            )
        if sampling.top_k == 0:
            problems.add(f"{name}.top_k=0 keeps no token", f"set {name}.top_k=-1 for all tokens")
        if not sampling.do_sample and sampling.n > 1:
            problems.add(
                f"{name}.n={sampling.n} greedy responses to a prompt are all the same",
                f"set {name}.do_sample=True with a temperature above 0, or {name}.n=1",
            )


def _optimisers(config: Config, problems: Problems) -> None:
    sections = [(f"{ACTOR}.optim", config.actor_rollout_ref.actor.optim)]
    if need_critic(config):
        sections.append(("critic.optim", config.critic.optim))
    for name, optim in sections:
        if optim.lr_warmup_steps >= 0 and optim.lr_warmup_steps_ratio > 0:
            problems.add(
                f"{name}.lr_warmup_steps={optim.lr_warmup_steps} and {name}.lr_warmup_steps_ratio="
                f"{optim.lr_warmup_steps_ratio} both set the warm-up",
                f"remove one of them ({name}.lr_warmup_steps=-1 lets the ratio decide)",
            )
        if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
            problems.add(
                f"{name}.betas={optim.betas} must be two numbers from 0 to below 1", f"set {name}.betas=[0.9,0.999]"
            )


def _rewards(config: Config, problems: Problems) -> None:
    if isinstance(config.reward.on_error, str) and config.reward.on_error != "stop":
        problems.add(
            f"reward.on_error={config.reward.on_error!r} must be a number or 'stop'",
            "set a score, e.g. reward.on_error=0.0, or reward.on_error=stop",
        )
    path = config.custom_reward_function.path
    if path is not None and not path.strip():
        problems.add("custom_reward_function.path is empty", "name a Python file, or pkg.mod:fn, or set null")


def _episodes(config: Config, problems: Problems) -> None:
    kept = config.episodes
    if kept.generate_only and not kept.write_to:
        problems.add(
            "episodes.generate_only=True generates groups that nobody keeps",
            "set episodes.write_to to a folder for them",
        )
    if kept.generate_only and kept.read_from:
        problems.add("episodes.generate_only and episodes.read_from leave nothing to do", "set one of them, not both")


def _run(config: Config, problems: Problems) -> None:
    trainer = config.trainer
    for what, fix in name_problems(trainer):
        problems.add(what, fix)
    placement = placement_of(config)
    report_profiling(config, list(placement.role_pool), problems)
    slots = max(sum(sizes) for sizes in placement.pools.values())
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        problems.add(
            "trainer.resume_mode=resume_path, but trainer.resume_from_path is not set",
            "set trainer.resume_from_path to a checkpoint folder, or trainer.resume_mode=auto",
        )
    if trainer.executor == "local" and slots > 1:
        problems.add(
            f"trainer.executor=local runs everything in one process, but trainer.nnodes={trainer.nnodes} x "
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} (trainer.placement) asks for {slots} workers",
            "set trainer.nnodes=1 and trainer.n_gpus_per_node=1, or trainer.executor=ray",
        )
    if trainer.executor == "local" and config.reward_model.enable_resource_pool:
        problems.add(
            "trainer.executor=local runs everything in one process, but reward_model.enable_resource_pool=True",
            "set reward_model.enable_resource_pool=False, or trainer.executor=ray",
        )
    if trainer.executor == "local" and config.distillation.enabled and config.distillation.nnodes > 0:
        problems.add(
            f"trainer.executor=local runs everything in one process, but distillation.nnodes={config.distillation.nnodes}",
            "set distillation.nnodes=0, or trainer.executor=ray",
        )
    if "timeline_json_file" in config.ray_kwargs.ray_init:
        problems.add(
            "ray_kwargs.ray_init.timeline_json_file is not an argument of ray.init",
            "set ray_kwargs.timeline_json_file",
        )


def report_profiling(config: Any, roles: list[str], problems: Problems) -> None:
    """Note a profile that nobody would write."""
    profiler = config.global_profiler
    if profiler.tool is None:
        return
    if not profiler.steps:
        problems.add(
            f"global_profiler.tool={profiler.tool}, but global_profiler.steps names no step",
            "set global_profiler.steps, e.g. to [2,5]",
        )
    sections = [profiler_section(config, role) for role in roles]
    if not any(section is not None and section.enable and (section.all_ranks or section.ranks) for section in sections):
        keys = ", ".join(f"{SECTIONS_OF_ROLES[role]}.profiler.enable" for role in roles if role in SECTIONS_OF_ROLES)
        problems.add(
            f"global_profiler.tool={profiler.tool}, but no role of this run is to be profiled",
            f"set one of {keys} to True",
        )


def check_supervised(config: Any, problems: Problems) -> None:
    """Note every impossible combination of a supervised run; fills in what is said by another name."""
    data, optim, trainer = config.data, config.optim, config.trainer
    _take_path(config.model, problems)
    for what, fix in name_problems(trainer):
        problems.add(what, fix)
    if not data.train_files:
        problems.add("data.train_files is not set", "set it to a parquet, json or jsonl file, or a list of them")
    if isinstance(config, SFTConfig):
        _check_sft(config, problems)
    elif config.model.partial_pretrain is None:
        problems.add("model.partial_pretrain is not set", "set it to the model to start from: a folder or a hub name")
    for name, most in (("train", data.train_max_samples), ("val", data.val_max_samples)):
        if most == 0:
            problems.add(f"data.{name}_max_samples=0 leaves no rows", f"set data.{name}_max_samples=-1 for all rows")
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        problems.add(f"optim.betas={optim.betas} are no AdamW betas", "give two numbers in [0, 1)")
    budget = data.max_token_len_per_gpu
    if isinstance(budget, str) and budget != "auto":
        problems.add(f"data.max_token_len_per_gpu={budget} is no budget", "set a number of tokens, or auto")
    elif isinstance(budget, int) and data.max_length > budget * config.model.ulysses_sequence_parallel_size:
        problems.add(
            f"data.max_token_len_per_gpu={budget} has no room for one row of data.max_length={data.max_length} tokens",
            f"set data.max_token_len_per_gpu={data.max_length} or more",
        )
    if (trainer.resume_mode == "resume_path") != (trainer.resume_from_path is not None):
        problems.add(
            f"trainer.resume_mode={trainer.resume_mode} and trainer.resume_from_path={trainer.resume_from_path} do not "
            "go together",
            "set trainer.resume_mode=resume_path and trainer.resume_from_path, or neither",
        )


def _take_path(model: Any, problems: Problems) -> None:
    """`model.path`, as verl's newer trainer spells it, is `model.partial_pretrain`."""
    if model.path is not None and model.partial_pretrain not in (None, model.path):
        problems.add(
            f"model.path={model.path} and model.partial_pretrain={model.partial_pretrain} are two models",
            "set one of them",
        )
    model.partial_pretrain, model.path = model.partial_pretrain or model.path, None


def _check_sft(config: SFTConfig, problems: Problems) -> None:
    data, model = config.data, config.model
    if (model.partial_pretrain is None) == (model.from_config is None):
        problems.add(
            "the run must start from either model.partial_pretrain (weights) or model.from_config (random weights)",
            "set exactly one of them",
        )
    if model.from_config is not None and model.lora_rank > 0:
        problems.add("a LoRA adapter on random weights learns nothing of use", "set model.lora_rank=0")
    if data.multiturn.enable and data.messages_key is None:
        data.messages_key = data.multiturn.messages_key
