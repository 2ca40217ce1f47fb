"""What a check is, what it reports, and how all of them run at once, none able to hang or crash the command; and the report."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. Anything but "ok" must say how to fix it; on an "ok" line the fix is a hint."""

    check: str
    status: Status
    what: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.status != "ok" and not self.fix:
            raise ValueError(f"finding {self.check!r} is {self.status!r} but offers no fix")


@dataclass(frozen=True)
class Options:
    """What the checks look at; every bound is a field so that a test can make this machine look too small."""

    address: str | None = None
    """Ray cluster address; without it RAY_ADDRESS is used."""
    output_dir: Path = Path("outputs")
    """Where runs will be written; it need not exist yet."""
    deep: bool = False
    """Also run the slow checks."""
    deadline_s: float = 15.0
    """Seconds one probe may take; the check that runs it gets `CHECK_GRACE_S` more."""
    cluster_deadline_s: float = 9.0
    """Seconds the cluster may take to answer."""
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment that is inspected and handed to the probes."""


CHECK_GRACE_S = 4.0


@dataclass(frozen=True)
class Check:
    """A named function from options to findings; `limit_s` replaces the usual limit of a slow one."""

    name: str
    run: Callable[[Options], list[Finding]]
    limit_s: float | None = None


def run_checks(checks: Sequence[Check], options: Options) -> list[Finding]:
    """All findings in the order of `checks`, which run concurrently.

    A check that raises becomes a failing finding, and so does one that passes its limit; its thread is left behind
    (it is a daemon) and the probes it started are killed when the process ends.
    """
    started = time.monotonic()
    results: dict[str, list[Finding]] = {}

    def work(check: Check) -> None:
        try:
            results[check.name] = check.run(options)
        except Exception as error:  # whatever a check meets is something the user should read, not a stack trace
            results[check.name] = [_crashed(check, error)]

    threads = [threading.Thread(target=work, args=(check,), daemon=True) for check in checks]
    for thread in threads:
        thread.start()
    findings: list[Finding] = []
    for check, thread in zip(checks, threads):
        limit_s = check.limit_s or options.deadline_s + CHECK_GRACE_S
        thread.join(max(0.0, started + limit_s - time.monotonic()))
        findings += results.get(check.name) or [_overdue(check, limit_s)]
    return findings


def _crashed(check: Check, error: Exception) -> Finding:
    return Finding(
        check.name,
        "fail",
        f"the check itself failed: {type(error).__name__}: {error}",
        "this is a fault of the doctor or of a very unusual machine; please report it with the line above",
    )


def _overdue(check: Check, limit_s: float) -> Finding:
    return Finding(
        check.name,
        "fail",
        f"no answer within {limit_s:g} s",
        "run it again on an idle machine, or with more time: quadriga doctor --deadline 60",
    )


# ---- Print findings for people (rich, or plain text where rich itself is what is missing) and for programs (JSON)


_STYLE: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def print_json(findings: Sequence[Finding], seconds: float) -> None:
    ok = all(finding.status != "fail" for finding in findings)
    report = {"ok": ok, "seconds": round(seconds, 2), "findings": [asdict(finding) for finding in findings]}
    print(json.dumps(report, indent=2))


def print_table(findings: Sequence[Finding], seconds: float) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        _print_plain(findings, seconds)
        return
    table = Table(box=None, padding=(0, 1), show_header=False)
    for finding in findings:
        text = Text(finding.what)
        if finding.fix:
            text.append(f"\n→ {finding.fix}", style="dim" if finding.status == "ok" else _STYLE[finding.status])
        table.add_row(Text(finding.status, style=_STYLE[finding.status]), Text(finding.check, style="bold"), text)
    console = Console()
    console.print(table)
    console.print(_summary(findings, seconds), highlight=False)


def _print_plain(findings: Sequence[Finding], seconds: float) -> None:
    for finding in findings:
        print(f"{finding.status:4}  {finding.check:18}  {finding.what}")
        if finding.fix:
            print(f"{'':26}→ {finding.fix}")
    print(_summary(findings, seconds))


def _summary(findings: Sequence[Finding], seconds: float) -> str:
    count = {status: sum(finding.status == status for finding in findings) for status in _STYLE}
    return f"{count['ok']} ok, {count['warn']} to look at, {count['fail']} failing ({seconds:.1f} s)"
