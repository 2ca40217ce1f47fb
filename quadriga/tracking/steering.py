"""Telling a live run something: `quadriga tell RUN save|validate|stop|set key=value`, with `trainer.steering=True`.

steering/inbox.jsonl    what was asked for, appended by whoever asks
steering/obeyed.jsonl   what the run did about it, and at the end of which step; appended by the run

The record makes a resumed run the same run: what was set up to its step is set again before it goes on, and what was set in
steps that come again is set again when they end.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from quadriga.config.schema import Config
from quadriga.config.typed import all_keys
from quadriga.errors import ConfigError

WORDS = ("save", "validate", "stop", "set")
_ACTOR = "actor_rollout_ref.actor"
SETTABLE = {
    f"{_ACTOR}.optim.lr": "actor",
    f"{_ACTOR}.clip_ratio": "actor",
    f"{_ACTOR}.clip_ratio_low": "actor",
    f"{_ACTOR}.clip_ratio_high": "actor",
    f"{_ACTOR}.entropy_coeff": "actor",
    f"{_ACTOR}.kl_loss_coef": "actor",
    "critic.optim.lr": "critic",
    "critic.cliprange_value": "critic",
    "trainer.test_freq": "driver",
    "trainer.save_freq": "driver",
}
"""Keys that can be set while a run goes on → who must hear of it: the driver alone, or a worker group too."""


@dataclass(frozen=True)
class Command:
    """One thing that a run is told. `step` and `result` are filled in when it has been done."""

    word: str
    key: str = ""
    value: Any = None
    id: str = ""
    time: float = 0.0
    by: str = ""
    step: int = -1
    result: str = ""

    def __str__(self) -> str:
        return f"set {self.key}={self.value}" if self.word == "set" else self.word


def parse_command(words: list[str]) -> Command:
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
        raise ConfigError("set takes one key=value", "write set actor.optim.lr=1e-6, for example")
    keys = [key for key in SETTABLE if key == name or key.endswith(f".{name}")]
    if len(keys) != 1:
        fix = f"these can be: {', '.join(SETTABLE)}"
        raise ConfigError(f"{name} is {'ambiguous' if keys else 'no key that a live run can change'}", fix)
    return Command("set", keys[0], _typed(keys[0], text))


def _typed(key: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    try:
        return all_keys(Config)[key].typed(key, value)
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
    """The run's side. Without `trainer.steering` it hears nothing and costs nothing.

    Args:
        run: the run directory.
        enabled: whether the run may be told anything.
        record: shows a command that was obeyed (`step`, `command`, `result`).
    """

    def __init__(self, run: Path, enabled: bool, record: Callable[[dict[str, Any]], None]) -> None:
        self._inbox, self._obeyed = run / "steering" / "inbox.jsonl", run / "steering" / "obeyed.jsonl"
        self._enabled, self._record = enabled, record
        self._wanted: set[str] = set()
        self._past = read_commands(self._obeyed) if enabled else []
        """What was done before this process took over; those of steps that come again are done again."""
        self._known = {command.id for command in self._past}
        self._offset = 0

    def go_on_after(self, step: int, trainer: Any) -> None:
        """The run is resumed after `step`: what was set until then is set again."""
        for command in self._past:
            if command.word == "set" and command.step <= step:
                _set(trainer, command)
        self._past = [command for command in self._past if command.step > step]

    def obey(self, trainer: Any) -> None:
        """At the end of a step, before validation and checkpoint: do what was asked for since the last one.

        `trainer` has `step`, `config`, `crew` with the groups `actor` and `critic`, and `stop_requested`.
        """
        if not self._enabled:
            return
        for command in self._past:  # the run has come this way before; a stop has had its effect
            if command.step == trainer.step and command.word != "stop":
                self._do(trainer, command)
        for command in self._new():
            done = replace(command, step=trainer.step, result=self._do(trainer, command))
            _append(self._obeyed, done)
            self._record({"step": done.step, "command": str(done), "result": done.result, "by": done.by})

    def takes(self, word: str) -> bool:
        """Whether `word` ("save" or "validate") was asked for; it is no longer afterwards."""
        if word not in self._wanted:
            return False
        self._wanted.remove(word)
        return True

    def _do(self, trainer: Any, command: Command) -> str:
        if command.word == "set":
            return _set(trainer, command)
        if command.word == "stop":
            trainer.stop_requested = True
            return "the run ends after this step, with a checkpoint"
        self._wanted.add(command.word)
        return {"save": "a checkpoint of this step is written", "validate": "validated after this step"}[command.word]

    def _new(self) -> list[Command]:
        """Whole lines of the inbox that were not read yet; one that is no command is passed over."""
        commands, self._offset = _commands_from(self._inbox, self._offset)
        new = [command for command in commands if command.id and command.id not in self._known]
        self._known |= {command.id for command in new}
        return new


def _set(trainer: Any, command: Command) -> str:
    """Change a key in the configuration, and where a worker group reads it, there too. Returns what was done."""
    section, _, name = command.key.rpartition(".")
    target = trainer.config
    for part in section.split("."):
        target = getattr(target, part)
    before = getattr(target, name)
    listener = SETTABLE[command.key]
    if listener != "driver":
        group = getattr(trainer.crew, listener)
        if group is None:
            return f"not done: this run has no {listener}"
        group.set_key(command.key, command.value)
    setattr(target, name, command.value)
    return f"{before} → {command.value}"


def read_commands(path: Path) -> list[Command]:
    """All commands of an inbox or a record, in order; lines that are none are passed over."""
    return _commands_from(path, 0)[0]


def _commands_from(path: Path, offset: int) -> tuple[list[Command], int]:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read()
    except FileNotFoundError:
        return [], offset
    whole = text[: text.rfind(b"\n") + 1]
    found = []
    for line in whole.splitlines():
        try:
            command = Command(**json.loads(line))
            if command.word == "set":
                if command.key not in SETTABLE:
                    continue
                all_keys(Config)[command.key].typed(command.key, command.value)
        except (ValueError, TypeError):
            continue
        if command.word in WORDS:
            found.append(command)
    return found, offset + len(whole)


def _append(path: Path, command: Command) -> None:
    line = json.dumps(asdict(command), ensure_ascii=False).encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
