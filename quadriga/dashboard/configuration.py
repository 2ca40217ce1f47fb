"""What was set in runs, what differs from the defaults, and between runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from quadriga.config.typed import all_keys, default_of, follows_another_key
from quadriga.dashboard.catalog import Run
from quadriga.dashboard.files import Unreadable, open_inside, plain

MOST_BYTES, MOST_NODES, DEPTH = 1 << 20, 50_000, 40


def schema_of(kind: str) -> type | None:
    """The configuration's dataclass; None for a run that has none (eval)."""
    if kind == "train":
        from quadriga.config.schema import Config

        return Config
    from quadriga.config.supervised_schema import SCHEMAS

    return SCHEMAS.get(kind)


def read_config(run: Run) -> dict[str, Any]:
    """config.yaml as nested values. Unreadable: there is none, or it is no mapping."""
    with open_inside(run.path, "config.yaml") as file:
        text = file.read(MOST_BYTES)
    return _parsed(text)


@lru_cache(maxsize=32)
def _parsed(text: bytes) -> dict[str, Any]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _require_harmless(yaml.parse(text, loader))
        found = yaml.load(text, loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Unreadable(f"config.yaml is no YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict):
        raise Unreadable("config.yaml holds no keys")
    return found


def _require_harmless(events: Iterable[Any]) -> None:
    """Unreadable: a few hundred bytes that stand for gigabytes, or nest so deep that reading them ends the process."""
    import yaml

    depth = 0
    for count, event in enumerate(events):
        if isinstance(event, yaml.AliasEvent):
            raise Unreadable("config.yaml refers to its own parts")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEPTH or count > MOST_NODES:
            raise Unreadable("config.yaml is far larger than a configuration")


def max_response_length(run: Run) -> int | None:
    """The length at which a response is cut off; None where the configuration does not say."""
    try:
        length = read_config(run).get("data", {}).get("max_response_length")
    except (Unreadable, AttributeError):
        return None
    return length if isinstance(length, int) else None


def config_table(runs: list[Run]) -> dict[str, Any]:
    """Every key of these runs: its value in each, default, meaning, and whether it was set or differs between them."""
    configs: list[dict[str, Any]] = []
    problems = []
    for run in runs:
        try:
            configs.append(read_config(run))
        except Unreadable as error:
            configs.append({})
            problems.append(f"{run.name}: {error.what}")
    flat = [_flat(config) for config in configs]
    schemas = [schema_of(run.kind) for run in runs]
    keys = []
    for name in dict.fromkeys(key for values in flat for key in values):
        schema = next((s for s in schemas if s is not None and name in all_keys(s)), None)
        there = [values[name] for values in flat if name in values]
        is_set = [_is_set(name, values.get(name), s, c) for values, s, c in zip(flat, schemas, configs)]
        keys.append(
            {
                "key": name,
                "values": plain([values.get(name) for values in flat]),
                "default": plain(default_of(schema, name)) if schema else None,
                "set": is_set,
                # That runs of another kind lack a key is worth telling only where somebody has set it.
                "differs": any(v != there[0] for v in there) or (len(there) < len(runs) and any(is_set)),
                "meaning": all_keys(schema)[name].spec.doc if schema else "",
                "unit": all_keys(schema)[name].spec.unit if schema else "",
            }
        )
    return {"runs": [run.id for run in runs], "keys": keys, "problems": problems}


def _is_set(name: str, value: Any, schema: type | None, config: dict[str, Any]) -> bool:
    if schema is None:  # an evaluation: what it was given, each of its flags
        return value is not None
    if name not in all_keys(schema) or not config:
        return False
    try:
        return value != default_of(schema, name) and not follows_another_key(name, config, schema)
    except (KeyError, TypeError):  # a file that is not complete
        return True


def _flat(values: Mapping[str, Any], prefix: str = "", depth: int = 12) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value and depth:
            found |= _flat(value, f"{prefix}{name}.", depth - 1)
        else:
            found[f"{prefix}{name}"] = value
    return found
