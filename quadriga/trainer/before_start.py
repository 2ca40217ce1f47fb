"""What can be known to be missing on this machine before anything is started: packages, files, the model, the run directory.

All of it is found again where it is used; here it is found in a second, and told together with the other problems of the
configuration. No heavy library is loaded for it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quadriga.config.devices import detect_local_device
from quadriga.config.host_memory import host_items, require_host_memory
from quadriga.config.load import require_adapter
from quadriga.config.memory import estimate_memory
from quadriga.config.needs import is_judged_by_itself, need_critic
from quadriga.config.placement import placement_of
from quadriga.config.schema import Config
from quadriga.config.supervised_schema import SFTConfig
from quadriga.controller.placement_env import refuse_unknown_interfaces
from quadriga.errors import ConfigError, DataError, QuadrigaError, ResourceError, refuse_hidden_packages
from quadriga.host import usable_memory
from quadriga.tracking.sinks import sink_problems

if TYPE_CHECKING:
    from quadriga.workers.base import WorkerReport  # brings torch, which the driver does without

SURELY_TOO_MUCH = 1.15
"""Of the memory of a machine with CPUs: by so much the estimate may err."""
LOCK_WAIT_S = 2.0
"""A run that was just stopped may still be ending."""


def problems_here(config: Config) -> Iterator[tuple[str, str]]:
    """What stands in the way of this run, each with its fix."""
    yield from sink_problems(config.trainer.logger)
    if config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS") not in (None, "", "local"):
        return  # the machines of a cluster may see other files than this one
    data, policy = config.data, config.actor_rollout_ref
    ours = data.custom_cls.path is None  # else the files may be anything
    yield from _problems_of(
        refuse_hidden_packages,  # Ray puts the working folder first on its workers' path
        _interfaces,
        lambda: _files(data.train_files if ours else []),
        lambda: _files(data.val_files if ours else []),
        lambda: _model(policy.model.path),
        lambda: _model(policy.model.tokenizer_path, tokenizer_only=True),
        lambda: _model(config.critic.model.path if need_critic(config) else None),
        lambda: _adapter(policy.model.lora_adapter_path, "actor_rollout_ref.model.lora_adapter_path"),
        lambda: _reward_model(config),
        lambda: _memory(config),
        lambda: _engine(config),
        lambda: _first_prompt(config) if ours else None,
        lambda: _reward_function(config),
        lambda: _run_directory(config.trainer.default_local_dir),
    )


def supervised_problems_here(config: Any) -> Iterator[tuple[str, str]]:
    """The same for a run of sft, rm or dpo."""
    yield from sink_problems(config.trainer.logger)
    data, model = config.data, config.model
    yield from _problems_of(
        refuse_hidden_packages,
        _interfaces,
        lambda: _files(data.train_files or []),
        lambda: _files(data.val_files or []),
        lambda: _model(model.partial_pretrain),
        lambda: _model(model.tokenizer_path, tokenizer_only=True),
        lambda: _adapter(getattr(model, "lora_adapter_path", None), "model.lora_adapter_path"),
        lambda: _model(getattr(model, "from_config", None)),
        lambda: _first_example(config),
        lambda: _run_directory(config.trainer.default_local_dir),
    )


def _problems_of(*checks: Callable[[], None]) -> Iterable[tuple[str, str]]:
    """What each of them raises, once."""
    problems: dict[tuple[str, str], None] = {}
    for check in checks:
        try:
            check()
        except QuadrigaError as error:
            problems[error.what, error.fix] = None
        except OSError as error:
            name = error.filename or "a file that this run needs"
            problems[f"{name} cannot be read: {error.strerror or error}", "check who may read it, and its disk"] = None
    return problems


def _interfaces() -> None:
    known = [name for _, name in socket.if_nameindex()]
    refuse_unknown_interfaces(os.environ.get("GLOO_SOCKET_IFNAME"), known, "this machine")


def _files(files: str | list[str]) -> None:
    from quadriga.data.files import find_files

    find_files(files)


def _model(path: str | None, tokenizer_only: bool = False) -> None:
    if path is not None:
        from quadriga.models.source import resolve_model_path

        resolve_model_path(path, tokenizer_only)


def _reward_model(config: Config) -> None:
    if is_judged_by_itself(config):
        raise ConfigError(
            "reward_model.enable=True, but reward_model.model.path is the policy itself",
            "set reward_model.model.path to a sequence-classification model with one label",
        )
    _model(config.reward_model.model.path if config.reward_model.enable else None)


def _adapter(path: str | None, key: str) -> None:
    if path is not None:
        require_adapter(path, key)


def _memory(config: Config) -> None:
    """Whether this machine has the memory for what its workers must keep in it, where all of them run here."""
    placement, device = placement_of(config), config.trainer.device or detect_local_device()
    if any(len(sizes) > 1 for sizes in placement.pools.values()):
        return
    total, available = usable_memory()
    if device != "cpu":
        workers = {role: placement.slots(role) for role in placement.role_pool}
        require_host_memory(host_items(config, device), workers, True, available, "this machine")
        return
    memory = estimate_memory(config, device)
    needed = sum(pool.peak[1] * sum(placement.pools[pool.pool]) for pool in memory)
    if needed > SURELY_TOO_MUCH * total:
        phase, _ = max((pool.peak for pool in memory), key=lambda peak: peak[1])
        raise ResourceError(
            f"the workers need about {needed / 1e9:.0f} GB in the phase '{phase}', and this machine has {total / 1e9:.0f} GB",
            "see quadriga plan with the same keys: use a smaller model or fewer tokens "
            "(actor_rollout_ref.actor.ppo_max_token_len_per_gpu), or a machine with more memory",
        )


def _engine(config: Config) -> None:
    if config.actor_rollout_ref.rollout.name == "vllm":
        from quadriga.config.vllm import require_usable

        require_usable()


def _first_prompt(config: Config) -> None:
    """Whether the first training row has a prompt that can be rendered."""
    data, model = config.data, config.actor_rollout_ref.model
    where, row = _first_row(data.train_files)
    if row is None:
        return
    prompt = _column(row, data.prompt_key, where, "data.prompt_key to the column with the prompts")
    _can_be_rendered(prompt, f"{where}, column {data.prompt_key!r}", data, model.tokenizer_path or model.path)


def _first_example(config: Any) -> None:
    """Whether the first training row has what is learnt from, and can be rendered."""
    data, model = config.data, config.model
    where, row = _first_row(data.train_files)
    if row is None:
        return
    tokenizer = model.tokenizer_path or model.partial_pretrain or getattr(model, "from_config", None) or ""
    if not isinstance(config, SFTConfig):
        keys = [data.chosen_key, data.rejected_key]
    else:
        keys = [data.prompt_key, data.response_key] if data.messages_key is None else [data.messages_key]
    for key in keys:
        value = _column(row, key, where, "the keys in data.… to the columns that hold the examples")
        if not isinstance(value, Mapping):  # else data.prompt_dict_keys lead further
            _can_be_rendered(value, f"{where}, column {key!r}", data, tokenizer)


def _first_row(files: str | list[str] | None) -> tuple[str, Mapping[str, Any] | None]:
    """Its name for messages, and the row, where it can be had without reading the rest."""
    from quadriga.data.files import first_row

    first = files if isinstance(files, str) else next(iter(files or ()), None)
    return f"{first}, row 0", None if first is None else first_row(first)


def _column(row: Mapping[str, Any], key: str, where: str, fix: str) -> Any:
    if row.get(key) is None:
        raise DataError(f"{where} has no column {key!r}, only {', '.join(row)}", f"set {fix}")
    return row[key]


def _can_be_rendered(prompt: Any, where: str, data: Any, tokenizer: str) -> None:
    """DataError unless `prompt` is text, or a chat and there is a template for it."""
    from quadriga.data.chat import check_messages

    if isinstance(prompt, str):
        return
    check_messages(prompt, where)
    if data.chat_template is None and _has_template(tokenizer) is False:
        raise DataError(
            f"{where} is a chat, but the tokenizer of {tokenizer} has no chat template",
            "set data.chat_template to a Jinja template or a file with one, or make the prompts plain strings",
        )


def _has_template(path: str) -> bool | None:
    """Whether the tokenizer brings a chat template; None where that cannot be told without loading it."""
    from quadriga.models.source import resolve_model_path

    folder = resolve_model_path(path, tokenizer_only=True)
    if not isinstance(folder, Path):
        return None
    if any(
        (folder / name).exists() for name in ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    ):
        return True
    try:
        settings: Any = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return bool(settings.get("chat_template")) if isinstance(settings, dict) else None


def _reward_function(config: Config) -> None:
    from quadriga.rewards.functions import reward_function

    custom = config.custom_reward_function
    if custom.path:
        reward_function(custom.path, custom.name)


def _run_directory(name: str) -> None:
    """It can be written to, and no other run is at it. What is not there yet is not made: the run may have other problems."""
    from quadriga.checkpoint.store import CheckpointStore
    from quadriga.tracking.run_directory import unwritable
    from quadriga.tracking.run_lock import RunLock

    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        if folder.exists():
            raise unwritable(folder, "there is a file of that name")
        above = next(path for path in folder.parents if path.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise unwritable(
                folder, f"{above} is no folder" if not above.is_dir() else f"{above} is not yours to write to"
            )
        return
    lock = RunLock(folder / ".lock")
    try:
        lock.acquire(LOCK_WAIT_S)
        lock.release()
    except OSError as error:
        raise unwritable(folder, error.strerror or str(error)) from None
    CheckpointStore(folder / "checkpoints").refuse_folder_called_latest()


def auto_set_device(config: Any) -> None:
    """Fill in `config.trainer.device` where the user left it open; an explicit value is obeyed.

    On an existing cluster the driver's own machine says little about the workers', so the choice is left to `run_ppo`,
    which asks the cluster.
    """
    trainer = getattr(config, "trainer", None)
    if trainer is None or getattr(trainer, "device", None) is not None:
        return
    ray_init = getattr(getattr(config, "ray_kwargs", None), "ray_init", None) or {}
    if ray_init.get("address") or os.environ.get("RAY_ADDRESS"):
        return
    trainer.device = detect_local_device()


def describe_workers(
    reports: Sequence[WorkerReport], pool_of: Mapping[Any, str], sizes: Mapping[str, Sequence[int]]
) -> str:
    """The pools with their slots, the roles in each, and the processes that hold them."""
    pools = {str(role): pool for role, pool in pool_of.items()}
    lines = []
    for pool, slots in sizes.items():
        members = [r for r in reports if pools[r.role] == pool]
        roles = ", ".join(dict.fromkeys(r.role for r in members))
        places = {f"{r.host} pid {r.pid}": None for r in members}
        shown = ", ".join(list(places)[:4]) + (f", … {len(places) - 4} more" if len(places) > 4 else "")
        kind = f"{members[0].device}, {members[0].collectives}, {members[0].threads} threads" if members else "unused"
        lines.append(f"{pool} {list(slots)}: {roles} in {len(places)} processes ({kind}): {shown}")
    return "\n".join(lines)
