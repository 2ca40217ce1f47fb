"""Probe: compile and load the kernels for CPUs, as a worker does."""

from __future__ import annotations

import json
import subprocess

from quadriga.models.kernels.cpu.library import load


def main() -> None:
    try:
        load()
    except (OSError, subprocess.SubprocessError) as error:
        print(json.dumps({"failure": str(error)}))
    else:
        print(json.dumps({"failure": None}))


if __name__ == "__main__":
    main()
