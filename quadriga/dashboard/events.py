"""What happened in a run: the newest lines of events.jsonl, and the reports of its stalls."""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from quadriga.dashboard.catalog import Run
from quadriga.dashboard.files import Unreadable, encodable, finite, open_inside, parse_line, read_lines

MOST_EVENTS = 2000
"""Of a run, of either sort: alarms and the like are not pushed out by messages that only inform."""
_HELD = 64


@dataclass
class History:
    """How far the file was read, and the newest of what it held, each with its number."""

    inode: int = 0
    offset: int = 0
    count: int = 0
    remarkable: deque[tuple[int, dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    messages: deque[tuple[int, dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))


class Events:
    """The events of runs; reads on where it left off."""

    def __init__(self) -> None:
        self._histories: OrderedDict[str, History] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, run: Run, most: int = MOST_EVENTS) -> list[dict[str, Any]]:
        """The newest, oldest first: as many alarms, warnings, restarts and the like, and besides as many other messages."""
        with self._lock:
            history = self._histories.pop(run.id, History())
            try:
                with open_inside(run.path, "events.jsonl") as file:
                    history = _read_on(history, file)
            except (Unreadable, OSError):
                return []
            self._histories[run.id] = history
            while len(self._histories) > _HELD:
                self._histories.popitem(last=False)
            return [event for _, event in sorted([*list(history.remarkable)[-most:], *list(history.messages)[-most:]])]


def _read_on(history: History, file: Any) -> History:
    about = os.fstat(file.fileno())
    if about.st_ino != history.inode or about.st_size < history.offset:
        history = History(inode=about.st_ino)
    file.seek(history.offset)
    for _, raw in read_lines(file):
        history.offset = file.tell()
        if (line := parse_line(raw)) is not None:
            history.count += 1
            only_informs = line.get("kind") == "message" and line.get("level") != "warning"
            (history.messages if only_informs else history.remarkable).append((history.count, _shown(line)))
    return history


def _shown(line: dict[str, Any]) -> dict[str, Any]:
    lengths = {"kind": 20, "level": 20, "name": 80, "look": 2000}
    texts = {name: encodable(str(line.get(name, "")))[:most] for name, most in lengths.items()}
    numbers = {"time": finite(line.get("time")), "step": finite(line.get("step"))}
    return {**texts, **numbers, "text": encodable(_text(line))[:20_000]}


def _text(line: dict[str, Any]) -> str:
    kind = line.get("kind")
    if kind == "start":
        after = finite(line.get("start_step"))
        return f"resumed after step {after:.0f}" if after else "started"
    if kind == "steered":
        return f"{line.get('command')}: {line.get('result')}"
    if kind == "end":
        return str(line.get("status")) + (f": {line['error']}" if line.get("error") else "")
    return str(line.get("text", ""))


def stall_reports(run: Run) -> list[dict[str, Any]]:
    """The reports of phases that took far too long: `step_<step>_<phase>.txt` in stalls/, in order of the steps."""
    found = []
    try:
        names = sorted(os.listdir(run.path / "stalls"))
    except OSError:
        return []
    for name in names[:500]:
        if match := re.fullmatch(r"step_(\d{1,12})_([\w.-]+)\.txt", name):
            found.append({"file": name, "step": int(match[1]), "phase": match[2]})
    return found


def stall_text(run: Run, name: str, most_bytes: int = 1 << 20) -> str:
    """What one of them says. Unreadable: there is no such report."""
    if name not in [report["file"] for report in stall_reports(run)]:
        raise Unreadable("there is no such report")
    with open_inside(run.path, "stalls", name) as file:
        return file.read(most_bytes).decode(errors="replace")
