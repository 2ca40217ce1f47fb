"""Which number formats this CPU can really multiply.

A machine may advertise instructions that it cannot run (AMX in a virtual machine, for example); the matrix product
then kills the process with SIGILL. So the formats are tried in a subprocess, and for one that dies the doctor looks
for an instruction-set limit with which it lives.
"""

from __future__ import annotations

from collections.abc import Callable

from quadriga.doctor.check import Finding, Options, Status
from quadriga.doctor.probe import ProbeResult, run_probe

ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
ISA_LIMITS = ("AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
DTYPES = ("float32", "bfloat16", "float16")

MatmulProbe = Callable[[str, dict[str, str]], ProbeResult]
"""(dtype, extra environment) -> how the product ended."""


def check_cpu_math(options: Options) -> list[Finding]:
    """All formats in one process, since importing torch is what takes time; alone only those that got no answer."""

    def probe(dtype: str, extra_env: dict[str, str]) -> ProbeResult:
        return run_probe("matmul", dtype, env={**options.env, **extra_env}, deadline_s=options.deadline_s)

    together = run_probe("matmul", *DTYPES, env=options.env, deadline_s=options.deadline_s)
    if together.timed_out_after_s is not None:
        fix = "run it again on an idle machine, or with more time: quadriga doctor --deadline 60"
        return [Finding("cpu math", "fail", f"matrix products on the CPU: {together.failure}", fix)]
    return [_right(dtype) if dtype in together.facts else judge_dtype(dtype, probe) for dtype in DTYPES]


def judge_dtype(dtype: str, probe: MatmulProbe) -> Finding:
    """Try `dtype`; when it kills the process, search a limit that cures it. Only float32 is needed on a CPU."""
    name = f"cpu {dtype}"
    result = probe(dtype, {})
    if result.failure is None:
        return _right(dtype)
    status: Status = "fail" if dtype == "float32" else "warn"
    what = f"matrix product on the CPU: {result.failure}"
    if result.killed_by:
        for limit in ISA_LIMITS:
            if probe(dtype, {ISA_VARIABLE: limit}).failure is None:
                return Finding(
                    name, status, what, f"export {ISA_VARIABLE}={limit} (tried: the product is right with it)"
                )
    if dtype == "float32":
        return Finding(name, "fail", what, "install a torch build for this CPU; run again with --deadline 60 if slow")
    return Finding(name, "warn", what, f"keep float32 on this CPU (the default), do not configure {dtype}")


def _right(dtype: str) -> Finding:
    return Finding(f"cpu {dtype}", "ok", "matrix product right")
