"""The doctor's own safety: probes may die or hang, checks may crash, and the report still comes."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from quadriga.commands.doctor import Check, Finding, Options, run_checks
from quadriga.commands.doctor.probe import ProbeResult, run_command


def probe(code: str, *args: str, deadline_s: float = 20.0) -> ProbeResult:
    return run_command([sys.executable, "-c", code, *args], env=os.environ, deadline_s=deadline_s)


def test_probe_killed_by_an_illegal_instruction_names_the_signal() -> None:
    result = probe("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert result.killed_by == "SIGILL"
    assert "SIGILL" in str(result.failure)


def test_hanging_probe_ends_at_its_deadline_and_keeps_what_it_said() -> None:
    started = time.monotonic()
    result = probe("import json, time; print(json.dumps({'stage': 'tcp'}), flush=True); time.sleep(60)", deadline_s=1.0)
    assert time.monotonic() - started < 5
    assert result.failure == "no answer within 1 s"
    assert result.killed_by is None
    assert result.facts == {"stage": "tcp"}


def test_children_of_a_hanging_probe_die_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time; child = subprocess.Popen(['sleep', '60']);"
        "open(sys.argv[1], 'w').write(str(child.pid)); time.sleep(60)"
    )
    assert probe(code, str(pid_file), deadline_s=2.0).timed_out_after_s == 2.0
    state = Path(f"/proc/{pid_file.read_text()}/stat")
    wait_until = time.monotonic() + 5
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < wait_until:
        time.sleep(0.05)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_failing_probe_reports_its_last_words() -> None:
    assert probe("import no_such_module").failure == "ModuleNotFoundError: No module named 'no_such_module'"
    assert probe("raise SystemExit(3)").failure == "the process ended with exit code 3"


def test_noise_around_the_answer_is_ignored() -> None:
    assert probe(
        "print('loading...'); print('{\"a\": 1}'); print('[1]'); print('{oops'); print('{\"b\": 2}')"
    ).facts == {
        "a": 1,
        "b": 2,
    }


def test_crashing_and_hanging_checks_become_failing_findings_in_order() -> None:
    def crash(options: Options) -> list[Finding]:
        raise KeyError("surprise")

    def hang(options: Options) -> list[Finding]:
        time.sleep(60)
        return []

    def well(options: Options) -> list[Finding]:
        return [Finding("well", "ok", "fine")]

    started = time.monotonic()
    checks = [Check("crash", crash), Check("hang", hang, limit_s=1.0), Check("well", well)]
    findings = run_checks(checks, Options())
    assert time.monotonic() - started < 5
    assert [(finding.check, finding.status) for finding in findings] == [
        ("crash", "fail"),
        ("hang", "fail"),
        ("well", "ok"),
    ]
    assert "KeyError: 'surprise'" in findings[0].what
    assert "no answer within 1 s" in findings[1].what
    assert all(finding.fix for finding in findings[:2])


@pytest.mark.parametrize("status", ["warn", "fail"])
def test_a_problem_without_a_fix_is_not_a_finding(status: str) -> None:
    with pytest.raises(ValueError, match="no fix"):
        Finding("x", status, "bad")  # type: ignore[arg-type]
