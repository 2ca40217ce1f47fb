"""The errors a user of Quadriga can meet. Each says what happened, where, and what to do about it.

Only plain strings are kept, so every error survives pickling through Ray unchanged.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C has ended."""


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
    """ConfigError where a file in the working folder would be imported instead of a package that everything needs."""
    for name in ("numpy", "torch", "ray", "transformers", "pyarrow", "rich", "omegaconf", "hydra", "yaml"):
        for found in (os.path.abspath(f"{name}.py"), os.path.join(os.path.abspath(name), "__init__.py")):
            if os.path.exists(found):
                raise ConfigError(
                    f"{found} hides the package {name}: Python would import it instead",
                    "rename it, or work in another folder",
                )


def printable(text: str) -> str:
    """`text` as it can be shown on any terminal: control characters, which could move the cursor or worse, and halves of
    characters are written as escapes; line breaks and tabs stay."""
    shown = "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def run_command(command: Callable[[list[str]], int | None], arguments: list[str]) -> int:
    """The exit code of `command`; one of our own errors is printed without a stack, unless `--debug` is an argument."""
    debug = "--debug" in arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale may lack our letters
    try:
        if {"", os.getcwd()} & set(sys.path):
            refuse_hidden_packages()
        return command([a for a in arguments if a != "--debug"]) or 0
    except QuadrigaError as error:
        if debug:
            traceback.print_exc()
        print(printable(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
