"""Load a configuration, from Hydra, a YAML file or a dict, into its typed schema, or say what is wrong with it.

`load_config` is the only door, for every kind of run: every problem of a configuration is found here, before any process starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quadriga.config.check import check, check_supervised
from quadriga.config.command_line import (
    CONFIG_DIR,
    HYDRA_ONLY,
    LIBRARIES,
    compose_from_arguments,
    compose_screened,
    libraries_of,
    readable_overrides,
    report_no_section,
    report_unknown,
    report_wrong_value,
)
from quadriga.config.no_effect import report_values_without_effect
from quadriga.config.run_name import name_run
from quadriga.config.schema import Config
from quadriga.config.typed import (
    Problems,
    all_keys,
    build,
    default_of,
    default_values,
    follows_another_key,
    keys_set,
    value_at,
)
from quadriga.errors import ConfigError
from quadriga.registry import import_libraries

__all__ = ["CONFIG_DIR", "as_plain_dict", "compose", "load_config", "screen_overrides"]

Schema = TypeVar("Schema")


def load_config(
    source: DictConfig | Mapping[str, Any] | Schema,
    schema: type[Schema] = Config,  # type: ignore[assignment]
    also_check: Callable[[Schema], Iterable[tuple[str, str]]] | None = None,
) -> Schema:
    """The typed configuration, fully checked. `source` need not be complete: absent keys take their defaults.

    Args:
        source: a DictConfig, a mapping, or a configuration of type `schema`.
        schema: `Config` of PPO-family runs, or one of `supervised_schema.SCHEMAS`.
        also_check: gives further problems and their fixes, such as those of this machine, to be told with the others.

    Raises:
        ConfigError: names every unknown key with the nearest valid one, every wrong type or value, every value that
            would have no effect, and every impossible combination, each with its fix.
    """
    problems = Problems()
    config = _find_all(source, problems, schema, also_check)
    problems.raise_if_any()
    return config


def _find_all(
    source: Any, problems: Problems, schema: type, also_check: Callable[[Any], Iterable[tuple[str, str]]] | None
) -> Any:
    config = find_problems(source, problems, schema)
    if also_check is not None:
        problems.add_all(Problems(list(also_check(config))))
    return config


def find_problems(
    source: DictConfig | Mapping[str, Any] | Schema,
    problems: Problems,
    schema: type[Schema] = Config,  # type: ignore[assignment]
) -> Schema:
    """Like `load_config`, but what is wrong with single keys and their combinations goes to `problems`."""
    config: Any = typed_config(source, problems, schema)
    set_by_user = keys_set_by_user(config)
    section = "actor_rollout_ref.model" if schema is Config else "model"
    model = config.actor_rollout_ref.model if schema is Config else config.model
    if getattr(model, "lora_adapter_path", None):
        take_adapter(model, section, problems)
    of_the_whole = Problems()
    report_values_without_effect(config, set_by_user, of_the_whole)
    if schema is Config:
        check(config, of_the_whole)
    else:
        check_supervised(config, of_the_whole)
    problems.add_all(of_the_whole)
    return config


def typed_config(
    source: DictConfig | Mapping[str, Any] | Schema,
    problems: Problems,
    schema: type[Schema] = Config,  # type: ignore[assignment]
) -> Schema:
    """The typed configuration; a key with a wrong value keeps its default, and combinations are not looked at."""
    merged = _merge(default_values(schema), _as_nested(source, schema), problems, schema)
    if schema is Config:
        import_libraries(merged["actor_rollout_ref"]["model"]["external_lib"], LIBRARIES)
    model = merged["actor_rollout_ref"]["model"] if schema is Config else merged["model"]
    name_run(merged, model.get("partial_pretrain") or model.get("path") or model.get("from_config"))
    values = _resolve(merged)

    refused: list[str] = []

    def wrong(path: str, value: Any, error: ValueError) -> None:
        refused.append(path)
        problems.doubtful.add(path)
        if not follows_another_key(path, values, schema):  # else the other key is reported already
            report_wrong_value(path, value, error, problems, schema)

    config = build(schema, values, lambda path, value: report_unknown(path, value, problems, schema), wrong)
    if not refused:
        return config
    for path in refused:  # the defaults once more, so that those of keys that follow another are resolved
        section, _, name = path.rpartition(".")
        value_at(merged, section)[name] = default_of(schema, path)
    return build(schema, _resolve(merged), lambda path, value: None, lambda path, value, error: None)


def screen_overrides(
    arguments: list[str], schema: type = Config, also_check: Callable[[Any], Iterable[tuple[str, str]]] | None = None
) -> list[str]:
    """Command-line arguments as Hydra should see them.

    Raises:
        ConfigError: names every unknown key and wrong value; and since they will be corrected together, what is wrong
            with the rest of the configuration too.
    """
    problems = Problems()
    if schema is Config:
        import_libraries(libraries_of(arguments), LIBRARIES)
    kept = readable_overrides(arguments, schema, problems)
    if problems.found:
        with suppress(ConfigError):  # it can be composed once the problems are solved
            _find_all(compose_from_arguments(kept, schema), problems, schema, also_check)
    problems.raise_if_any()
    return kept


def compose(overrides: list[str], config_name: str = "ppo_trainer", config_dir: Path = CONFIG_DIR) -> DictConfig:
    """What Hydra makes of `config_name` with command-line `overrides`, without starting a Hydra application."""
    if config_dir.resolve() == CONFIG_DIR:
        overrides = screen_overrides(overrides)
    return compose_screened(overrides, config_name, config_dir)


def as_plain_dict(config: Config) -> dict[str, Any]:
    """A typed configuration as plain nested values, e.g. to write it as YAML; `load_config` of it gives it back."""
    return asdict(config)


def _as_nested(source: Any, schema: type) -> dict[str, Any]:
    """`source` as plain nested dicts, interpolations unresolved."""
    if isinstance(source, schema):
        return asdict(source)  # type: ignore[call-overload]
    if not isinstance(source, (DictConfig, Mapping)):
        raise ConfigError(
            f"a configuration must be a DictConfig, a mapping or a {schema.__name__}, got {type(source).__name__}",
            "read a file with OmegaConf.load(path)",
        )
    try:
        user = source if isinstance(source, DictConfig) else OmegaConf.create(dict(source))
        return OmegaConf.to_container(user, resolve=False)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(f"the configuration cannot be read: {_first_line(error)}", "correct that value") from None


def _merge(
    defaults: dict[str, Any], user: dict[str, Any], problems: Problems, schema: type, prefix: str = ""
) -> dict[str, Any]:
    """`user` over `defaults`, section by section; a free-form key is replaced as a whole."""
    merged = dict(defaults)
    for name, value in user.items():
        path = f"{prefix}{name}"
        default = defaults.get(name)
        if not isinstance(default, dict) or path in all_keys(schema):
            merged[name] = value
        elif isinstance(value, dict):
            merged[name] = _merge(default, value, problems, schema, path + ".")
        elif value is not None:  # `trainer:` with nothing below it reads as null
            report_no_section(path, value, problems, schema)
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


def keys_set_by_user(config: Any) -> set[str]:
    """Dotted keys with another value than the one they would have had by themselves."""
    return set(keys_set(asdict(config), type(config)))


DESCRIPTION, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ASSUMED_RANK = 32
"""For the plan of a run whose adapter lies on another machine."""


def take_adapter(model: Any, section: str, problems: Problems) -> None:
    """Let the keys of `model` say what the adapter at its `lora_adapter_path` is; a problem if the folder holds none.

    A folder that is not here may be on the machine that trains, like the model: a run looks for it before it starts.

    Args:
        model: the section of a policy's model.
        section: its dotted name, for the messages.
    """
    key = f"{section}.lora_adapter_path"
    folder = Path(model.lora_adapter_path).expanduser()
    if not folder.exists():
        model.lora_rank = model.lora_rank or ASSUMED_RANK
        return
    try:
        require_adapter(model.lora_adapter_path, key)
    except ConfigError as error:
        problems.add(error.what, error.fix)
        return
    try:
        described = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        rank, alpha = int(described["r"]), int(described["lora_alpha"])
    except (ValueError, KeyError, TypeError) as error:
        problems.add(f"{folder / DESCRIPTION} cannot be read: {error!r}", "write the adapter anew")
        return
    if described.get("peft_type", "LORA") != "LORA" or rank < 1:
        problems.add(f"{key}: the adapter in {folder} is no LoRA adapter", "give a LoRA adapter")
        return
    if model.lora_rank not in (0, rank):
        problems.add(
            f"{section}.lora_rank={model.lora_rank}, but the adapter in {folder} has rank {rank}",
            f"remove {section}.lora_rank, or set {section}.lora_rank={rank}",
        )
    if model.exclude_modules:
        problems.add(f"{section}.exclude_modules has no effect: the adapter in {folder} has its modules", "remove it")
    model.lora_rank, model.lora_alpha = rank, alpha
    model.target_modules = described.get("target_modules") or model.target_modules
    model.lora_adapter_path = str(folder.resolve())


def require_adapter(path: str, key: str = "lora_adapter_path") -> None:
    """
    Raises:
        ConfigError: there is no adapter at `path`, the value of `key`.
    """
    folder = Path(path).expanduser()
    missing = [name for name in (DESCRIPTION, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{key}={path}: there is no {' and no '.join(missing)} in that folder",
            "give a local folder that peft's save_pretrained, or `quadriga export --lora apart`, has written",
        )
