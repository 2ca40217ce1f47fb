"""What to say about a single key that cannot be used: unknown, or with a wrong value."""

from __future__ import annotations

from typing import Any

from quadriga.config.carry_over import carry_over, fix_for_value
from quadriga.config.schema import Config
from quadriga.config.typed import Problems, all_keys, is_known, nearest_keys

HYDRA_ONLY = ("hydra", "defaults")
"""Keys that Hydra consumes itself; a bare `OmegaConf.load` of the file leaves them in."""


def report_unknown(path: str, value: Any, problems: Problems) -> None:
    """Note what is wrong with a key that the schema does not have, unless it asks for what is done anyway."""
    top = path.split(".")[0]
    if top == "defaults":
        if any(entry != "_self_" for entry in value or ()):
            problems.add(
                "the configuration has a `defaults:` list that nobody has composed",
                "compose it with Hydra, or start from the complete file quadriga/trainer/config/ppo_trainer.yaml",
            )
    elif top == "hydra" or carry_over(path, value, problems):
        return
    elif isinstance(value, dict) and value:
        for name, inner in value.items():
            report_unknown(f"{path}.{name}", inner, problems)
    elif is_known(Config, path):
        problems.add(
            f"the key {path!r} contains dots", "nest it: " + path.replace(".", ": {") + ": …" + "}" * path.count(".")
        )
    else:
        near = nearest_keys(Config, path)
        fix = f"did you mean {' or '.join(near)}?" if near else "remove it; docs/configuration.md lists every key"
        problems.add(f"unknown key {path}", fix)


def report_wrong_value(path: str, value: Any, error: ValueError, problems: Problems) -> None:
    """Note that a known key has a value of the wrong type or out of bounds."""
    spec = all_keys(Config)[path].spec
    unit = f" [{spec.unit}]" if spec.unit else ""
    problems.add(f"{path}={value!r}: {error}", fix_for_value(path, value) or f"{path}{unit}: {spec.doc}")
