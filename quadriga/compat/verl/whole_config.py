"""A configuration of verl's with every key in it, and what of one says something else than verl's defaults.

`config/ppo_trainer.yaml` has verl's keys with their defaults. A recipe composes its own file over it (`hydra.searchpath:
[pkg://verl.trainer.config]`), and reads keys that Quadriga has no use for; what reaches Quadriga is the difference, as if it
had been a command line.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from quadriga.compat.translation import flattened
from quadriga.config.command_line import HYDRA_ONLY

FOLDER = Path(__file__).parent / "config"
NAMES_OF_A_RUN = ("trainer.project_name", "trainer.experiment_name", "trainer.default_local_dir")
"""Always kept: every process of a run must know the same directory."""


@cache
def _defaults() -> DictConfig:
    loaded = OmegaConf.load(FOLDER / "ppo_trainer.yaml")
    assert isinstance(loaded, DictConfig)
    return loaded


@cache
def _plain_defaults() -> dict[str, Any]:
    """Dotted key → default as it is written, maybe `${another.key}`."""
    return flattened(OmegaConf.to_container(_defaults(), resolve=False))  # type: ignore[arg-type]


def completed(config: Any) -> DictConfig:
    """A copy of `config` in which every key of verl's that it leaves open has verl's default."""
    return OmegaConf.merge(_defaults(), _plain(config))  # type: ignore[return-value]


def differences(config: Any) -> dict[str, Any]:
    """Dotted key → value, of what `config` says otherwise than verl's defaults, and the names of the run if it has any."""
    given = flattened(OmegaConf.to_container(OmegaConf.create(_plain(config)), resolve=True))  # type: ignore[arg-type]
    written = _plain_defaults()
    followers = {key for key, value in written.items() if isinstance(value, str) and "${" in value}
    around = OmegaConf.merge(_defaults(), _nested({key: v for key, v in given.items() if key not in followers}))
    defaults = {**written, **{key: OmegaConf.select(around, key) for key in followers & set(given)}}
    return {
        key: value
        for key, value in given.items()
        if value != "???" and (key in NAMES_OF_A_RUN or key not in defaults or not _same(defaults[key], value))
    }


def _same(default: Any, value: Any) -> bool:
    """Type and value, since 1 == True in Python; 0 and 0.0 are one number."""
    return default == value and isinstance(default, bool) == isinstance(value, bool)


def _plain(config: Any) -> Any:
    """`config` as plain values without what is Hydra's; `${…}` stays."""
    plain = OmegaConf.to_container(config, resolve=False) if OmegaConf.is_config(config) else dict(config)
    return {str(name): value for name, value in dict(plain).items() if name not in HYDRA_ONLY}  # type: ignore[arg-type]


def _nested(keys: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in keys.items():
        *sections, last = key.split(".")
        node = nested
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return nested
