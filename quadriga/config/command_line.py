"""From command-line arguments to a Hydra configuration, with errors that name the nearest valid key.

`schema` says whose arguments they are: that of `train` and `plan`, or one of the supervised commands.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from quadriga.config.foreign_keys import carry_over, fix_for_value, kind_of
from quadriga.config.schema import Config
from quadriga.config.supervised_schema import SCHEMAS
from quadriga.config.typed import Problems, all_keys, all_sections, default_values, is_free_form, is_known, nearest_keys
from quadriga.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

CONFIG_DIR = Path(__file__).resolve().parents[1] / "trainer" / "config"
LIBRARIES = "actor_rollout_ref.model.external_lib"
FILE_FLAG = "--config"
"""`--config my.yaml`: a file of the user's own with keys of the run."""
FLAGS_WITH_VALUE = {
    "--config-name": "name",
    "-cn": "name",
    "--config-path": "dir",
    "-cp": "dir",
    "--config-dir": "dir",
    "-cd": "dir",
}


def libraries_of(arguments: list[str]) -> Any:
    """What the arguments set `external_lib` to: names that it registers are valid values of other keys."""
    given = [a for a in arguments if a.lstrip("+").partition("=")[0] == LIBRARIES]
    override = parse_override(given[-1])[1] if given else None
    return None if override is None else override.value()


def compose_screened(overrides: list[str], config_name: str, config_dir: Path) -> DictConfig:
    """What Hydra makes of `config_name` with `overrides`, without starting a Hydra application."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    with hydra_errors(), initialize_config_dir(str(config_dir.resolve()), version_base=None):
        return hydra_compose(config_name, overrides)


def compose_from_arguments(arguments: list[str], schema: type = Config) -> DictConfig:
    """The configuration that screened arguments describe; its file is named by `--config`, or as Hydra would have it."""
    file, arguments = take_file(arguments)
    if file is not None:
        return compose_file(file, arguments, schema)
    overrides, flags = [], {"name": config_file(schema).stem, "dir": str(CONFIG_DIR)}
    rest = iter(arguments)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        if flag in FLAGS_WITH_VALUE:
            flags[FLAGS_WITH_VALUE[flag]] = value if equals else next(rest, "")
        elif argument.startswith("-"):
            raise ConfigError(
                f"unknown flag {argument}", "use key=value, --config FILE, --config-name NAME or --config-path FOLDER"
            )
        else:
            overrides.append(argument)
    return compose_screened(overrides, flags["name"], Path(flags["dir"]))


@contextmanager
def hydra_errors() -> Iterator[None]:
    """What Hydra cannot compose, as a ConfigError."""
    from hydra.errors import HydraException

    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeError) as error:
        raise ConfigError(
            f"the configuration cannot be composed: {error}", "check the name, the folder, and the arguments"
        ) from None


def take_file(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """The file that `--config` names, if any, and the other arguments."""
    file, rest, queue = None, [], iter(arguments)
    for argument in queue:
        flag, equals, value = argument.partition("=")
        if flag != FILE_FLAG:
            rest.append(argument)
            continue
        name = value if equals else next(queue, "")
        if file is not None:
            raise ConfigError(f"{FILE_FLAG} names two files, {file} and {name}", "give one; key=value changes it")
        file = Path(os.path.expandvars(name)).expanduser()
        if not file.is_file():
            raise ConfigError(f"{FILE_FLAG} {name}: there is no such file", "name a YAML file with keys of the run")
    return file, rest


def compose_file(file: Path, overrides: list[str], schema: type = Config) -> DictConfig:
    """The defaults, then what `file` says, then screened `overrides`: a file need hold only what is different."""
    flags = [argument for argument in overrides if argument.startswith("-")]
    if flags:
        raise ConfigError(f"{flags[0]} does not go with {FILE_FLAG}", "use key=value to change what the file says")
    try:
        config = OmegaConf.load(file)
    except (OSError, UnicodeError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{file} cannot be read as YAML: {' '.join(str(error).split())}", "correct it") from None
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{file} holds no keys", "write `section:` and below it `  key: value`")
    if any(entry != "_self_" for entry in config.get("defaults") or ()):
        raise ConfigError(
            f"{file} has a list of `defaults:`, which Hydra composes",
            f"use --config-dir {file.parent} --config-name {file.stem}, or remove the list: absent keys have defaults anyway",
        )
    for argument in overrides:
        _, override = parse_override(argument)
        if override is None or override.is_sweep_override() or override.is_delete():
            raise ConfigError(f"{argument!r} does not go with {FILE_FLAG}", "write key=value")
        OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)
    merged = OmegaConf.merge(OmegaConf.create(default_values(schema)), config)
    assert isinstance(merged, DictConfig)
    return merged


def config_file(schema: type) -> Path:
    """The complete file of defaults."""
    name = next((name for name, known in SCHEMAS.items() if known is schema), "ppo")
    return CONFIG_DIR / f"{name}_trainer.yaml"


def readable_overrides(arguments: list[str], schema: type, problems: Problems) -> list[str]:
    """Command-line arguments as Hydra should see them; unknown keys and wrong values go to `problems`.

    Hydra by itself would refuse an unknown key without naming the nearest one, ask for `+` before keys of one's own
    inside a free-form key, and choke on plain text such as `~/data`. Flags (`--config-name …`) pass untouched; with a
    configuration folder of the user's own (`--config-path …`) the keys are not ours to judge and pass too.
    """
    own_folder = any(FLAGS_WITH_VALUE.get(argument.split("=")[0]) == "dir" for argument in arguments)
    kept = []
    is_value_of_flag = False
    for argument in arguments:
        if argument.startswith("-") or is_value_of_flag:
            is_value_of_flag = argument in FLAGS_WITH_VALUE or argument in (
                FILE_FLAG,
                "--package",
                "-p",
                "--info",
                "-i",
            )
            kept.append(argument)
            continue
        argument, override = parse_override(argument)
        if override is None:
            problems.add(f"cannot read the argument {argument!r}", "write key=value; quote it for the shell")
            continue
        path = override.key_or_group
        is_for_hydra = path.split(".")[0] in HYDRA_ONLY or "/" in path or override.is_delete() or own_folder
        is_single = not is_for_hydra and not override.is_sweep_override()
        if is_single and path in all_sections(schema) and isinstance(override.value(), str):
            if not carry_over(
                path, override.value(), problems, schema, kind_of(schema)
            ):  # else a group of verl's files
                report_no_section(path, override.value(), problems, schema)
            continue
        if is_for_hydra or (is_known(schema, path) and not override.is_add()):
            kept.append(argument)
        elif is_known(schema, path) or is_free_form(schema, path):
            kept.append(f"++{argument.lstrip('+')}")
        else:
            value = argument.partition("=")[2] if override.is_sweep_override() else override.value()
            report_unknown(path, value, problems, schema)
        if not is_for_hydra and path in all_keys(schema) and not override.is_sweep_override():
            _check_value(path, override.value(), problems, schema)
    return kept


def _check_value(path: str, value: Any, problems: Problems, schema: type) -> None:
    """Wrong values would be found later too, but all problems of a command line should be told at once."""
    if isinstance(value, str) and ("${" in value or value == "???"):
        return
    try:
        all_keys(schema)[path].typed(path, value)
    except ValueError as error:
        report_wrong_value(path, value, error, problems, schema)


def parse_override(argument: str) -> tuple[str, Override | None]:
    """`argument` as Hydra can read it, in quotes where its grammar has no room for plain text, and what it means."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    key, equals, value = argument.partition("=")
    if value.startswith(("[", "{")):
        in_quotes = re.sub(r"(?<=[\[,:])\s*(~[^,\]}]*)", lambda item: quote(item[1]), value)
    else:
        in_quotes = quote(value)
    for attempt in (argument, f"{key}={in_quotes}") if equals else (argument,):
        try:
            (override,) = parser.parse_overrides([attempt])
            return attempt, override
        except HydraException:
            continue
    return argument, None


def quote(text: str) -> str:
    """In Hydra's single quotes: a quote inside, and backslashes before a quote, are escaped."""
    return "'" + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text) + "'"


HYDRA_ONLY = ("hydra", "defaults")
"""Keys that Hydra consumes itself; a bare `OmegaConf.load` of the file leaves them in."""


def report_unknown(path: str, value: Any, problems: Problems, schema: type = Config) -> None:
    """Note what is wrong with a key that the schema does not have, unless it asks for what is done anyway."""
    top = path.split(".")[0]
    if top == "defaults":
        if any(entry != "_self_" for entry in value or ()):
            problems.add(
                "the configuration has a `defaults:` list that nobody has composed",
                "compose it with Hydra, or start from one of the complete files in quadriga/trainer/config",
            )
    elif top == "hydra" or carry_over(path, value, problems, schema, kind_of(schema)):
        return
    elif isinstance(value, dict) and value:
        for name, inner in value.items():
            report_unknown(f"{path}.{name}", inner, problems, schema)
    elif is_known(schema, path):
        problems.add(
            f"the key {path!r} contains dots", "nest it: " + path.replace(".", ": {") + ": …" + "}" * path.count(".")
        )
    else:
        near = nearest_keys(schema, path)
        page = "docs/configuration.md" if schema is Config else "docs/supervised_configuration.md"
        fix = f"did you mean {' or '.join(near)}?" if near else f"remove it; {page} lists every key"
        problems.add(f"unknown key {path}", fix, doubtful=near)


def report_no_section(path: str, value: Any, problems: Problems, schema: type = Config) -> None:
    """Note that a section is given a value."""
    own = [key.removeprefix(f"{path}.").split(".")[0] for key in all_keys(schema) if key.startswith(f"{path}.")]
    problems.add(
        f"{path} must be a section with keys, got {value!r}",
        f"write {path}.<key>=<value>; its keys: {', '.join(dict.fromkeys(own))}",
        doubtful=[f"{path}."],
    )


def report_wrong_value(path: str, value: Any, error: ValueError, problems: Problems, schema: type = Config) -> None:
    """Note that a known key has a value of the wrong type or out of bounds."""
    spec = all_keys(schema)[path].spec
    unit = f" [{spec.unit}]" if spec.unit else ""
    fix = fix_for_value(path, value, kind_of(schema)) or f"{path}{unit}: {spec.doc}"
    problems.add(f"{path}={value!r}: {error}", fix, doubtful=[path])
