"""The command line: `quadriga doctor [--json] [--deep] [--address …] [--output-dir …] [--deadline …]`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from quadriga.commands.doctor.check import Check, Options, print_json, print_table, run_checks
from quadriga.commands.doctor.machine import check_environment, check_machine, check_storage, usable_cores
from quadriga.commands.doctor.packages import check_engines, check_packages, check_python
from quadriga.commands.doctor.ray_checks import START_DEADLINE_S, check_cluster, check_ray, check_ray_start
from quadriga.commands.doctor.torch_checks import check_cpu_kernels, check_cpu_math, check_gloo, check_nccl, check_torch

DEEP_CLUSTER_DEADLINE_S = 30.0


def checks_for(options: Options) -> list[Check]:
    """Every check of this run, in the order of the report."""
    checks = [
        Check("python", check_python),
        Check("packages", check_packages),
        Check("torch", check_torch),
        Check("cpu math", check_cpu_math),
        Check("cpu kernels", check_cpu_kernels),
        Check("gloo", check_gloo),
        Check("nccl", check_nccl),
        Check("engines", check_engines),
        Check("ray", check_ray),
        Check("cluster", check_cluster, limit_s=options.cluster_deadline_s + 1.0),
        Check("machine", check_machine),
        Check("storage", check_storage),
        Check("environment", check_environment),
    ]
    if options.deep:
        checks.append(Check("ray start", check_ray_start, limit_s=START_DEADLINE_S + 1.0))
    return checks


def main(argv: list[str]) -> int:
    """Run the checks and print the report; 0 when nothing fails (warnings allowed), 1 when something does."""
    options, as_json = _parse(argv)
    started = time.monotonic()
    try:
        findings = run_checks(checks_for(options), options)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    (print_json if as_json else print_table)(findings, time.monotonic() - started)
    return int(any(finding.status == "fail" for finding in findings))


def patience_s(load: float, cores: int) -> float:
    """Seconds a probe may take: more where other programs take the CPU, so that slow is not mistaken for broken."""
    return Options.deadline_s * min(max(load / cores, 1.0), 4.0)


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "quadriga doctor", description="Check this machine and cluster; exit 1 on failure."
    )
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON object")
    parser.add_argument(
        "--deep", action="store_true", help="add slow checks: start a local Ray, ask every cluster node"
    )
    parser.add_argument("--address", help="Ray cluster to reach, host:port or ray://host:port (default: RAY_ADDRESS)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="where runs will be written")
    parser.add_argument(
        "--deadline", type=_seconds, metavar="S", help="seconds per probe (default 15, busy machine 60)"
    )
    return parser


def _parse(argv: list[str]) -> tuple[Options, bool]:
    arguments = command_parser().parse_args(argv)
    options = Options(
        address=arguments.address,
        output_dir=arguments.output_dir,
        deep=arguments.deep,
        deadline_s=arguments.deadline or patience_s(os.getloadavg()[0], usable_cores()),
        cluster_deadline_s=DEEP_CLUSTER_DEADLINE_S if arguments.deep else Options.cluster_deadline_s,
    )
    return options, arguments.json


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 3600:
        raise argparse.ArgumentTypeError("must be between 0 and 3600 seconds")
    return value
