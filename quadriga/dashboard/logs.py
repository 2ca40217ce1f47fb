"""What the workers of a run printed: the files in logs/, a page at a time, from the end."""

from __future__ import annotations

import os
import re
from typing import Any

from quadriga.dashboard.catalog import Run
from quadriga.dashboard.files import Unreadable, encodable, open_inside

PAGE_BYTES = 64 << 10
MOST_FILES = 1000
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def log_files(run: Run) -> list[dict[str, Any]]:
    """The files of logs/ by name, with their size and when they were last written to; empty ones are left out."""
    found: list[dict[str, Any]] = []
    try:
        with os.scandir(run.path / "logs") as entries:
            for entry in entries:
                if len(found) < MOST_FILES and entry.is_file(follow_symlinks=False):
                    about = entry.stat(follow_symlinks=False)
                    found.append({"file": encodable(entry.name), "size": about.st_size, "changed": about.st_mtime})
    except OSError:
        return []
    return sorted((file for file in found if file["size"]), key=lambda file: _in_numbers(file["file"]))


def log_page(run: Run, name: str, before: int | None = None, after: int | None = None) -> dict[str, Any]:
    """The whole lines before or after a byte of a file of logs/, or at its end: the text, and where it begins and ends.

    Raises:
        Unreadable: there is no such file.
    """
    if name not in [file["file"] for file in log_files(run)]:
        raise Unreadable(f"logs/ has no file {name[:200]}")
    with open_inside(run.path, "logs", name) as file:
        size = file.seek(0, os.SEEK_END)
        end = min(size if before is None else before, size) if after is None else min(after + PAGE_BYTES, size)
        start = max(end - PAGE_BYTES, 0) if after is None else min(after, size)
        file.seek(start)
        raw = file.read(end - start)
    # Only lines that are there as a whole; of one that is longer than a page, what there is.
    if after is not None and (cut := raw.rfind(b"\n") + 1) > 0:
        raw = raw[:cut]
    elif after is None and start and 0 < (cut := raw.find(b"\n") + 1) < len(raw):
        start, raw = start + cut, raw[cut:]
    text = _COLOURS.sub("", raw.decode(errors="replace")).replace("\r\n", "\n")
    return {"text": text, "start": start, "end": start + len(raw), "size": size}


def _in_numbers(name: str) -> list[Any]:
    """`actor_2.log` before `actor_10.log`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
