"""Writes the schemas down for readers: the complete, commented YAML files and the tables of the reference pages.

python -m quadriga.config.render              # ppo_trainer.yaml, to standard output
python -m quadriga.config.render --markdown   # its reference tables
python -m quadriga.config.render --write      # all files and pages of the checkout anew; tests hold them equal to the schemas
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from quadriga.config.command_line import CONFIG_DIR, config_file
from quadriga.config.fields import KeySpec, spec_of
from quadriga.config.schema import Config
from quadriga.config.supervised_schema import SCHEMAS
from quadriga.config.typed import hints_of, type_in_words

WIDTH = 120
COMMENT_COLUMN = 48
DOCS_PAGE = CONFIG_DIR.parents[2] / "docs" / "configuration.md"
BEGIN, END = "<!-- reference: begin -->", "<!-- reference: end -->"

HEADER = """\
# Every key of a PPO-family run with its default. Written by `python -m quadriga.config.render`; the truth is
# quadriga/config/schema*.py.
#
# A *prompt* is one row of the dataset; a *row* is one response to it. "per GPU" means per worker process, also on a
# machine without GPUs. ${a.b} follows another key until you set it. Set keys on the command line
# (trainer.nnodes=2), or load this file, change it, and hand it to run_ppo.
"""

HYDRA = """
# ---- hydra: what Hydra itself does; a run makes its own directory and sets up its own logging
hydra:
  run:
    dir: .
  sweep:
    dir: .
    subdir: .
  output_subdir: null
  job_logging:
    root: null
  hydra_logging:
    root: null
"""


SUPERVISED_HEADER = """\
# Every key of `quadriga {name}` with its default. Written by `python -m quadriga.config.render`; the truth is
# quadriga/config/supervised_schema.py.
#
# A *row* is one example. "per GPU" means per process, also on a machine without GPUs. ${{a.b}} follows another key.
"""


def render_yaml(schema: type = Config) -> str:
    """The complete configuration file."""
    name = config_file(schema).stem.removesuffix("_trainer")
    lines = [(HEADER if schema is Config else SUPERVISED_HEADER.format(name=name)).rstrip()]
    for declared in fields(schema):
        lines += ["", *_wrapped(f"# ---- {declared.name}: {_comment(spec_of(declared))}"), f"{declared.name}:"]
        lines += _yaml_lines(getattr(schema(), declared.name), 1)
    return "\n".join(lines) + "\n" + HYDRA


def _yaml_lines(section: Any, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for declared in fields(section):
        value, comment = getattr(section, declared.name), f"# {_comment(spec_of(declared))}"
        setting = f"{indent}{declared.name}:" + ("" if is_dataclass(value) else f" {_yaml_value(value)}")
        beside = f"{setting.ljust(COMMENT_COLUMN)}  {comment}"
        yield from [beside] if len(beside) <= WIDTH else [*_wrapped(comment, indent), setting]
        if is_dataclass(value):
            yield from _yaml_lines(value, depth + 1)


def _wrapped(comment: str, indent: str = "") -> list[str]:
    return textwrap.wrap(comment, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}# ", break_on_hyphens=False)


def _comment(spec: KeySpec, quote: str = "") -> str:
    """`[unit] meaning; choices; only if`: the unit where the meaning does not name it, choices where there are several."""
    unit = f"[{spec.unit}] " if spec.unit and spec.unit not in re.findall(r"\w+", spec.doc) else ""
    choices = f"; {spec.describe_choices()}" if spec.choices and (len(spec.choices) > 1 or spec.own) else ""
    return f"{unit}{spec.doc}{choices}{_condition(spec, quote)}"


def _condition(spec: KeySpec, quote: str) -> str:
    """`only_if` in words: `; only if use_kl_loss is True`."""
    if not spec.only_if:
        return ""
    clauses = [[_atom(atom, quote) for atom in clause.split(" or ")] for clause in spec.only_if.split(" and ")]
    return "; only if " + ", and ".join(" or ".join(clause) for clause in clauses)


def _atom(text: str, quote: str) -> str:
    key, equals, values = text.lstrip(".").partition("=")
    if not equals:
        return f"{quote}{key}{quote} is set"
    names = " or ".join(f"{quote}{value}{quote}" for value in values.split("|"))
    return f"{quote}{key.removesuffix('!')}{quote} is {'not ' if key.endswith('!') else ''}{names}"


def _yaml_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml_value, value)) + "]"
    if isinstance(value, dict):
        return "{}"
    if isinstance(value, float):
        return _yaml_float(value)
    if isinstance(value, str) and (":" in value or "{" in value):
        return f'"{value}"'
    return str(value)


def _yaml_float(value: float) -> str:
    """With a point in the mantissa: YAML 1.1 reads `1e-06` as text."""
    text = repr(value)
    mantissa, e, exponent = text.partition("e")
    return text if "." in mantissa else f"{mantissa}.0{e}{exponent}"


def render_markdown(schema: type = Config) -> str:
    """Reference tables, one a section, with type, default, unit and meaning of every key."""
    return "\n".join(_markdown_lines("", schema())) + "\n"


def _markdown_lines(path: str, instance: Any) -> Iterator[str]:
    cls: type = type(instance)
    keys = [d for d in fields(cls) if not is_dataclass(getattr(instance, d.name))]
    if keys:
        yield "| key | type | default | meaning |"
        yield "|---|---|---|---|"
        for declared in keys:
            hint, default = hints_of(cls)[declared.name], _yaml_value(getattr(instance, declared.name))
            meaning = _comment(spec_of(declared), "`").replace("|", "\\|")
            yield f"| `{declared.name}` | {type_in_words(hint)} | `{default}` | {meaning} |"
        yield ""
    for declared in fields(cls):
        if declared not in keys:
            inner = f"{path}.{declared.name}".lstrip(".")
            yield f"### `{inner}`"
            yield ""
            doc = spec_of(declared).doc
            yield f"{doc[0].upper()}{doc[1:]}{_condition(spec_of(declared), '`')}."
            yield ""
            yield from _markdown_lines(inner, getattr(instance, declared.name))


def page_with_reference(page: str) -> str:
    """`page` with the text between its markers replaced by the reference tables."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{render_markdown()}\n{END}{after}"


SUPERVISED_PAGE = DOCS_PAGE.with_name("supervised_configuration.md")
_INTRODUCTION = """\
# Configuration of sft, rm and dpo

Every key of the supervised commands, written from `quadriga/config/supervised_schema.py` by
`python -m quadriga.config.render --write`. [Supervised training](supervised.md) says how they are used.
"""


def render_supervised_page() -> str:
    """The whole of docs/supervised_configuration.md, a chapter a command."""
    chapters = [f"## quadriga {name}\n\n{render_markdown(schema)}" for name, schema in SCHEMAS.items()]
    return "\n".join([_INTRODUCTION, *chapters])


def main(arguments: list[str]) -> int:
    if arguments == ["--write"]:
        for schema in (Config, *SCHEMAS.values()):
            config_file(schema).write_text(render_yaml(schema), encoding="utf-8")
        SUPERVISED_PAGE.write_text(render_supervised_page(), encoding="utf-8")
        DOCS_PAGE.write_text(page_with_reference(DOCS_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    elif arguments == ["--markdown"]:
        sys.stdout.write(render_markdown())
    elif not arguments:
        sys.stdout.write(render_yaml())
    else:
        print("usage: python -m quadriga.config.render [--markdown | --write]", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
