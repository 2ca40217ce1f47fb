"""Whether the kernels for CPUs compile here; without them everything works, more slowly."""

from __future__ import annotations

from quadriga.doctor.check import Finding, Options
from quadriga.doctor.probe import run_probe

NAME = "cpu kernels"


def check_cpu_kernels(options: Options) -> list[Finding]:
    result = run_probe("cpu_kernels", env=options.env, deadline_s=options.deadline_s)
    failure = result.failure or result.facts.get("failure")
    if failure is None:
        return [Finding(NAME, "ok", "compiled for this machine")]
    fix = "install gcc or clang (for Debian: apt install gcc libc6-dev); a GPU needs none"
    return [Finding(NAME, "warn", f"{failure}; on a CPU, generation and training run at about 2/3 of their speed", fix)]
