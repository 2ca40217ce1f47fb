"""Load a configuration, from Hydra, a YAML file or a dict, into the typed `Config`, or say what is wrong with it.

`load_config` is the only door: every problem of a configuration is found here, before any process starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quadriga.config.check import check
from quadriga.config.command_line import CONFIG_DIR, compose, screen_overrides
from quadriga.config.key_problems import HYDRA_ONLY, report_unknown, report_wrong_value
from quadriga.config.schema import Config
from quadriga.config.typed import Problems, all_keys, build, default_of, default_values
from quadriga.errors import ConfigError

__all__ = ["CONFIG_DIR", "as_plain_dict", "compose", "load_config", "screen_overrides"]

FOLLOWS = re.compile(r"\$\{([\w.]+)\}")


def load_config(source: DictConfig | Mapping[str, Any] | Config) -> Config:
    """The typed configuration, fully checked. `source` need not be complete: absent keys take their defaults.

    Raises:
        ConfigError: names every unknown key with the nearest valid one, every wrong type or value, every value that
            would have no effect, and every impossible combination, each with its fix.
    """
    problems = Problems()
    merged = _merge(default_values(Config), _as_nested(source), problems)
    problems.raise_if_any()
    values = _resolve(merged)

    def wrong(path: str, value: Any, error: ValueError) -> None:
        if not _follows_another_key(path, values):  # else the other key is reported already
            report_wrong_value(path, value, error, problems)

    config = build(Config, values, lambda path, value: report_unknown(path, value, problems), wrong)
    if not problems.found:
        check(config, _keys_set_by_user(asdict(config)), problems)
    problems.raise_if_any()
    return config


def as_plain_dict(config: Config) -> dict[str, Any]:
    """A typed configuration as plain nested values, e.g. to write it as YAML; `load_config` of it gives it back."""
    return asdict(config)


def _as_nested(source: Any) -> dict[str, Any]:
    """`source` as plain nested dicts, interpolations unresolved."""
    if isinstance(source, Config):
        return asdict(source)
    if not isinstance(source, (DictConfig, Mapping)):
        raise ConfigError(
            f"a configuration must be a DictConfig, a mapping or a Config, got {type(source).__name__}",
            "read a file with OmegaConf.load(path)",
        )
    try:
        user = source if isinstance(source, DictConfig) else OmegaConf.create(dict(source))
        return OmegaConf.to_container(user, resolve=False)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(f"the configuration cannot be read: {_first_line(error)}", "correct that value") from None


def _merge(defaults: dict[str, Any], user: dict[str, Any], problems: Problems, prefix: str = "") -> dict[str, Any]:
    """`user` over `defaults`, section by section; a free-form key is replaced as a whole."""
    merged = dict(defaults)
    for name, value in user.items():
        path = f"{prefix}{name}"
        default = defaults.get(name)
        if not isinstance(default, dict) or path in all_keys(Config):
            merged[name] = value
        elif isinstance(value, dict):
            merged[name] = _merge(default, value, problems, path + ".")
        elif value is not None:  # `trainer:` with nothing below it reads as null
            problems.add(
                f"{path} must be a section with keys, got {value!r}",
                f"write {path}.<key>=<value>; its keys: {', '.join(default)}",
            )
    return merged


def _resolve(nested: dict[str, Any]) -> dict[str, Any]:
    foreign = {name: nested[name] for name in HYDRA_ONLY if name in nested}
    try:
        ours = OmegaConf.create({name: value for name, value in nested.items() if name not in foreign})
        values = OmegaConf.to_container(ours, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        where = error.full_key or "the configuration"
        raise ConfigError(f"{where}: {_first_line(error)}", f"set {where} to a value") from None
    return {**values, **foreign}  # type: ignore[dict-item]


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _keys_set_by_user(values: dict[str, Any]) -> set[str]:
    """Dotted keys with another value than the one they would have had by themselves.

    A key whose default follows another key counts only when it departs from it.
    """
    return {
        path
        for path in all_keys(Config)
        if _at(values, path) != default_of(Config, path) and not _follows_another_key(path, values)
    }


def _follows_another_key(path: str, values: dict[str, Any]) -> bool:
    """Whether the key's default is `${other}` and it has the value of that other key."""
    default = default_of(Config, path)
    follows = FOLLOWS.fullmatch(default) if isinstance(default, str) else None
    return follows is not None and _at(values, follows[1]) == _at(values, path)


def _at(values: dict[str, Any], path: str) -> Any:
    for part in path.split("."):
        values = values[part]
    return values
