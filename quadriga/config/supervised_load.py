"""Load the configuration of a supervised run, or say what is wrong with it; also writes YAML files and the reference page.

python -m quadriga.config.supervised_load           # sft_trainer.yaml, rm_trainer.yaml, dpo_trainer.yaml, to standard output
python -m quadriga.config.supervised_load --write   # the files of the checkout anew; tests hold them equal to the schemas
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quadriga.config.command_line import CONFIG_DIR, FLAGS_WITH_VALUE, _parse_override
from quadriga.config.fields import spec_of
from quadriga.config.key_problems import HYDRA_ONLY
from quadriga.config.render import DOCS_PAGE, HYDRA, _yaml_lines, render_markdown
from quadriga.config.supervised_foreign import FOREIGN
from quadriga.config.supervised_schema import SCHEMAS, DPOConfig, SFTConfig
from quadriga.config.typed import (
    Problems,
    all_keys,
    all_sections,
    build,
    default_values,
    is_free_form,
    is_known,
    nearest_keys,
)
from quadriga.errors import ConfigError

HEADER = """\
# Every key of `quadriga {name}` with its default. Written by `python -m quadriga.config.supervised_load`; the truth is
# quadriga/config/supervised_schema.py.
#
# A *row* is one example. "per GPU" means per process, also on a machine without GPUs. ${{a.b}} follows another key.
"""


def load_supervised_config(source: Any, schema: type) -> Any:
    """The typed configuration, fully checked. `source` need not be complete: absent keys take their defaults.

    Args:
        source: a DictConfig, a mapping, or a configuration of type `schema`.
        schema: one of `SCHEMAS`.

    Raises:
        ConfigError: names every unknown key with the nearest valid one, every wrong value and every impossible
            combination, each with its fix.
    """
    problems = Problems()
    is_typed = isinstance(source, schema)
    user = asdict(source) if is_typed else _as_nested(source)
    _check_sections(user, schema, problems)
    problems.raise_if_any()
    try:
        merged = OmegaConf.merge(default_values(schema), user)
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}", f"set {error.full_key}") from None

    def unknown(path: str, value: Any) -> None:
        _report_unknown(path, value, schema, problems)

    def wrong(path: str, value: Any, error: ValueError) -> None:
        problems.add(f"{path}={value!r}: {error}", f"{path}: {all_keys(schema)[path].spec.doc}")

    config: Any = build(schema, values, unknown, wrong)  # type: ignore[arg-type]
    if not problems.found:
        _check_combinations(config, problems)
    problems.raise_if_any()
    return config


def screen_supervised_overrides(arguments: list[str], schema: type) -> list[str]:
    """Command-line arguments as Hydra should see them: unknown keys refused with the nearest one, flags untouched."""
    problems, kept = Problems(), []
    own_folder = any(FLAGS_WITH_VALUE.get(argument.split("=")[0]) == "dir" for argument in arguments)
    is_value_of_flag = False
    for argument in arguments:
        if argument.startswith("-") or is_value_of_flag:
            is_value_of_flag = argument in FLAGS_WITH_VALUE
            kept.append(argument)
            continue
        argument, override = _parse_override(argument)
        if override is None:
            problems.add(f"cannot read the argument {argument!r}", "write key=value; quote it for the shell")
            continue
        path = override.key_or_group
        if own_folder or path.split(".")[0] in HYDRA_ONLY or (is_known(schema, path) and not override.is_add()):
            kept.append(argument)
        elif is_known(schema, path) or is_free_form(schema, path):
            kept.append(f"++{argument.lstrip('+')}")
        else:
            _report_unknown(path, override.value(), schema, problems)
    problems.raise_if_any()
    return kept


def _as_nested(source: Any) -> dict[str, Any]:
    if not isinstance(source, (DictConfig, Mapping)):
        kind = type(source).__name__
        other = "another command's " if is_dataclass(source) else ""
        raise ConfigError(
            f"a configuration must be a DictConfig, a mapping or the command's own type, got {other}{kind}",
            "read a file with OmegaConf.load(path)",
        )
    user = source if isinstance(source, DictConfig) else OmegaConf.create(dict(source))
    return OmegaConf.to_container(user, resolve=False)  # type: ignore[return-value]


def _check_sections(user: dict[str, Any], schema: type, problems: Problems, prefix: str = "") -> None:
    """Every section must be a mapping; `trainer:` with nothing below it reads as null and is dropped."""
    for name, value in list(user.items()):
        path = f"{prefix}{name}"
        if path not in all_sections(schema):
            continue
        if value is None:
            del user[name]
        elif isinstance(value, dict):
            _check_sections(value, schema, problems, path + ".")
        else:
            problems.add(f"{path} must be a section with keys, got {value!r}", f"write {path}.<key>=<value>")


def _report_unknown(path: str, value: Any, schema: type, problems: Problems) -> None:
    row = next((row for row in FOREIGN if fnmatchcase(path, row.pattern)), None)
    if path.split(".")[0] in HYDRA_ONLY:
        return
    if row is not None:
        if value is not None and not row.accepts(value):
            problems.add(f"{path}={value}: {row.why}", row.instead)
    elif isinstance(value, dict) and value:
        for name, inner in value.items():
            _report_unknown(f"{path}.{name}", inner, schema, problems)
    else:
        near = nearest_keys(schema, path)
        fix = f"did you mean {' or '.join(near)}?" if near else f"remove it; {config_file(schema).name} lists every key"
        problems.add(f"unknown key {path}", fix)


def _check_combinations(config: Any, problems: Problems) -> None:
    data, optim, trainer = config.data, config.optim, config.trainer
    if not data.train_files:
        problems.add("data.train_files is not set", "set it to a parquet, json or jsonl file, or a list of them")
    if isinstance(config, SFTConfig):
        _check_sft(config, problems)
    elif config.model.partial_pretrain is None:
        problems.add("model.partial_pretrain is not set", "set it to the model to start from: a folder or a hub name")
    if isinstance(config, DPOConfig) and config.dpo.loss_type != "sigmoid" and config.dpo.label_smoothing > 0:
        problems.add("dpo.label_smoothing has no effect but with dpo.loss_type=sigmoid", "remove it")
    for name, most in (("train", data.train_max_samples), ("val", data.val_max_samples)):
        if most == 0:
            problems.add(f"data.{name}_max_samples=0 leaves no rows", f"set data.{name}_max_samples=-1 for all rows")
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        problems.add(f"optim.betas={optim.betas} are no AdamW betas", "give two numbers in [0, 1)")
    budget = data.max_token_len_per_gpu
    if isinstance(budget, str) and budget != "auto":
        problems.add(f"data.max_token_len_per_gpu={budget} is no budget", "set a number of tokens, or auto")
    elif isinstance(budget, int) and data.max_length > budget:
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
    elif not data.multiturn.enable and data.multiturn.messages_key != type(data.multiturn)().messages_key:
        problems.add(
            "data.multiturn.messages_key has no effect without data.multiturn.enable=True",
            f"write data.messages_key={data.multiturn.messages_key}",
        )


def config_file(schema: type) -> Path:
    name = next(name for name, known in SCHEMAS.items() if known is schema)
    return CONFIG_DIR / f"{name}_trainer.yaml"


def render_supervised_yaml(schema: type) -> str:
    """The complete configuration file."""
    name = config_file(schema).name.removesuffix("_trainer.yaml")
    lines = [HEADER.format(name=name).rstrip()]
    for declared in fields(schema):
        lines += ["", f"# ---- {declared.name}: {spec_of(declared).doc}", f"{declared.name}:"]
        lines += _yaml_lines(getattr(schema(), declared.name), 1)
    return "\n".join(lines) + "\n" + HYDRA


REFERENCE_PAGE = DOCS_PAGE.with_name("supervised_configuration.md")
_INTRODUCTION = """\
# Configuration of sft, rm and dpo

Every key of the supervised commands, written from `quadriga/config/supervised_schema.py` by
`python -m quadriga.config.supervised_load --write`. [Supervised training](supervised.md) says how they are used.
"""


def render_reference_page() -> str:
    """The whole of docs/supervised_configuration.md, a chapter a command."""
    chapters = [f"## quadriga {name}\n\n{render_markdown(schema)}" for name, schema in SCHEMAS.items()]
    return "\n".join([_INTRODUCTION, *chapters])


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        for schema in SCHEMAS.values():
            config_file(schema).write_text(render_supervised_yaml(schema), encoding="utf-8")
        REFERENCE_PAGE.write_text(render_reference_page(), encoding="utf-8")
    else:
        sys.stdout.write("".join(map(render_supervised_yaml, SCHEMAS.values())))
