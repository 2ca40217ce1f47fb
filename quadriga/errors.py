"""The errors a user of Quadriga can meet. Each says what happened, where, and what to do about it.

Only plain strings are kept, so every error survives pickling through Ray unchanged.
"""

from __future__ import annotations


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
