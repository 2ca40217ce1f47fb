"""Print findings for people (rich, or plain text where rich itself is what is missing) and for programs (JSON)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from quadriga.doctor.check import Finding, Status

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
