"""`quadriga doctor`: look at this machine and cluster, and say what would go wrong and how to fix it.

Torch and Ray are never imported here: a broken install must not break its own diagnosis, so everything heavy runs in
a subprocess with a deadline (`probe.py` runs what is in `probes.py`). Each family of checks is one file; facts are gathered by a
`check_*` function and judged by a pure `judge_*` function.
"""

from __future__ import annotations

from quadriga.commands.doctor.check import Check, Finding, Options, run_checks
from quadriga.commands.doctor.command import main

__all__ = ["Check", "Finding", "Options", "main", "run_checks"]
