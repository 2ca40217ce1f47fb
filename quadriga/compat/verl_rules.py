"""What of a verl command line can only be judged as a whole: sizes and layout, which change no result; `verl_meanings` has the rest."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quadriga.compat import verl_meanings as meanings
from quadriga.compat.translation import Translation
from quadriga.compat.verl_async import STALENESS, run_ahead
from quadriga.config.devices import GIB
from quadriga.config.foreign_keys import Kind
from quadriga.config.model_shape import describe, find_model_folder, read_model_shape
from quadriga.config.parallel import unplanned
from quadriga.tracking.sinks import SINKS, sink_problems

POLICY, ACTOR, ROLLOUT, REF = (f"actor_rollout_ref{name}" for name in ("", ".actor", ".rollout", ".ref"))
GPU_MEMORY = 80 * GIB
"""Of a GPU of the kind that recipes are written for."""
SEQUENCE_PARALLEL = "ulysses_sequence_parallel_size"
BUDGETS = (
    (f"{ACTOR}.ppo_max_token_len_per_gpu", ACTOR),
    (f"{REF}.log_prob_max_token_len_per_gpu", REF),
    (f"{ROLLOUT}.log_prob_max_token_len_per_gpu", ACTOR),
    ("critic.ppo_max_token_len_per_gpu", "critic"),
    ("reward_model.max_token_len_per_gpu", "reward_model"),
)
"""Token budgets, and the section whose sequence parallelism multiplies them in verl."""
NEW_SFT = ("engine", "checkpoint", "model.path", "optim.lr_scheduler_type", "data.pad_mode", "data.use_dynamic_bsz")
"""Keys, or their first words, that only verl's newer supervised trainer has."""

OWN_MANAGERS = (
    *(
        (f"{section}.source", f"{section}.module.path", f"{section}.name", f"{section}.module.name")
        for section in ("reward.reward_manager", "reward_manager")
    ),
    tuple(f"reward_model.reward_loop_{name}" for name in ("source", "module_path", "class_name")),
)
"""Spellings of a reward manager of the user's own: where it comes from, its module, and keys that name its class."""

Rule = Callable[[Translation], None]


def rules_for(kind: Kind) -> tuple[Rule, ...]:
    if kind == "sft":
        return (share_rows_by_gpu, drop_sinks_that_cannot_start, choose_warm_up, meanings.choose_optimizer)
    return (
        run_ahead,
        drop_sinks_that_cannot_start,
        share_rows_by_gpu,
        make_room_in_budgets,
        fit_rows_per_pass,
        check_model_length,
        offload_as_policy,
        keep_models_whole,
        check_generation_batch,
        choose_warm_up,
        choose_clip_range,
        name_own_manager,
        *meanings.RULES,
    )


def assumed_defaults(command: Translation, wanted: bool | None) -> dict[str, Any]:
    """verl's defaults for what the command line leaves open, where they are not Quadriga's."""
    if command.kind == "sft" and wanted is None:
        wanted = any(key == new or key.startswith(f"{new}.") for key in command.given for new in NEW_SFT)
    held = {} if wanted is False else dict(command.table.defaults)
    if command.kind == "rl":
        held |= meanings.defaults_by_choice(command)
    return {path: value for path, value in held.items() if path not in command.settings}


def _gpus(command: Translation) -> int:
    try:
        return int(command.get("trainer.n_gpus_per_node") or 1) * int(command.get("trainer.nnodes") or 1)
    except (TypeError, ValueError):
        return 1


def _parallel(command: Translation, section: str) -> int:
    """Over how many GPUs verl would split a sequence in this section."""
    names = [
        f"{section}.{SEQUENCE_PARALLEL}",
        f"{section}.fsdp_config.{SEQUENCE_PARALLEL}",
        f"{section}.fsdp.{SEQUENCE_PARALLEL}",
    ]
    if section == REF:
        names += [f"{ACTOR}.{SEQUENCE_PARALLEL}", f"{ACTOR}.fsdp_config.{SEQUENCE_PARALLEL}"]
    return next((int(command.given[name]) for name in names if isinstance(command.given.get(name), int)), 1)


def share_rows_by_gpu(command: Translation) -> None:
    """A global micro-batch is divided by the number of GPUs, of which verl counts those that share a sequence once."""
    if command.kind == "sft":
        import os

        gpus = int(os.environ.get("WORLD_SIZE", "1"))
    else:
        gpus = _gpus(command)
    for path in sorted(command.shared & set(command.settings)):
        rows = command.settings[path]
        if isinstance(rows, int):
            workers = max(1, gpus // _parallel(command, path.rpartition(".")[0]))
            command.set(path, max(1, rows // workers), command.source[path], f"per GPU, of {gpus}")


def make_room_in_budgets(command: Translation) -> None:
    """A budget below the longest possible sequence is raised to it: it changes how rows are cut, not the result."""
    lengths = [command.get("data.max_prompt_length"), command.get("data.max_response_length")]
    if not all(isinstance(length, int) for length in lengths):
        return
    for path, section in BUDGETS:
        budget, least = command.settings.get(path), -(-sum(lengths) // _parallel(command, section))
        if isinstance(budget, int) and budget < least:
            command.set(path, least, command.source[path], "one sequence of the greatest length must fit")


def fit_rows_per_pass(command: Translation) -> None:
    """More rows per pass than a GPU gets of a mini-batch are as many as it gets."""
    mini, n = command.get(f"{ACTOR}.ppo_mini_batch_size"), command.get(f"{ROLLOUT}.n")
    for section in (ACTOR, "critic"):
        path = f"{section}.ppo_micro_batch_size_per_gpu"
        own_mini = command.settings.get(f"{section}.ppo_mini_batch_size", mini)
        rows = command.settings.get(path)
        if all(isinstance(number, int) for number in (rows, own_mini, n)):
            most = max(1, own_mini * n * _parallel(command, section) // _gpus(command))
            if rows > most:
                command.set(path, most, command.source[path], f"a GPU gets {most} rows of a mini-batch")


def check_model_length(command: Translation) -> None:
    key = f"{ROLLOUT}.max_model_len"
    room, prompt, response = (
        command.given.get(key),
        command.get("data.max_prompt_length"),
        command.get("data.max_response_length"),
    )
    if isinstance(room, int) and isinstance(prompt, int) and isinstance(response, int) and room < prompt + response:
        why = f"responses would be cut below data.max_response_length={response} where a prompt is long"
        command.settings.pop(key, None)
        command.refuse(key, why, f"set data.max_prompt_length and data.max_response_length to {room} together")


def offload_as_policy(command: Translation) -> None:
    """FSDP2's offload policy keeps weights, gradients and optimiser in host memory."""
    for section in (ACTOR, "critic"):
        for spelling in ("fsdp_config", "fsdp", "model.fsdp_config"):
            key = f"{section}.{spelling}.offload_policy"
            if command.given.get(key) is True:
                command.set(f"{section}.fsdp_config.optimizer_offload", True, key)
                command.set(f"{section}.fsdp_config.param_offload", True, key, "and optimizer_offload=True")


def keep_models_whole(command: Translation) -> None:
    """Recipes set vLLM's tensor parallel size by habit, for models that fit one GPU many times over, and it changes no result.

    It is kept where the weights would fill half of a large GPU, which other models share; a set never spans two nodes.
    """
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    size, model = command.settings.get(key, 1), str(command.get(f"{POLICY}.model.path"))
    if not isinstance(size, int) or size <= 1:
        return
    weights = 2 * parameters_of(model)
    if weights <= GPU_MEMORY // 2:
        unknown = f"; how large {model} is cannot be told: if it does not fit one GPU, set it in what --write gives"
        command.set_aside(key, f"layout only: the same policy, one replica per GPU{'' if weights else unknown}")
        return
    described = describe(model)
    if described and (cannot := unplanned(described.get("model_type"))):
        command.set_aside(key, f"layout only; models of this type cannot be shared out: {cannot}")
        return
    why = f"{weights / 1e9:.0f} GB of weights do not fit one GPU beside the others"
    slots = command.get("trainer.n_gpus_per_node")
    if isinstance(slots, int) and slots > 1 and slots % size:
        size = next(t for t in range(min(size, slots), 0, -1) if slots % t == 0)
        command.set(key, size, key, f"{why}; a set never spans two nodes")
    elif slots == 1:
        command.set_aside(key, "layout only: there is one GPU")
    else:
        command.say(key, why)


def parameters_of(model: str) -> int:
    """How many weights a model has: by its files, where they are here, else by its name (`Qwen2.5-72B`); 0: unknown."""
    folder = find_model_folder(model)
    if folder is not None:
        try:
            return read_model_shape(folder).parameters
        except ValueError:
            return 0
    sizes = re.findall(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)b(?![a-z])", Path(model).name.lower())
    return int(1e9 * max(map(float, sizes), default=0))


def check_generation_batch(command: Translation) -> None:
    """Without dynamic sampling verl trains on what it generates: then data.gen_batch_size is the batch size."""
    key, size = "data.gen_batch_size", command.given.get("data.gen_batch_size")
    if (
        STALENESS in command.settings
        or size is None
        or size == command.get("data.train_batch_size")
        or command.get("algorithm.filter_groups.enable")
    ):
        return
    command.refuse(
        key, "without dynamic sampling verl trains on that many prompts", f"set data.train_batch_size={size}"
    )


def drop_sinks_that_cannot_start(command: Translation) -> None:
    """verl logs to wandb unless told otherwise. A sink that this machine has no package for changes no result."""
    key = "trainer.logger"
    names = command.settings.get(key)
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list):
        return
    lacking = {name: next(iter(sink_problems([name])), None) for name in names if name in SINKS}
    reasons = [
        f"{problem[0].partition(', but ')[2] or problem[0]} {problem[1]}" for problem in lacking.values() if problem
    ]
    if reasons:
        kept = [name for name in names if not lacking.get(name)]
        note = f"{'; '.join(reasons)}. Every figure is in metrics.jsonl"
        command.set(key, kept, command.source[key], note)


def choose_warm_up(command: Translation) -> None:
    """A number of warm-up steps, also 0, wins over a share of all steps."""
    for section in (f"{ACTOR}.optim", "critic.optim", "optim"):
        steps, ratio = f"{section}.lr_warmup_steps", f"{section}.lr_warmup_steps_ratio"
        if isinstance(command.settings.get(steps), int) and command.settings[steps] >= 0 and ratio in command.settings:
            command.set_aside(command.source[ratio], f"{steps} decides")


def choose_clip_range(command: Translation) -> None:
    """verl's clip_ratio is replaced by clip_ratio_low and clip_ratio_high, which are 0.2 there unless set."""
    key = f"{ACTOR}.clip_ratio"
    if key in command.settings and not {f"{key}_low", f"{key}_high"} & set(command.settings):
        note = "honoured here; verl's usual losses read clip_ratio_low and clip_ratio_high, which stay 0.2"
        command.set(key, command.settings[key], key, note)


def name_own_manager(command: Translation) -> None:
    """A reward manager from a module of the user's own has one name here, module:class."""
    given, manager = command.given, "reward_model.reward_manager"
    for source, path, *names in OWN_MANAGERS:
        module, name = given.get(path), next((given[key] for key in names if given.get(key)), None)
        if given.get(source) != "importlib" or not module or not name:
            continue  # the rows of the table refuse what is there
        for key in (source, path, *names):
            if key in given:
                command.set_aside(key, f"part of {manager}")
        command.set(manager, f"{str(module).removeprefix('pkg://')}:{name}", path, "a class of your own")
