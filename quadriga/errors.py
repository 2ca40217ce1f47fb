"""The errors a user of Quadriga can meet. Each says what happened, where, and what to do about it.

Only plain strings are kept, so every error survives pickling through Ray unchanged.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C has ended."""
NEEDED = {"numpy", "torch", "ray", "transformers", "pyarrow", "rich", "omegaconf", "hydra", "yaml"}
NEVER_IMPORTED = {"antigravity", "chunk", "idlelib", "sched", "this", "trace", "turtle", "turtledemo", "wave"}
"""Modules of Python's own that nobody here asks for, and whose names a user may well give to a file."""


class QuadrigaError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: what happened and where, as one or more plain sentences.
        fix: what the user can do about it; shown on its own line.
    """

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what, fix)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\n  fix: {self.fix}" if self.fix else self.what


class ConfigError(QuadrigaError, ValueError):
    """A configuration that cannot run: unknown key, wrong type, no effect, impossible combination."""


class RunStopped(QuadrigaError):
    """A run that ended before its last step because somebody asked it to."""


class ResourceError(QuadrigaError, ValueError):
    """The cluster does not have what the configuration asks for, or cannot be reached."""


class WorkerError(QuadrigaError, RuntimeError):
    """A worker raised, died, or did not answer in time. The worker's own traceback comes first."""


class DataError(QuadrigaError, ValueError):
    """A dataset that cannot be used: file, row and column are named."""


class RewardError(QuadrigaError, RuntimeError):
    """Scoring failed in a way the run must not hide."""


class CheckpointError(QuadrigaError, RuntimeError):
    """A checkpoint that cannot be written, read or trusted."""


def refuse_hidden_packages() -> None:
    """ConfigError where a file in the working folder would be imported instead of a package, or a module of Python's own."""
    try:
        here = set(os.listdir())
    except OSError:  # the folder is gone, or may not be read: whoever needs it will say so
        return
    for name in sorted(NEEDED | (sys.stdlib_module_names - NEVER_IMPORTED)):
        for file in (f"{name}.py", os.path.join(name, "__init__.py")):
            if file.partition(os.sep)[0] in here and os.path.exists(file):
                kind = "package" if name in NEEDED else "module"
                raise ConfigError(
                    f"{os.path.abspath(file)} hides the {kind} {name}: Python would import it instead",
                    "rename it, or work in another folder",
                )


def exit_if_packages_are_hidden() -> None:
    """The same for a program that has only just begun, and could not import what would tell it well."""
    try:
        refuse_hidden_packages()
    except ConfigError as error:
        sys.exit(printable(f"{type(error).__name__}: {error}"))


def printable(text: str) -> str:
    """`text` as it can be shown on any terminal: control characters, which could move the cursor or worse, and halves of
    characters are written as escapes; line breaks and tabs stay."""
    shown = "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def run_command(command: Callable[[list[str]], int | None], arguments: list[str]) -> int:
    """The exit code of `command`. One of our own errors, and one of the system's (a full disk, a folder that is gone), is
    printed without a stack, unless `--debug` is an argument."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale may lack our letters
    try:
        if {"", _working_folder()} & set(sys.path):
            refuse_hidden_packages()
        return _flushed(command, [a for a in arguments if a != "--debug"])
    except QuadrigaError as error:
        return _told(error, str(error), arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        _throw_away_what_is_left()
        return 128 + 13
    except OSError as error:
        _throw_away_what_is_left()
        where = error.filename or "standard output or a file"  # the system names no file that was open already
        what = f"{where}: {error.strerror}" if error.strerror else str(error)
        return _told(error, f"{what} (--debug shows the stack)", arguments)


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the folder that this command was started in is gone", "change to another one") from None


def _flushed(command: Callable[[list[str]], int | None], arguments: list[str]) -> int:
    """What is printed has arrived when the command is over: else nobody would hear that it has not."""
    try:
        code = command(arguments) or 0
    except SystemExit:  # of argparse, after --help
        if sys.stdout is not None:
            sys.stdout.flush()
        raise
    if sys.stdout is not None:
        sys.stdout.flush()
    return code


def _told(error: Exception, text: str, arguments: list[str]) -> int:
    if "--debug" in arguments:
        import traceback

        traceback.print_exception(error)
    print(printable(f"{type(error).__name__}: {text}"), file=sys.stderr)
    return 1


def _throw_away_what_is_left() -> None:
    """Where nothing can be printed any more, Python would fail once more at its end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
