"""The command as a user runs it: report, JSON, exit codes, and no heavy import in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quadriga.commands.doctor import Finding, main
from quadriga.commands.doctor.check import print_table
from quadriga.commands.doctor.command import patience_s

REPO = Path(__file__).resolve().parents[3]
RUN = """
import sys
from quadriga.commands.doctor import main
code = main(sys.argv[1:])
heavy = {"torch", "ray", "transformers", "numpy"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


def doctor(*args: str, **env: str) -> tuple[int, str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_A")}
    result = subprocess.run(
        [sys.executable, "-c", RUN, *args], cwd=REPO, env={**clean, **env}, capture_output=True, text=True, timeout=120
    )
    return result.returncode, result.stdout, result.stderr


def by_check(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {finding["check"]: finding for finding in report["findings"]}


def test_deep_look_at_a_healthy_machine_passes_and_every_problem_has_a_fix(tmp_path: Path) -> None:
    started = time.monotonic()
    code, out, err = doctor("--json", "--deep", "--deadline", "40", "--output-dir", str(tmp_path))
    assert time.monotonic() - started < 60
    report = json.loads(out)
    findings = by_check(report)
    assert {"python", "packages", "torch", "devices", "cpu float32", "cpu bfloat16", "gloo", "ray", "cluster"} <= set(
        findings
    )
    assert {"shared memory", "output dir", "temp dir", "memory", "cpu", "open files", "environment"} <= set(findings)
    for name in ("python", "torch", "cpu float32", "gloo", "ray", "ray start"):
        assert findings[name]["status"] == "ok", findings[name]
    assert "all_reduce of 2 processes" in findings["gloo"]["what"]
    assert findings["cpu bfloat16"]["status"] in ("ok", "warn")
    assert all(finding["fix"] for finding in report["findings"] if finding["status"] != "ok")
    assert (code, report["ok"]) == (
        (0, True) if "fail" not in {f["status"] for f in report["findings"]} else (1, False)
    )
    assert err == ""


def test_broken_torch_and_ray_are_findings_not_stack_traces(tmp_path: Path) -> None:
    for name in ("torch", "ray"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('libfoo.so: cannot open shared object file')")
    code, out, err = doctor("--json", "--address", "127.0.0.1:1", PYTHONPATH=f"{tmp_path}{os.pathsep}{REPO}")
    findings = by_check(json.loads(out))
    assert code == 1
    for name in ("torch", "ray", "cpu float32", "gloo"):
        assert findings[name]["status"] == "fail", findings[name]
        assert "libfoo.so" in findings[name]["what"] or name == "gloo"
        assert findings[name]["fix"]
    assert "Connection refused" in findings["cluster"]["what"]
    assert "Traceback" not in out + err


def test_warnings_alone_leave_the_exit_code_zero(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quadriga.commands.doctor import command
    from quadriga.commands.doctor.check import Check

    def only(*findings: Finding) -> None:
        monkeypatch.setattr(command, "checks_for", lambda options: [Check("x", lambda options: list(findings))])

    only(Finding("x", "warn", "small", "enlarge"))
    assert main([]) == 0
    assert "1 to look at, 0 failing" in capsys.readouterr().out
    only(Finding("x", "warn", "small", "enlarge"), Finding("y", "fail", "gone", "bring back"))
    assert main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


@pytest.mark.parametrize("rich_is_missing", [False, True])
def test_report_shows_status_and_fix_with_and_without_rich(
    rich_is_missing: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if rich_is_missing:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    print_table([Finding("disk", "warn", "full [/bin]", "empty it")], 0.1)
    out = capsys.readouterr().out
    assert "full [/bin]" in out
    assert "→ empty it" in out
    assert "0 ok, 1 to look at, 0 failing" in out


def test_busy_machine_gets_more_time_but_not_for_ever() -> None:
    assert patience_s(load=0.1, cores=2) == patience_s(load=2.0, cores=2) == 15
    assert patience_s(load=4.0, cores=2) == 30
    assert patience_s(load=500.0, cores=2) == 60


def test_bad_deadline_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--deadline", "-1"])
    assert stopped.value.code == 2
