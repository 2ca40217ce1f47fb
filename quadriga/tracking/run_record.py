"""What a run says of itself while it goes on, for whoever looks at its directory from outside.

status.json    where it stands: state, step, phase, alarms; replaced about once a second, and every few seconds as a sign of life
events.jsonl   what happened, one line each: starts, resumes, messages, warnings, alarms, steering, the end; only ever appended to

Readers are `quadriga.dashboard` and the commands runs, watch and dash.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quadriga.config.typed import keys_set
from quadriga.tracking.events import Event
from quadriga.tracking.run_state import RunState, Validation

_LOG = logging.getLogger(__name__)
_KINDS = {"Config": "train", "SFTConfig": "sft", "RMConfig": "rm", "DPOConfig": "dpo"}
_RECORDED = ("start", "message", "alarm", "steered", "restart", "end")
RESTART = "restart"
"""The phase of a run between the end of workers that have died and the start of those that take their place."""
_UNREMARKABLE = ("trainer.project_name", "trainer.experiment_name", "trainer.default_local_dir")
WRITE_EVERY_S = 1.0
HEARTBEAT_S = 5.0
MAX_EVENT_BYTES, MAX_MESSAGE_BYTES = 20_000_000, 10_000_000
"""Of events.jsonl. Messages that only inform are no longer recorded at the lower limit, so that alarms still find room."""


class RunRecord:
    """Writes status.json and events.jsonl of a run. Give it every event (`take`); `close` it when the run ends.

    A disk that is full ends no run here: what must be kept says so itself.

    Args:
        folder: the run directory.
        about: what the run is: kind, and where known project, experiment, steering, changed (keys that were set).
        step: the one that the run goes on after.
        validations: what it had validated by then.
    """

    def __init__(
        self, folder: Path, about: dict[str, Any], step: int = 0, validations: dict[str, Validation] | None = None
    ) -> None:
        self._status_file, self._events_file = folder / "status.json", folder / "events.jsonl"
        self._state = RunState(step=step, start_step=step, validations=validations or {})
        self._alarms: dict[str, str] = {}
        self._error = ""
        self._phase_since = self._started = time.time()
        self._about = {
            "format": 1,
            **about,
            "pid": os.getpid(),
            "process": process_mark(os.getpid()),
            "host": socket.gethostname(),
            "started": round(self._started, 3),
            "folder": str(folder),
        }
        self._lock = threading.Lock()
        self._is_new = threading.Event()
        self._over = threading.Event()
        self._write_status()
        self._thread = threading.Thread(target=self._keep_writing, name="run status", daemon=True)
        self._thread.start()

    def tell(self, **about: Any) -> None:
        """Something more of what the run is, or came to."""
        with self._lock:
            self._about |= about

    def take(self, event: Event) -> None:
        """Take one event in; may be called by any thread."""
        with self._lock:
            kind = event["kind"]
            self._state.apply(event)
            if kind in ("phase", "start"):
                self._phase_since = event["time"]
            elif kind == "step":
                names = [n.removeprefix("alarm/") for n, v in event["metrics"].items() if n.startswith("alarm/") and v]
                self._alarms = {n: self._alarms.get(n, "so already before the run was resumed") for n in names}
            elif kind == "alarm":
                self._alarms[event["name"]] = event["text"]
            elif kind == "end":
                self._error = str(event.get("error") or "")
            if kind in _RECORDED:
                self._append({"step": self._state.step, **event})
        if event["kind"] == "end":
            self._write_status()
        self._is_new.set()

    def close(self) -> None:
        """Write the last state; nothing is written afterwards."""
        self._over.set()
        self._is_new.set()
        self._thread.join()
        self._write_status()

    def _keep_writing(self) -> None:
        while not self._over.is_set():
            self._is_new.wait(HEARTBEAT_S)
            self._is_new.clear()
            self._write_status()
            self._over.wait(WRITE_EVERY_S)

    def _write_status(self) -> None:
        with self._lock:
            state, now = self._state, time.time()
            innermost = state.open_phases[-1] if state.open_phases else ""
            content = {
                **self._about,
                "state": state.status or "running",
                "error": self._error[:4000],
                "updated": round(now, 3),
                "step": state.step,
                "start_step": state.start_step,
                "total_steps": state.total_steps,
                "seconds_per_step": state.seconds_per_step,
                "phases": state.open_phases,
                "phase_since": round(self._phase_since, 3),
                "phase_usual_s": state.phase_seconds().get(innermost),
                "validations": {source: asdict(seen) for source, seen in state.validations.items()},
                "alarms": self._alarms,
            }
            temporary = self._status_file.with_name(f".status.json.{os.getpid()}.tmp")
            try:  # whole or not at all, but not fsynced: it says what is, and is worth nothing after a power cut
                temporary.write_text(json.dumps(content, ensure_ascii=False, default=str), encoding="utf-8")
                os.replace(temporary, self._status_file)
            except OSError as error:
                _LOG.warning("%s cannot be written: %s", self._status_file, error.strerror)

    def _append(self, event: dict[str, Any]) -> None:
        line = json.dumps(event, ensure_ascii=False, default=str).encode(errors="replace") + b"\n"
        only_informs = event["kind"] == "message" and event.get("level") != "warning"
        room = MAX_MESSAGE_BYTES if only_informs else MAX_EVENT_BYTES
        try:
            descriptor = os.open(self._events_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                if os.fstat(descriptor).st_size + len(line) <= room:
                    os.write(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            _LOG.warning("%s cannot be written: %s", self._events_file, error.strerror)


def about_training(config: Any) -> dict[str, Any]:
    """What a training run is, by its checked configuration, a dataclass."""
    return {
        "kind": _KINDS.get(type(config).__name__, "train"),
        "project": config.trainer.project_name,
        "experiment": config.trainer.experiment_name,
        "steering": config.trainer.steering,
        "changed": {k: v for k, v in keys_set(asdict(config), type(config)).items() if k not in _UNREMARKABLE},
    }


def process_mark(pid: int) -> str:
    """When the process began, in the kernel's own count: tells it from a later one with the same number; "" if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


class TokenTexts:
    """The text of each token by itself, such that the texts of a response, joined, read like the response."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, ids: list[int]) -> list[str]:
        new = sorted(set(ids) - self._known.keys())
        if new:
            texts = self._tokenizer.batch_decode([[i] for i in new], skip_special_tokens=False)
            for token, name, text in zip(new, self._tokenizer.convert_ids_to_tokens(new), texts):
                # Decoding one token by itself loses the space before it where the vocabulary marks that as "▁".
                lost_space = isinstance(name, str) and name.startswith("▁") and not text.startswith(" ")
                self._known[token] = f" {text}" if lost_space else text
        return [self._known[token] for token in ids]
