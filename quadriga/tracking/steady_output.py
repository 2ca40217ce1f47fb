"""Standard output and error that cannot end a run: a closed pipe or a full disk behind them costs the lines, nothing else.

`quadriga train | head -3` closes the pipe after three lines. What a run does is in its run directory, so it goes on.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

NAMES = ("stdout", "stderr")


class SteadyStream(io.TextIOBase):
    """Writes through to `stream`; after the first failure its file descriptor leads nowhere, and nothing fails any more."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self.broken = False

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:  # a terminal of another language: marks where it has no letter for ours
            encoding = self._stream.encoding or "ascii"
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError) as error:  # ValueError: closed by somebody else
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        return not self.broken and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def _give_up(self, error: Exception) -> None:
        if self.broken:
            return
        self.broken = True
        # What the stream still holds would fail again when Python ends; it goes the same way as all that follows.
        with suppress(OSError, ValueError):
            _lead_nowhere(self._stream.fileno())
        why = getattr(error, "strerror", None) or str(error)
        other = next(name for name in NAMES if name != self._name)
        text = f"standard {'output' if self._name == 'stdout' else 'error'} is gone ({why}); the run goes on"
        print(text, file=getattr(sys, other))


@contextmanager
def steady_output() -> Iterator[None]:
    """Both streams of this process made steady while the block runs."""
    before = {name: getattr(sys, name) for name in NAMES}
    steady: dict[str, SteadyStream] = {}
    for number, name in enumerate(NAMES, 1):
        stream = before[name]
        if stream is None:  # started with it closed: its descriptor must not become that of the next file opened
            _lead_nowhere(number)
            stream = before[name] = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        steady[name] = SteadyStream(stream, name)
        setattr(sys, name, steady[name])
    try:
        yield
    finally:
        for name, ended in steady.items():
            ended.flush()
            ended.broken = True  # Python flushes it once more when it goes, maybe after what is behind it was closed
            setattr(sys, name, before[name])


def _lead_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
