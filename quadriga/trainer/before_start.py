"""What can be known to be missing on this machine before anything is started: packages, files, the model, the run directory.

All of it is found again where it is used; here it is found in a second, and told together with the other problems of the
configuration. No heavy library is loaded for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quadriga.config.schema import Config
from quadriga.errors import DataError, QuadrigaError, refuse_hidden_packages
from quadriga.tracking.sinks import sink_problems

LOCK_WAIT_S = 2.0
"""A run that was just stopped may still be ending."""


def problems_here(config: Config) -> Iterator[tuple[str, str]]:
    """What stands in the way of this run, each with its fix."""
    yield from sink_problems(config.trainer.logger)
    if config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS") not in (None, "", "local"):
        return  # the machines of a cluster may see other files than this one
    checks: tuple[Callable[[Config], None], ...] = (
        lambda config: refuse_hidden_packages(),  # Ray puts the working folder first on its workers' path
        lambda config: _files(config, config.data.train_files),
        lambda config: _files(config, config.data.val_files),
        _model,
        _engine,
        _first_row,
        _reward_function,
        _run_directory,
    )
    told: list[tuple[str, str]] = []
    for check in checks:
        try:
            check(config)
        except QuadrigaError as error:
            if (error.what, error.fix) not in told:
                told.append((error.what, error.fix))
    yield from told


def _files(config: Config, files: str | list[str]) -> None:
    from quadriga.data.files import find_files

    if config.data.custom_cls.path is None:  # else they may be anything
        find_files(files)


def _model(config: Config) -> None:
    from quadriga.models.source import resolve_model_path

    resolve_model_path(config.actor_rollout_ref.model.path)
    if config.reward_model.enable:
        resolve_model_path(config.reward_model.model.path)


def _engine(config: Config) -> None:
    if config.actor_rollout_ref.rollout.name == "vllm":
        from quadriga.config.installed_vllm import require_usable

        require_usable()


def _first_row(config: Config) -> None:
    """Whether the first training row has a prompt that can be rendered, and a source that can be scored."""
    from quadriga.data.files import first_row
    from quadriga.data.messages import check_messages

    data = config.data
    files = [data.train_files] if isinstance(data.train_files, str) else list(data.train_files)
    row = first_row(files[0]) if files and data.custom_cls.path is None else None
    if row is None:
        return
    where = f"{files[0]}, row 0"
    prompt = row.get(data.prompt_key)
    if prompt is None:
        raise DataError(
            f"{where} has no column {data.prompt_key!r}, only {', '.join(row)}",
            "set data.prompt_key to the column with the prompts",
        )
    if not isinstance(prompt, str):
        check_messages(prompt, f"{where}, column {data.prompt_key!r}")
        model = config.actor_rollout_ref.model
        if data.chat_template is None and _has_template(model.tokenizer_path or model.path) is False:
            raise DataError(
                f"{where} is a chat, but the tokenizer of {model.tokenizer_path or model.path} has no chat template",
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


def _run_directory(config: Config) -> None:
    """It can be written to, and no other run is at it."""
    from quadriga.checkpoint.store import CheckpointStore
    from quadriga.tracking.run_directory import RunDirectory
    from quadriga.tracking.run_lock import RunLock

    folder = RunDirectory(config.trainer.default_local_dir)
    lock = RunLock(folder.path / ".lock")
    lock.acquire(LOCK_WAIT_S)
    lock.release()
    CheckpointStore(folder.checkpoints).refuse_folder_called_latest()
