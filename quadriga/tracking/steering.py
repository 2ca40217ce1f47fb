"""Telling a live run something: `quadriga tell RUN save|validate|stop|set key=value`, with `trainer.steering=True`.

steering/inbox.jsonl    what was asked for, appended by whoever asks
steering/obeyed.jsonl   what the run did about it, and at the end of which step; appended by the run

The record makes a resumed run the same run: what was set up to its step is set again before it goes on, and what was set in
steps that come again is set again when they end. A value that the resuming command itself changes wins over what was told.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from quadriga.atomic_file import named_disk_errors
from quadriga.config.no_effect import values_without_effect
from quadriga.config.schema import Config
from quadriga.config.supervised_schema import SCHEMAS
from quadriga.config.typed import all_keys, get_key, set_key
from quadriga.errors import ConfigError

WORDS = ("save", "validate", "stop", "set")
GIVEN = "given"
"""In the record only: a resuming command gave a key another value than the run had, so what was told of it is over."""
_ACTOR = "actor_rollout_ref.actor"
_SCHEDULE = ("trainer.test_freq", "trainer.save_freq")
SETTABLE: dict[type, tuple[str, ...]] = {
    Config: (
        f"{_ACTOR}.optim.lr",
        f"{_ACTOR}.clip_ratio",
        f"{_ACTOR}.clip_ratio_low",
        f"{_ACTOR}.clip_ratio_high",
        f"{_ACTOR}.entropy_coeff",
        f"{_ACTOR}.kl_loss_coef",
        "critic.optim.lr",
        "critic.cliprange_value",
        *_SCHEDULE,
    ),
    **dict.fromkeys(SCHEMAS.values(), ("optim.lr", *_SCHEDULE)),
}
"""Configuration → its keys that can be set while a run goes on."""
NOT_DONE = "not done: "
"""How the result of a command begins that had no effect."""


@dataclass(frozen=True)
class Command:
    """One thing that a run is told. `step`, `result` and `started_with` are filled in when it has been done."""

    word: str
    key: str = ""
    value: Any = None
    id: str = ""
    time: float = 0.0
    by: str = ""
    step: int = -1
    result: str = ""
    started_with: Any = None
    """The key's value in the configuration that the run was started with."""

    def __str__(self) -> str:
        if self.word == "set":
            return f"set {self.key}={self.value}"
        return f"resumed with {self.key}={self.value}" if self.word == GIVEN else self.word

    @property
    def is_well_formed(self) -> bool:
        """Whether the fields have their types: anybody may have written the line."""
        texts = (self.word, self.key, self.id, self.by, self.result)
        return all(isinstance(t, str) for t in texts) and isinstance(self.time, (int, float)) and type(self.step) is int

    @property
    def sets(self) -> bool:
        return self.word in ("set", GIVEN)


class Steerable(Protocol):
    """A trainer that can be told something."""

    step: int
    config: Any
    stop_requested: bool

    def set_key(self, key: str, value: Any) -> str:
        """Another value of a key for those who read it, from the next step on. Returns why that cannot be, else ""."""


def parse_command(words: list[str], schema: type = Config) -> Command:
    """The command in the words of a command line. ConfigError: there is no such command, or the value cannot be set."""
    word = words[0] if words else ""
    if word not in WORDS:
        raise ConfigError(f"a run cannot be told {word!r}", f"use one of {', '.join(WORDS)}")
    if word != "set":
        if len(words) > 1:
            raise ConfigError(f"{word} takes nothing after it, got {' '.join(words[1:])}", f"write {word} alone")
        return Command(word)
    name, equals, text = words[1].partition("=") if len(words) == 2 else ("", "", "")
    if not equals:
        raise ConfigError("set takes one key=value", "write set optim.lr=1e-6, for example")
    keys = [key for key in SETTABLE[schema] if key == name or key.endswith(f".{name}")]
    if len(keys) != 1:
        fix = f"these can be: {', '.join(SETTABLE[schema])}"
        raise ConfigError(f"{name} is {'ambiguous' if keys else 'no key that a live run can change'}", fix)
    return Command("set", keys[0], _typed(schema, keys[0], text))


def _typed(schema: type, key: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    try:
        return all_keys(schema)[key].typed(key, value)
    except ValueError as error:
        raise ConfigError(f"{key}={text}: {error}", "give it a value of its type and within its bounds") from None


def tell(run: Path, command: Command) -> Command:
    """Put a command into a run's inbox; it is obeyed when the step at hand ends."""
    who = f"{getpass.getuser()}@{socket.gethostname()}"
    signed = replace(command, id=uuid.uuid4().hex[:12], time=round(time.time(), 3), by=who)
    folder = run / "steering"
    folder.mkdir(exist_ok=True)
    _append(folder / "inbox.jsonl", signed)
    return signed


class Steering:
    """The run's side. Without `trainer.steering` it hears nothing; what was told before holds all the same.

    Args:
        run: the run directory; None: another process reads it, and tells this one by `share`.
        config: as the run was started or resumed, before anything is set.
        record: shows a command that was obeyed (`step`, `command`, `result`, `by`).
        say: tells the user something.
        since: when the run was started or resumed. What was told before, and not heard, is not obeyed now.
        share: what the process that reads has, in all processes of the run, which call this at the same moments.
    """

    def __init__(
        self,
        run: Path | None,
        config: Any,
        record: Callable[[dict[str, Any]], None],
        say: Callable[[str], None],
        since: float = 0.0,
        share: Callable[[list[Command]], list[Command]] = lambda commands: commands,
    ) -> None:
        self._folder = None if run is None else run / "steering"
        self._schema, self._enabled = type(config), config.trainer.steering
        self._given = {key: get_key(config, key) for key in SETTABLE[self._schema]}
        self._record, self._say, self._since, self._share = record, say, since, share
        self._wanted: set[str] = set()
        self._past = share([] if self._folder is None else self._obeyed_before(self._folder))
        """What was done before this process took over; those of steps that come again are done again."""
        self._offset = 0

    def go_on_after(self, trainer: Steerable) -> None:
        """The run is resumed after `trainer.step`: what was set until then is set again, unless a new value is given."""
        step = trainer.step
        for key in dict.fromkeys(command.key for command in self._past if command.sets):
            own = [command for command in self._past if command.key == key]
            given_before = [c.value for c in own if c.word == GIVEN and c.step <= step]
            if self._given[key] != (given_before[-1] if given_before else own[0].started_with):
                self._forget(Command(GIVEN, key, self._given[key], step=step), own)
                continue
            done = [command for command in own if command.step <= step]
            for command in done:
                self._set(trainer, command)
            if done and done[-1].word == "set":
                self._say(f"{key}={done[-1].value}, as told after step {done[-1].step}")
        self._past = [command for command in self._past if command.step > step]

    def obey(self, trainer: Steerable) -> None:
        """At the end of a step, before validation and checkpoint: do what was asked for since the last one."""
        for command in self._past:  # the run has come this way before; a stop has had its effect
            if command.step == trainer.step and command.word != "stop":
                self._do(trainer, command)
        if not self._enabled:
            return
        for command in self._share(self._new()):
            late = command.time < self._since
            result = f"{NOT_DONE}told before the run was started or resumed" if late else self._do(trainer, command)
            self._note(replace(command, step=trainer.step, result=result, started_with=self._given.get(command.key)))

    def takes(self, word: str) -> bool:
        """Whether `word` ("save" or "validate") was asked for; it is no longer afterwards."""
        if word not in self._wanted:
            return False
        self._wanted.remove(word)
        return True

    def _do(self, trainer: Steerable, command: Command) -> str:
        if command.sets:
            return self._set(trainer, command)
        if command.word == "stop":
            trainer.stop_requested = True
            return "the run ends after this step, with a checkpoint"
        self._wanted.add(command.word)
        return {"save": "a checkpoint of this step is written", "validate": "validated after this step"}[command.word]

    def _set(self, trainer: Steerable, command: Command) -> str:
        """Change a key where it is read. Returns what was done."""
        before = get_key(trainer.config, command.key)
        problem = _no_effect(trainer.config, command) or trainer.set_key(command.key, command.value)
        if problem:
            return f"{NOT_DONE}{problem}"
        set_key(trainer.config, command.key, command.value)
        return f"{before} → {command.value}"

    def _forget(self, given: Command, told: list[Command]) -> None:
        self._past = [command for command in self._past if command not in told]
        what = f"{told[-1].value}, told after step {told[-1].step}, no longer holds"
        self._say(f"{given.key}={given.value} as given now; {what}")
        self._note(replace(given, id=uuid.uuid4().hex[:12], time=round(time.time(), 3), result=what))

    def _note(self, done: Command) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(exist_ok=True)
        _append(self._folder / "obeyed.jsonl", done)
        self._record({"step": done.step, "command": str(done), "result": done.result, "by": done.by})

    def _obeyed_before(self, folder: Path) -> list[Command]:
        """The record, without what was not done, and without what a later resume has made void."""
        past: list[Command] = []
        self._known = set()
        for command in _commands_from(folder / "obeyed.jsonl", 0, self._schema, (*WORDS, GIVEN))[0]:
            self._known.add(command.id)
            if command.word == GIVEN:
                past = [c for c in past if c.key != command.key or c.step <= command.step]
            if not command.result.startswith(NOT_DONE):
                past.append(command)
        return past

    def _new(self) -> list[Command]:
        """Whole lines of the inbox that were not read yet; one that is no command is passed over."""
        if self._folder is None:
            return []
        commands, self._offset = _commands_from(self._folder / "inbox.jsonl", self._offset, self._schema, WORDS)
        new = [command for command in commands if command.id and command.id not in self._known]
        self._known |= {command.id for command in new}
        return new


def _no_effect(config: Any, command: Command) -> str:
    """Why the value would change nothing; "" where it does."""
    if type(config) not in (Config, *SCHEMAS.values()):
        return ""
    changed = deepcopy(config)
    set_key(changed, command.key, command.value)
    reasons = values_without_effect(changed, {command.key})
    return "; ".join(f"it has no effect, {why}" for why, _ in reasons)


def was_obeyed(run: Path, command: Command) -> Command | None:
    """What the run did about a command; None: nothing so far."""
    for line in _lines(run / "steering" / "obeyed.jsonl", 0)[0]:
        if line.get("id") == command.id:
            return Command(**line)
    return None


def _commands_from(path: Path, offset: int, schema: type, words: tuple[str, ...]) -> tuple[list[Command], int]:
    """All commands of an inbox or a record, in order; lines that are none are passed over."""
    lines, offset = _lines(path, offset)
    found = []
    for line in lines:
        try:
            command = Command(**line)
            if not command.is_well_formed:
                continue
            if command.sets:
                if command.key not in SETTABLE[schema]:
                    continue
                all_keys(schema)[command.key].typed(command.key, command.value)
        except (ValueError, TypeError):
            continue
        if command.word in words:
            found.append(command)
    return found, offset


def _lines(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines from `offset` on that are JSON objects, and where they end."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read()
    except FileNotFoundError:
        return [], offset
    whole = text[: text.rfind(b"\n") + 1]
    found = []
    for raw in whole.splitlines():
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            found.append(line)
    return found, offset + len(whole)


def _append(path: Path, command: Command) -> None:
    line = json.dumps(asdict(command), ensure_ascii=False).encode() + b"\n"
    with named_disk_errors(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
