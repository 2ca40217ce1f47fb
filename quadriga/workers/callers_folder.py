"""The folder in which the user started the run: relative paths mean the same in every process."""

from __future__ import annotations

import os

CALLERS_FOLDER = "QUADRIGA_CALLERS_FOLDER"
"""The variable that names it."""


def enter_callers_folder() -> None:
    """Go there, where this machine has it."""
    folder = os.environ.get(CALLERS_FOLDER)
    if folder and os.path.isdir(folder):
        os.chdir(folder)
