"""A verl command line as one of Quadriga's: each key taken over, translated, set aside or refused, and why.

The verdict of a key comes from the table `config/foreign_keys.yaml`; a key that Quadriga has itself is taken over, so a
verdict changes by itself when the schema learns a key or a value. What can only be judged on the command line as a whole
is in `verl_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from quadriga.config.command_line import FLAGS_WITH_VALUE, HYDRA_ONLY, LIBRARIES, parse_override, quote
from quadriga.config.foreign_keys import ForeignTable, Kind, foreign_table
from quadriga.config.load import find_problems, keys_set_by_user, typed_config
from quadriga.config.no_effect import values_without_effect
from quadriga.config.schema import Config
from quadriga.config.supervised_schema import SFTConfig
from quadriga.config.typed import Problems, all_keys, default_of, is_free_form, nearest_keys
from quadriga.errors import ConfigError
from quadriga.registry import import_libraries

DEVICE = "trainer.device"
NUMBERS = (int, float, int | None, float | None)
SCHEMAS: dict[Kind, type] = {"rl": Config, "sft": SFTConfig}
OWN_CONFIGS = (
    *(
        "ppo_trainer",
        "fully_async_ppo_trainer",
        "one_step_off_ppo_trainer",
        "transfer_queue_ppo_trainer",
        "dapo_trainer",
    ),
    *("sft_trainer", "sft_trainer_engine"),
)
"""Configuration files of verl's whose keys are the table's; the keys of any other file are read from the file."""
CHOSEN_BY_FILE: dict[str, dict[str, Any]] = {
    "one_step_off_ppo_trainer": {"rollout.nnodes": 1},
    "fully_async_ppo_trainer": {"async_training.staleness_threshold": 0.1},
    **{
        f"{prefix}ppo_megatron_trainer": {"actor_rollout_ref.actor.strategy": "megatron"}
        for prefix in ("", "one_step_off_", "fully_async_", "transfer_queue_")
    },
}
"""What the name of such a file says by itself, be there other keys or not."""


class Verdict(StrEnum):
    TAKEN = "taken over"
    TRANSLATED = "translated"
    DEFAULT = "verl's default"
    ASIDE = "set aside"
    REFUSED = "refused"


@dataclass(frozen=True)
class Row:
    """What became of one key. `here`: the key=value of Quadriga's that it leads to, if any."""

    key: str
    value: Any
    verdict: Verdict
    here: str = ""
    note: str = ""
    instead: str = ""


@dataclass
class Translation:
    """A command line while and after it is translated.

    `settings` are Quadriga's keys; `source` says which of verl's keys each of them came from.
    """

    kind: Kind
    given: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    source: dict[str, str] = field(default_factory=dict)
    for_hydra: list[str] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)
    """Settings that count rows over all GPUs and must be divided by their number."""

    @property
    def schema(self) -> type:
        return SCHEMAS[self.kind]

    @property
    def table(self) -> ForeignTable:
        return foreign_table(self.kind)

    def get(self, path: str) -> Any:
        """What `path` will be: as set, or else its default here, which may be `${another.key}`."""
        return self.settings.get(path, default_of(self.schema, path))

    def set(self, path: str, value: Any, key: str, note: str = "", verdict: Verdict = Verdict.TRANSLATED) -> None:
        """Let Quadriga's `path` be `value` because of verl's `key`."""
        self.settings[path] = value
        self.source.setdefault(path, key)
        given = self.given.get(key, value)
        self.rows[key] = Row(key, given, verdict, f"{path}={shown(value)}", note)

    def set_aside(self, key: str, note: str) -> None:
        """`key`, one of verl's, has no counterpart that would change a result; what it had led to is taken back."""
        for path in [path for path, source in self.source.items() if source == key]:
            self.settings.pop(path, None)
        self.rows[key] = Row(key, self.given.get(key), Verdict.ASIDE, note=note)

    def say(self, key: str, note: str) -> None:
        """Something to know about what became of `key`."""
        row = self.rows[key]
        self.rows[key] = replace(row, note=f"{row.note}; {note}" if row.note else note)

    def refuse(self, key: str, why: str, instead: str) -> None:
        self.rows[key] = Row(key, self.given.get(key), Verdict.REFUSED, note=why, instead=instead)

    @property
    def refusals(self) -> list[Row]:
        return [row for row in self.rows.values() if row.verdict is Verdict.REFUSED]

    def raise_if_refused(self) -> None:
        """
        Raises:
            ConfigError: names every key of verl's whose loss would change the result, and what to do about it.
        """
        problems = Problems()
        for row in self.refusals:
            what = row.key if row.value is None else f"{row.key}={shown(row.value)}"
            problems.add(f"{what}: {row.note}", row.instead)
        problems.raise_if_any()

    def arguments(self) -> list[str]:
        """Quadriga's own command line."""
        free = [path for path in self.settings if is_free_form(self.schema, path)]
        marked = [f"{'++' if path in free else ''}{path}={as_argument(value)}" for path, value in self.settings.items()]
        return [*marked, *self.for_hydra]

    def nested(self) -> dict[str, Any]:
        """The settings as a configuration file holds them."""
        nested: dict[str, Any] = {}
        for path, value in self.settings.items():
            *sections, last = path.split(".")
            node = nested
            for section in sections:
                node = node.setdefault(section, {})
            node[last] = value
        return nested


def translate(
    arguments: list[str], kind: Kind = "rl", defaults: bool | None = None, device: str | None = None
) -> Translation:
    """What `arguments`, written for verl, mean here. Nothing is printed and nothing raised for a refused key.

    Args:
        defaults: whether verl's own defaults hold where they differ; None: as `kind` and the keys suggest.
        device: what this machine has, if the command is to run on it: on a CPU, keys that only a device reads are set aside.

    Raises:
        ConfigError: an argument or a configuration file cannot be read.
    """
    from quadriga.compat.verl_rules import assumed_defaults, rules_for

    given, for_hydra = read_arguments(arguments)
    if kind == "rl":
        import_libraries(given.get(LIBRARIES), LIBRARIES)
    result = Translation(kind, given, for_hydra=for_hydra)
    for key, value in given.items():
        _place(result, key, key, value)
    for path, value in assumed_defaults(result, defaults).items():
        result.set(path, value, path, "not on the command line", Verdict.DEFAULT)
    if device == "cpu" and DEVICE not in result.settings:
        result.set(DEVICE, device, DEVICE, "this machine has no accelerator", Verdict.DEFAULT)
    for rule in rules_for(kind):
        rule(result)
    if kind == "rl":
        _drop_values_without_effect(result)
    _refuse_wrong_values(result)
    if not result.refusals:
        _refuse_combinations(result)
    return result


def read_arguments(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """(verl's keys with their values, arguments that are for Hydra itself). A later setting of a key wins.

    Hydra's `+key` and `++key` set a key like any other; `~key` takes it away, so that its default holds.
    """
    given: dict[str, Any] = {}
    for_hydra, flags = [], {}
    rest = iter(arguments)
    for argument in rest:
        flag, equals, text = argument.partition("=")
        if flag in FLAGS_WITH_VALUE:
            flags[FLAGS_WITH_VALUE[flag]] = text if equals else next(rest, "")
            continue
        if argument.startswith("-"):
            raise ConfigError(f"unknown flag {argument}", "use key=value, --config-name NAME or --config-path FOLDER")
        readable, override = parse_override(argument)
        if override is None or override.is_sweep_override():
            raise ConfigError(f"cannot read the argument {argument!r}", "write key=value; quote it for the shell")
        if override.key_or_group.split(".")[0] in HYDRA_ONLY:
            for_hydra.append(readable)
        elif override.is_delete():
            given.pop(override.key_or_group, None)
        else:
            _flatten(override.key_or_group, override.value(), given)
    return {**_from_file(flags), **given}, for_hydra


def flattened(nested: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a": {"b": 1}}` → `{"a.b": 1}`; an empty section stays as it is."""
    found: dict[str, Any] = {}
    for name, value in nested.items():
        _flatten(str(name), value, found)
    return found


def _flatten(path: str, value: Any, into: dict[str, Any]) -> None:
    """A mapping is so many keys: `a={b: 1}` is `a.b=1`."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            _flatten(f"{path}.{name}", inner, into)
    else:
        into[path] = value


def _from_file(flags: Mapping[str, str]) -> dict[str, Any]:
    """The keys of a configuration file of the user's own. What its `defaults:` list names is verl's, and in the table."""
    name = flags.get("name", OWN_CONFIGS[0]).removesuffix(".yaml")
    own = name in OWN_CONFIGS or name in CHOSEN_BY_FILE
    if "dir" not in flags and own:
        return dict(CHOSEN_BY_FILE.get(name, {}))
    from omegaconf import OmegaConf

    file = Path(flags.get("dir", ".")).expanduser() / f"{name}.yaml"
    if not file.is_file() and own:
        return dict(CHOSEN_BY_FILE.get(name, {}))
    if not file.is_file():
        raise ConfigError(f"there is no file {file}", "give --config-path FOLDER and --config-name NAME of a yaml file")
    content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    return flattened({str(name): value for name, value in dict(content).items() if name not in HYDRA_ONLY})  # type: ignore[arg-type]


def _place(result: Translation, key: str, path: str, value: Any) -> None:
    """Decide about verl's `key`, which is called `path` by now (renamings may chain)."""
    own = all_keys(result.schema).get(path)
    row = None if own is not None else result.table.row(path)
    if row is None and value in (None, {}):
        row = result.table.row(f"{path}.")  # a whole section that is not set
    if own is not None:
        _place_own(result, key, path, value)
    elif row is None and is_free_form(result.schema, path):
        result.set(path, value, key, verdict=Verdict.TAKEN if key == path else Verdict.TRANSLATED)
    elif row is None:
        near = nearest_keys(result.schema, path)
        fix = f"did you mean {' or '.join(near)}?" if near else "remove it; docs/configuration.md lists every key"
        result.refuse(key, "neither Quadriga nor its table of verl's keys has this key", fix)
    elif value is None or value in ({}, [], ""):
        result.set_aside(key, "not set")
    elif row.to is not None:
        here = row.target(path)
        if here in result.given and here != key:
            result.set_aside(key, f"{here} is on the command line too" + (f"; {row.changed}" if row.changed else ""))
            return
        if row.share:
            result.shared.add(here)
        _place(result, key, here, value)
        if row.changed and key in result.rows:
            result.rows[key] = replace(result.rows[key], note=row.changed)
    elif row.accepts(value) and row.same != "any":
        result.rows[key] = Row(key, value, Verdict.TAKEN, note=row.why)
    elif row.accepts(value) or row.verl == "aside" or (row.only_if and not any(map(result.given.get, row.only_if))):
        note = row.note or row.why
        result.set_aside(key, f"{note}; {row.changed}" if row.changed else note)
    else:
        result.refuse(key, row.why, row.instead)


def _place_own(result: Translation, key: str, path: str, value: Any) -> None:
    """A key that Quadriga has: its value may be one that only verl knows."""
    own = all_keys(result.schema)[path]
    verdict, note = (Verdict.TAKEN if key == path else Verdict.TRANSLATED), ""
    if value == "" and own.hint is bool:
        value, verdict, note = False, Verdict.TRANSLATED, "empty, as a shell variable that is not set leaves it"
    elif isinstance(value, bool) and own.hint in NUMBERS:
        value, verdict, note = int(value), Verdict.TRANSLATED, "true or false, as the number that it is in Python"
    elif value == "" or (value is None and not _may_be_null(own.typed, path)):
        result.set_aside(key, "not set")
        return
    items = value if isinstance(value, list) else [value]
    known = [(item, result.table.value(path, item)) for item in items]
    if _error(result, path, value) is not None or any(found for _, found in known):
        notes = [found.note or found.fix for _, found in known if found is not None and _can_translate(found)]
        if notes:
            kept = [
                item if f is None or not _can_translate(f) else f.becomes for item, f in known if not (f and f.drop)
            ]
            value, verdict, note = (
                (kept if isinstance(value, list) else kept[0] if kept else None),
                Verdict.TRANSLATED,
                "; ".join(notes),
            )
            if value is None:
                result.set_aside(key, note)
                return
    result.set(path, value, key, note, verdict)
    if key == path and path in result.table.changed:
        result.say(key, result.table.changed[path])


def _can_translate(found: Any) -> bool:
    return found.drop or found.becomes is not None


def _may_be_null(typed: Callable[[str, Any], Any], path: str) -> bool:
    try:
        typed(path, None)
    except ValueError:
        return False
    return True


def _error(result: Translation, path: str, value: Any) -> str | None:
    """Why `value` cannot be the value of our key `path`; None if it can, or if another key decides (`${a.b}`)."""
    if isinstance(value, str) and "${" in value:
        return None
    try:
        all_keys(result.schema)[path].typed(path, value)
    except ValueError as error:
        return str(error)
    return None


def _wrong(result: Translation) -> dict[str, str]:
    keys = all_keys(result.schema)
    errors = {path: _error(result, path, value) for path, value in result.settings.items() if path in keys}
    return {path: error for path, error in errors.items() if error is not None}


def _drop_values_without_effect(result: Translation) -> None:
    """What hangs on a switch that is off is set aside, wrong values too, until nothing of the kind is left."""
    while True:
        wrong = _wrong(result)
        config = _config_of(result, without=wrong)
        if config is None:
            return
        of_user = (keys_set_by_user(config) | set(wrong)) & set(result.settings)
        idle = values_without_effect(config, of_user)
        if not idle:
            return
        for (why, _), paths in idle.items():
            for path in paths:
                result.set_aside(result.source[path], why)


def _config_of(result: Translation, without: Iterable[str]) -> Config | None:
    """The typed configuration of all settings but `without`, unchecked; None where it cannot be resolved."""
    kept = {path: value for path, value in result.settings.items() if path not in without}
    try:
        return typed_config(Translation(result.kind, {}, kept).nested(), Problems())
    except ConfigError:
        return None  # the final check names the key


def _refuse_wrong_values(result: Translation) -> None:
    for path, error in _wrong(result).items():
        known = result.table.value(path, result.settings[path])
        instead = known.fix if known else f"{path}: {all_keys(result.schema)[path].spec.doc}"
        result.refuse(result.source[path], error, instead)


def _refuse_combinations(result: Translation) -> None:
    """The checks of our own entry on the whole."""
    problems = Problems()
    try:
        find_problems(result.nested(), problems, SCHEMAS[result.kind])
    except ConfigError as error:
        problems.add(error.what, error.fix)
    for i, (what, fix) in enumerate(problems.found, 1):
        result.rows[f"combination {i}"] = Row("the combination", None, Verdict.REFUSED, note=what, instead=fix)


def shown(value: Any) -> str:
    """A value as people write it."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {shown(inner)}" for name, inner in value.items()) + "}"
    return str(value)


def as_argument(value: Any) -> str:
    """A value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(as_argument, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{as_argument(inner)}" for name, inner in value.items()) + "}"
    return quote(value) if isinstance(value, str) else repr(value)
