"""What to say about a single key that cannot be used: unknown, or with a wrong value."""

from __future__ import annotations

from typing import Any

from quadriga.config.foreign_keys import carry_over, fix_for_value, kind_of
from quadriga.config.schema import Config
from quadriga.config.typed import Problems, all_keys, is_known, nearest_keys

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
