"""Load the configuration of a supervised fine-tuning run, or say what is wrong with it; also writes its YAML file.

python -m quadriga.config.sft_load           # sft_trainer.yaml, to standard output
python -m quadriga.config.sft_load --write   # the file of the checkout anew; a test holds it equal to the schema
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quadriga.config.command_line import CONFIG_DIR, FLAGS_WITH_VALUE, _parse_override
from quadriga.config.fields import spec_of
from quadriga.config.foreign_keys import PACKED, ForeignKey, fixed, no_matter, refused
from quadriga.config.key_problems import HYDRA_ONLY
from quadriga.config.render import HYDRA, _yaml_lines
from quadriga.config.sft_schema import SFTConfig
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
# Every key of a supervised fine-tuning run with its default. Written by `python -m quadriga.config.sft_load`; the truth
# is quadriga/config/sft_schema.py.
#
# A *row* is one example. "per GPU" means per process, also on a machine without GPUs. ${a.b} follows another key.
"""

_EXPORT = "the end of a run always writes the model as a Hugging Face folder"

FOREIGN: tuple[ForeignKey, ...] = (
    refused(
        "data.micro_batch_size", "rows of a single pass are counted per GPU here", "set data.micro_batch_size_per_gpu"
    ),
    ForeignKey(
        "data.multiturn.enable",
        lambda given: given is False,
        "conversations are chosen by their column here",
        "write data.messages_key=messages",
    ),
    refused("data.multiturn.messages_key", "this key has another name here", "write data.messages_key=<the same>"),
    refused("data.multiturn.*", "conversations have no tools here", "remove it"),
    fixed("data.balance_dp_token", (True, False), "tokens are always balanced over ranks"),
    fixed("data.use_shm", False, "models and data are read where they lie"),
    refused("data.custom_cls.*", "SFT has one dataset class", "remove it; prepare the rows as parquet or jsonl"),
    fixed("model.use_shm", False, "models and data are read where they lie"),
    fixed("model.strategy", ("fsdp", "fsdp2"), "Quadriga trains with FSDP2 only"),
    fixed("model.use_liger", False, "log-probs are computed in chunks by Quadriga itself"),
    refused("model.external_lib", "no code is imported by name before the model", "install it as a package"),
    refused("model.fsdp_config.*", "this part of the sharding is decided by Quadriga", "remove it"),
    fixed("use_remove_padding", (True, False), PACKED),
    fixed("ulysses_sequence_parallel_size", 1, "a sequence is not split over GPUs"),
    no_matter("trainer.n_gpus_per_node"),
    no_matter("trainer.nnodes"),
    refused("trainer.default_hdfs_dir", "runs are written to local folders", "set trainer.default_local_dir"),
    ForeignKey("trainer.save_freq", lambda given: given in (-1, 0), _EXPORT, "remove it"),
    no_matter("trainer.max_ckpt_to_keep"),
    fixed("trainer.resume_mode", ("auto", "disable"), "an SFT run starts from its model", "remove it"),
    refused("trainer.resume_from_path", "an SFT run starts from its model", "set model.partial_pretrain to a folder"),
    refused("trainer.checkpoint.*", _EXPORT),
)
"""Keys that other SFT trainers have: a value that asks for what is done anyway is dropped, others are refused."""


def load_sft_config(source: DictConfig | Mapping[str, Any] | SFTConfig) -> SFTConfig:
    """The typed configuration, fully checked. `source` need not be complete: absent keys take their defaults.

    Raises:
        ConfigError: names every unknown key with the nearest valid one, every wrong value and every impossible
            combination, each with its fix.
    """
    problems = Problems()
    user = asdict(source) if isinstance(source, SFTConfig) else _as_nested(source)
    _check_sections(user, problems)
    problems.raise_if_any()
    try:
        merged = OmegaConf.merge(default_values(SFTConfig), user)
        values = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}", f"set {error.full_key}") from None

    def unknown(path: str, value: Any) -> None:
        _report_unknown(path, value, problems)

    def wrong(path: str, value: Any, error: ValueError) -> None:
        problems.add(f"{path}={value!r}: {error}", f"{path}: {all_keys(SFTConfig)[path].spec.doc}")

    config: SFTConfig = build(SFTConfig, values, unknown, wrong)  # type: ignore[arg-type]
    if not problems.found:
        _check_combinations(config, problems)
    problems.raise_if_any()
    return config


def screen_sft_overrides(arguments: list[str]) -> list[str]:
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
        if own_folder or path.split(".")[0] in HYDRA_ONLY or (is_known(SFTConfig, path) and not override.is_add()):
            kept.append(argument)
        elif is_known(SFTConfig, path) or is_free_form(SFTConfig, path):
            kept.append(f"++{argument.lstrip('+')}")
        else:
            _report_unknown(path, override.value(), problems)
    problems.raise_if_any()
    return kept


def _as_nested(source: Any) -> dict[str, Any]:
    if not isinstance(source, (DictConfig, Mapping)):
        raise ConfigError(
            f"a configuration must be a DictConfig, a mapping or an SFTConfig, got {type(source).__name__}",
            "read a file with OmegaConf.load(path)",
        )
    user = source if isinstance(source, DictConfig) else OmegaConf.create(dict(source))
    return OmegaConf.to_container(user, resolve=False)  # type: ignore[return-value]


def _check_sections(user: dict[str, Any], problems: Problems, prefix: str = "") -> None:
    """Every section must be a mapping; `trainer:` with nothing below it reads as null and is dropped."""
    for name, value in list(user.items()):
        path = f"{prefix}{name}"
        if path not in all_sections(SFTConfig):
            continue
        if value is None:
            del user[name]
        elif isinstance(value, dict):
            _check_sections(value, problems, path + ".")
        else:
            problems.add(f"{path} must be a section with keys, got {value!r}", f"write {path}.<key>=<value>")


def _report_unknown(path: str, value: Any, problems: Problems) -> None:
    row = next((row for row in FOREIGN if fnmatchcase(path, row.pattern)), None)
    if path.split(".")[0] in HYDRA_ONLY:
        return
    if row is not None:
        if value is not None and not row.accepts(value):
            problems.add(f"{path}={value}: {row.why}", row.instead)
    elif isinstance(value, dict) and value:
        for name, inner in value.items():
            _report_unknown(f"{path}.{name}", inner, problems)
    else:
        near = nearest_keys(SFTConfig, path)
        fix = f"did you mean {' or '.join(near)}?" if near else f"remove it; {CONFIG_FILE.name} lists every key"
        problems.add(f"unknown key {path}", fix)


def _check_combinations(config: SFTConfig, problems: Problems) -> None:
    data, model = config.data, config.model
    if not data.train_files:
        problems.add("data.train_files is not set", "set it to a parquet, json or jsonl file, or a list of them")
    if (model.partial_pretrain is None) == (model.from_config is None):
        problems.add(
            "the run must start from either model.partial_pretrain (weights) or model.from_config (random weights)",
            "set exactly one of them",
        )
    if model.from_config is not None and model.lora_rank > 0:
        problems.add("a LoRA adapter on random weights learns nothing of use", "set model.lora_rank=0")
    for name, most in (("train", data.train_max_samples), ("val", data.val_max_samples)):
        if most == 0:
            problems.add(f"data.{name}_max_samples=0 leaves no rows", f"set data.{name}_max_samples=-1 for all rows")
    if len(config.optim.betas) != 2 or not all(0 <= beta < 1 for beta in config.optim.betas):
        problems.add(f"optim.betas={config.optim.betas} are no AdamW betas", "give two numbers in [0, 1)")
    if data.max_length > data.max_token_len_per_gpu:
        problems.add(
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu} has no room for one row of "
            f"data.max_length={data.max_length} tokens",
            f"set data.max_token_len_per_gpu={data.max_length} or more",
        )


CONFIG_FILE = CONFIG_DIR / "sft_trainer.yaml"


def render_sft_yaml() -> str:
    """The complete configuration file."""
    lines = [HEADER.rstrip()]
    for declared in fields(SFTConfig):
        lines += ["", f"# ---- {declared.name}: {spec_of(declared).doc}", f"{declared.name}:"]
        lines += _yaml_lines(getattr(SFTConfig(), declared.name), 1)
    return "\n".join(lines) + "\n" + HYDRA


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        CONFIG_FILE.write_text(render_sft_yaml(), encoding="utf-8")
    else:
        sys.stdout.write(render_sft_yaml())
