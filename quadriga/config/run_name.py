"""What a run is called when its user does not say: after its model and the time, so that no two runs share a directory.

A name of the user's own is a name to come back to: the same command goes on there. A run without one is a new run each time.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from quadriga.errors import ConfigError

_NAME, PROJECT = "trainer.experiment_name", "trainer.project_name"


def name_run(values: dict[str, Any], model: Any) -> None:
    """Fill in `trainer.experiment_name` where it is null: the name of the folder that the user chose, else a new one."""
    trainer = values["trainer"]
    if trainer.get("experiment_name") is not None:
        return
    folder = str(trainer["default_local_dir"])
    if _NAME in folder:
        trainer["experiment_name"] = new_name(model)
    else:
        trainer["experiment_name"] = os.path.basename(os.path.abspath(os.path.expanduser(folder))) or "run"


def is_new(config: Any) -> bool:
    """Whether `name_run` gives this configuration, as its user wrote it, a new name."""
    written: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else config
    trainer = written.get("trainer") or {}
    return trainer.get("experiment_name") is None and _NAME in str(trainer.get("default_local_dir") or _NAME)


def new_name(model: Any) -> str:
    """`arithmetic-20261117-073000-3fa9c1`; the end is drawn, so that runs which start at the same moment have two names."""
    last = re.split(r"[/:\\]", str(model or "").rstrip("/"))[-1]
    stem = re.sub(r"[^\w.-]+", "_", last) or "run"
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def name_problems(trainer: Any) -> Iterator[tuple[str, str]]:
    """What is wrong with the names that make the run directory's path."""
    for key, name in ((PROJECT, trainer.project_name), (_NAME, trainer.experiment_name)):
        if not name or name.startswith("/") or {".", ".."} & set(name.split("/")) or not name.isprintable():
            yield (
                f"{key}={name!r} is no name: it must be a folder's, below outputs/",
                "use letters, digits, - and _; trainer.default_local_dir puts the run anywhere else",
            )


def with_run_name(config: Any, name: str) -> Any:
    """`config` with `trainer.experiment_name` set; for all who load it after the one who named the run."""
    named = config.copy() if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    OmegaConf.update(named, _NAME, name, force_add=True)
    return named


def refuse_another_task(before: dict[str, Any], now: dict[str, Any], keys: tuple[str, ...], folder: Path) -> None:
    """ConfigError where a run would go on from a checkpoint of another model or of other data, which it cannot mean.

    Args:
        before, now: the configuration in the checkpoint, and this one, as nested dicts.
        keys: what must be the same.
    """
    different = [(key, _at(before, key), _at(now, key)) for key in keys]
    changed = [f"{key}: {old} → {new}" for key, old, new in different if _places(old) != _places(new)]
    if changed:
        raise ConfigError(
            f"{folder} holds a run of another model or task, and would be resumed:\n  " + "\n  ".join(changed),
            f"give this run a name of its own, {_NAME}=…; or start anew there with trainer.resume_mode=disable, or go on "
            "from a checkpoint on purpose with trainer.resume_mode=resume_path trainer.resume_from_path=…",
        )


def nothing_left(checkpoint: Path, step: int, total_steps: int) -> str:
    """What to say of a run that is resumed at or after its last step."""
    return (
        f"nothing is left to do: {checkpoint} was written after step {step}, and the run has {total_steps} steps. "
        "To train on, raise trainer.total_training_steps (or trainer.total_epochs); to train anew, give it another "
        "trainer.experiment_name"
    )


def _at(values: dict[str, Any], key: str) -> Any:
    value: Any = values
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _places(value: Any) -> list[str]:
    """Paths, however they are spelled."""
    places = value if isinstance(value, (list, tuple)) else [value]
    expanded = [os.path.expandvars(os.path.expanduser(str(place))) for place in places]
    return [os.path.realpath(place) if os.path.exists(place) else place for place in expanded]
