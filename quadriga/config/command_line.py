"""From command-line arguments to a Hydra configuration, with errors that name the nearest valid key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from quadriga.config.key_problems import HYDRA_ONLY, report_unknown, report_wrong_value
from quadriga.config.schema import Config
from quadriga.config.typed import Problems, all_keys, is_free_form, is_known
from quadriga.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

CONFIG_DIR = Path(__file__).resolve().parents[1] / "trainer" / "config"
FLAGS_WITH_VALUE = {
    "--config-name": "name",
    "-cn": "name",
    "--config-path": "dir",
    "-cp": "dir",
    "--config-dir": "dir",
    "-cd": "dir",
}


def compose(overrides: list[str], config_name: str = "ppo_trainer", config_dir: Path = CONFIG_DIR) -> DictConfig:
    """What Hydra makes of `config_name` with command-line `overrides`, without starting a Hydra application."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    if config_dir.resolve() == CONFIG_DIR:
        overrides = screen_overrides(overrides)
    try:
        with initialize_config_dir(str(config_dir.resolve()), version_base=None):
            return hydra_compose(config_name, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(
            f"cannot compose the configuration {config_name!r} from {config_dir}: {error}",
            "check the name, the folder, and the overrides",
        ) from None


def compose_from_arguments(arguments: list[str]) -> DictConfig:
    """Like `compose`, with `--config-name` and `--config-path` taken from the command line as Hydra would take them."""
    overrides, flags = [], {"name": "ppo_trainer", "dir": str(CONFIG_DIR)}
    rest = iter(arguments)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        if flag in FLAGS_WITH_VALUE:
            flags[FLAGS_WITH_VALUE[flag]] = value if equals else next(rest, "")
        elif argument.startswith("-"):
            raise ConfigError(f"unknown flag {argument}", "use key=value, --config-name NAME or --config-path FOLDER")
        else:
            overrides.append(argument)
    return compose(overrides, flags["name"], Path(flags["dir"]))


def screen_overrides(arguments: list[str]) -> list[str]:
    """Command-line arguments as Hydra should see them: unknown keys refused, what is done anyway dropped.

    Hydra by itself would refuse an unknown key without naming the nearest one, ask for `+` before keys of one's own
    inside a free-form key, and choke on plain text such as `~/data`. Flags (`--config-name …`) pass untouched; with a
    configuration folder of the user's own (`--config-path …`) the keys are not ours to judge and pass too.
    """
    own_folder = any(FLAGS_WITH_VALUE.get(argument.split("=")[0]) == "dir" for argument in arguments)
    problems, kept = Problems(), []
    is_value_of_flag = False
    for argument in arguments:
        if argument.startswith("-") or is_value_of_flag:
            is_value_of_flag = argument in FLAGS_WITH_VALUE or argument in ("--package", "-p", "--info", "-i")
            kept.append(argument)
            continue
        argument, override = _parse_override(argument)
        if override is None:
            problems.add(f"cannot read the argument {argument!r}", "write key=value; quote it for the shell")
            continue
        path = override.key_or_group
        is_for_hydra = path.split(".")[0] in HYDRA_ONLY or "/" in path or override.is_delete() or own_folder
        if is_for_hydra or (is_known(Config, path) and not override.is_add()):
            kept.append(argument)
        elif is_known(Config, path) or is_free_form(Config, path):
            kept.append(f"++{argument.lstrip('+')}")
        else:
            value = argument.partition("=")[2] if override.is_sweep_override() else override.value()
            report_unknown(path, value, problems)
        if not is_for_hydra and path in all_keys(Config) and not override.is_sweep_override():
            _check_value(path, override.value(), problems)
    problems.raise_if_any()
    return kept


def _check_value(path: str, value: Any, problems: Problems) -> None:
    """Wrong values would be found later too, but all problems of a command line should be told at once."""
    if isinstance(value, str) and ("${" in value or value == "???"):
        return
    try:
        all_keys(Config)[path].typed(path, value)
    except ValueError as error:
        report_wrong_value(path, value, error, problems)


def _parse_override(argument: str) -> tuple[str, Override | None]:
    """`argument` as Hydra can read it, in quotes where its grammar has no room for plain text, and what it means."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    key, equals, value = argument.partition("=")
    if value.startswith(("[", "{")):
        in_quotes = re.sub(r"(?<=[\[,:])\s*(~[^,\]}]*)", lambda item: _quote(item[1]), value)
    else:
        in_quotes = _quote(value)
    for attempt in (argument, f"{key}={in_quotes}") if equals else (argument,):
        try:
            (override,) = parser.parse_overrides([attempt])
            return attempt, override
        except HydraException:
            continue
    return argument, None


def _quote(text: str) -> str:
    """In Hydra's single quotes: a quote inside, and backslashes before a quote, are escaped."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text) + "'"
