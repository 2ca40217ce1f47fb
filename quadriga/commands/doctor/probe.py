"""Run something dangerous or heavy in a process of its own: it may crash, hang or print anything."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROBES = Path(__file__).with_name("probes.py")
_live: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True)
class ProbeResult:
    """How a probe ended and what it said until then, also when it was killed."""

    stdout: str
    stderr: str
    returncode: int
    timed_out_after_s: float | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """All JSON objects printed on lines of their own, merged; other output is ignored."""
        facts: dict[str, Any] = {}
        for line in self.stdout.splitlines():
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    facts |= value
        return facts

    @property
    def killed_by(self) -> str | None:
        """Name of the signal that ended the probe, such as "SIGILL"; None if it ended by itself or at its deadline."""
        if self.returncode >= 0 or self.timed_out_after_s is not None:
            return None
        with contextlib.suppress(ValueError):
            return signal.Signals(-self.returncode).name
        return f"signal {-self.returncode}"

    @property
    def failure(self) -> str | None:
        """Why there is no (complete) answer, in words; None after a clean exit."""
        if self.timed_out_after_s is not None:
            return f"no answer within {self.timed_out_after_s:g} s"
        if self.killed_by:
            return f"the process was killed by {self.killed_by}"
        if self.returncode:
            last_words = [line.strip() for line in self.stderr.splitlines() if line.strip()]
            return last_words[-1][:300] if last_words else f"the process ended with exit code {self.returncode}"
        return None


def run_probe(name: str, *args: str, env: Mapping[str, str], deadline_s: float) -> ProbeResult:
    """Run the probe `name` of `probes.py`. `-P` keeps the folder from shadowing real modules."""
    return run_command([sys.executable, "-P", str(_PROBES), name, *args], env=env, deadline_s=deadline_s)


def run_command(command: Sequence[str], *, env: Mapping[str, str], deadline_s: float) -> ProbeResult:
    """Run `command` in a session of its own; at the deadline the whole session is killed with SIGKILL.

    Output goes to files, not pipes: a grandchild that survives cannot keep the reader waiting.
    """
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=dict(env), start_new_session=True
        )
        _live.add(process)
        timed_out_after_s = None
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            timed_out_after_s = deadline_s
        finally:
            _kill_session(process)
            _live.discard(process)
        stdout.seek(0)
        stderr.seek(0)
        return ProbeResult(
            stdout.read().decode(errors="replace"),
            stderr.read().decode(errors="replace"),
            process.wait(),
            timed_out_after_s,
        )


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


@atexit.register
def _kill_live_probes() -> None:
    for process in list(_live):
        _kill_session(process)
