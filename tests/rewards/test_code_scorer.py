"""Programs in the sandbox: what passes, what fails, and what they cannot do."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quadriga.config import load_config
from quadriga.errors import ConfigError, DataError
from quadriga.rewards import RewardPool, RewardSample, check_sources, sandbox
from quadriga.rewards.sandbox import Limits, run
from quadriga.rewards.scorers import code

DOUBLE = "```python\ndef double(x):\n    return 2 * x\n```"
LIMITS = Limits(wall_s=2.0, cpu_s=2.0, memory_mb=512)
FORGE = """
import os
for fd in range(3, 50):
    try:
        os.write(fd, b'{"token": "x", "passed": 1}')
    except OSError:
        pass
os._exit(0)
"""


def judged(response: str, truth: Any, **options: Any) -> tuple[float, float]:
    result = code.score("code", response, truth, **options)
    return result["score"], result.get("pass_rate", -1.0)


def test_all_tests_must_pass_unless_partial_is_asked_for() -> None:
    assert judged(DOUBLE, ["assert double(2) == 4", "assert double(0) == 0"]) == (1.0, 1.0)
    assert judged(DOUBLE, ["assert double(2) == 4", "assert double(2) == 5"]) == (0.0, 0.5)
    assert judged(DOUBLE, ["assert double(2) == 4", "assert double(2) == 5"], partial=True) == (0.5, 0.5)


def test_tests_may_come_as_text_json_or_with_a_setup() -> None:
    assert judged(DOUBLE, "assert double(2) == 4")[0] == 1.0
    assert judged(DOUBLE, json.dumps({"tests": ["assert double(2) == 4"]}))[0] == 1.0
    assert judged(DOUBLE, {"test_list": ["assert double(N) == 4"], "test_setup_code": "N = 2"})[0] == 1.0


def test_the_last_block_counts_and_plain_code_will_do() -> None:
    assert judged("```python\ndef double(x): return 0\n```\nNo:\n" + DOUBLE, ["assert double(2) == 4"])[0] == 1.0
    assert judged("def double(x): return 2 * x", ["assert double(2) == 4"])[0] == 1.0


@pytest.mark.parametrize("response", ["", "I cannot do this.", "```python\nunfinished"])
def test_a_response_without_code_is_unparsed(response: str) -> None:
    assert not code.score("code", response, ["assert True"])["parsed"]


def test_programs_are_judged_by_what_they_print() -> None:
    program = "```python\nn = int(input())\nprint(2 * n)\n```"
    assert judged(program, {"inputs": ["2\n", "5\n"], "outputs": ["4", "10\n"]}) == (1.0, 1.0)
    assert judged(program, {"inputs": ["2\n", "5\n"], "outputs": ["4", "11\n"]}, partial=True) == (0.5, 0.5)


@pytest.mark.parametrize("truth", [{}, [], {"inputs": ["1"], "outputs": []}, {"test": "x"}, 7])
def test_a_row_without_tests_is_a_data_error(truth: Any) -> None:
    with pytest.raises(DataError, match="holds no tests"):
        code.score("code", DOUBLE, truth)


def test_running_out_of_time_is_a_wrong_answer() -> None:
    result = code.score("code", "```python\nwhile True: pass\n```", ["assert True"], timeout_s=1.0)
    assert (result["score"], result["code_timeout"], result["parsed"]) == (0.0, 1.0, True)


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import os; os.fork()", "PermissionError"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError"),
        ("import socket; socket.socket()", "PermissionError"),
        ("import socket; socket.create_connection(('127.0.0.1', 80), 1)", "PermissionError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("import os; os.kill(-1, 9)", "PermissionError"),
        ("import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)", "PermissionError"),
        ("import os; os.setpriority(os.PRIO_USER, 0, 19)", "PermissionError"),
        ("import os; os.sched_setaffinity(os.getppid(), {0})", "PermissionError"),
        ("import os; os.sched_setscheduler(os.getppid(), os.SCHED_BATCH, os.sched_param(0))", "PermissionError"),
        ("import os; open(f'/proc/{os.getppid()}/mem', 'rb')", "PermissionError"),
        ("import os; open(f'/proc/{os.getppid()}/environ', 'rb')", "PermissionError"),
        ("import os; os.pidfd_open(os.getppid())", "PermissionError"),
        ("open('/etc/passwd')", "PermissionError"),
        ("import os; os.listdir('/')", "PermissionError"),
        ("bytearray(4 << 30)", "MemoryError"),
        ("f = open('big', 'w')\nwhile True: f.write('x' * 1000000)", "File too large"),
        ("import sys; sys.exit(1)", "SystemExit"),
        ("def f(): f()\nf()", "RecursionError"),
        ("1 +", "SyntaxError"),
    ],
)
def test_what_a_program_cannot_do_raises_in_it(program: str, error: str) -> None:
    result = run(program, ["pass"], limits=LIMITS)
    assert (result.status, result.passed) == ("done", 0)
    assert error in (result.error or "")


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(1000)", "timeout"),
        ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "timeout"),
        ("import os; os._exit(0)", "died"),
        ("import ctypes; ctypes.string_at(0)", "died"),
        (FORGE, "died"),
    ],
)
def test_a_program_cannot_outlive_its_time_or_forge_its_result(program: str, status: str) -> None:
    began = time.monotonic()
    result = run(program, ["pass"], limits=LIMITS)
    assert (result.status, result.passed) == (status, 0)
    assert time.monotonic() - began < LIMITS.wall_s + 2.0


def test_threads_async_and_scratch_files_work() -> None:
    program = (
        "import asyncio, threading\n"
        "asyncio.run(asyncio.sleep(0))\n"
        "a, b = __import__('socket').socketpair(); a.send(b'x'); assert b.recv(1) == b'x'\n"
        "t = threading.Thread(target=lambda: open('note.txt', 'w').write('hello')); t.start(); t.join()\n"
    )
    assert run(program, ["assert open('note.txt').read() == 'hello'"], limits=LIMITS).passed == 1


SYSTEM_V = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
calls = [("shmget", 0x5EED, 4096, 0o1666), ("semget", 0x5EED, 1, 0o1666), ("msgget", 0x5EED, 0o1666)]
print(*[getattr(libc, name)(*given) == -1 and os.strerror(ctypes.get_errno()) for name, *given in calls], sep=";")
"""


def test_system_v_ipc_is_refused() -> None:
    assert run(SYSTEM_V, None, limits=LIMITS).stdout.strip() == ";".join(["Operation not permitted"] * 3)


def test_nothing_outside_the_scratch_folder_can_be_written(tmp_path: Path) -> None:
    victim = tmp_path / "precious"
    victim.write_text("keep me")
    for attack in (
        "os.remove({0!r})",
        "open({0!r}, 'w')",
        "os.truncate({0!r}, 0)",
        "os.chmod({0!r}, 0)",
        "os.rename({0!r}, 'mine')",
    ):
        result = run("import os; " + attack.format(str(victim)), ["pass"], limits=LIMITS)
        assert "Error" in (result.error or ""), attack
    assert victim.read_text() == "keep me"
    assert victim.stat().st_mode & 0o777 != 0


def test_nothing_outside_the_scratch_folder_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "answers").write_text("42")
    result = run(f"print(open({str(tmp_path / 'answers')!r}).read())", None, limits=LIMITS)
    assert "PermissionError" in (result.error or "")
    assert "42" not in result.stdout


@pytest.mark.parametrize("mode", ["O_WRONLY", "O_RDONLY", "O_RDWR"])
def test_fifos_outside_are_out_of_reach(mode: str, tmp_path: Path) -> None:
    """A read-only mount alone does not keep anybody from writing to a FIFO."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    ours = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    try:
        program = f"import os; os.write(os.open({str(fifo)!r}, os.{mode} | os.O_NONBLOCK), b'hello')"
        assert "PermissionError" in (run(program, ["pass"], limits=LIMITS).error or "")
        with pytest.raises(BlockingIOError):
            os.read(ours, 5)
    finally:
        os.close(ours)


@pytest.mark.parametrize(
    "owning",
    [
        "fcntl.fcntl(end, 8, PID)",  # F_SETOWN
        "fcntl.fcntl(end, 15, struct.pack('ii', 1, PID))",  # F_SETOWN_EX
        "fcntl.fcntl(end, 10, 12)",  # F_SETSIG
        "fcntl.ioctl(end, 0x8901, struct.pack('i', PID))",  # FIOSETOWN
    ],
)
def test_no_file_can_be_made_to_signal_another_process(owning: str) -> None:
    """A socket with an owner and O_ASYNC sends SIGIO, which ends whoever does not handle it."""
    with subprocess.Popen(["sleep", "20"]) as victim:
        program = (
            "import fcntl, os, socket, struct\n"
            "end, other = (pair.detach() for pair in socket.socketpair())\n"
            f"{owning.replace('PID', str(victim.pid))}\n"
            "fcntl.fcntl(end, fcntl.F_SETFL, os.O_ASYNC)\n"
            "os.write(other, b'x')\n"
        )
        result = run(program, ["pass"], limits=LIMITS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            victim.wait(0.2)
        survived = victim.poll() is None
        victim.kill()
    assert survived
    assert "PermissionError" in (result.error or "")


@pytest.mark.parametrize(
    "use", ["a.sendto(b'hello', {0!r})", "a.connect({0!r}); a.send(b'hello')", "a.sendmsg([b'hello'], [], 0, {0!r})"]
)
def test_a_pair_of_sockets_reaches_nobody_else(use: str, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
        ours.bind(str(tmp_path / "ours"))
        ours.setblocking(False)
        program = "import socket; a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); " + use
        assert "PermissionError" in (run(program.format(str(tmp_path / "ours")), ["pass"], limits=LIMITS).error or "")
        with pytest.raises(BlockingIOError):
            ours.recv(5)


def test_root_is_nobody_in_there() -> None:
    program = (
        "import ctypes, struct\n"
        "found = ctypes.create_string_buffer(24)\n"
        "ctypes.CDLL(None).capget(struct.pack('Ii', 0x20080522, 0), found)\n"
        "print([value & ~0b110 for value in struct.unpack('6I', found.raw)])\n"
    )
    assert run(program, None, limits=LIMITS).stdout.strip() == str([0] * 6)


@pytest.fixture
def no_isolation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine on which programs cannot be shut in: the run's result says so."""
    honest = sandbox._result
    monkeypatch.setattr(sandbox, "_result", lambda *given: replace(honest(*given), confined=False))
    sandbox.can_isolate.cache_clear()
    yield
    sandbox.can_isolate.cache_clear()


@pytest.mark.usefixtures("no_isolation")
def test_where_programs_cannot_be_shut_in_they_are_not_run_unless_asked_to() -> None:
    with pytest.raises(ConfigError, match=r"(?s)cannot be shut in.*reward\.require_isolation=False"):
        code.score("code", DOUBLE, ["assert double(2) == 4"])
    assert judged(DOUBLE, ["assert double(2) == 4"], require_isolation=False)[0] == 1.0


@pytest.mark.usefixtures("no_isolation")
def test_that_is_said_before_the_run() -> None:
    config = load_config({"data": {"train_files": "x", "val_files": "x"}})
    check_sources(config, ["gsm8k"])
    with pytest.raises(ConfigError, match=r"reward\.require_isolation=False"):
        check_sources(config, ["gsm8k", "mbpp"])
    config.reward.require_isolation = False
    check_sources(config, ["gsm8k", "mbpp"])


def test_the_pool_hands_the_key_to_the_scorer() -> None:
    for required in (True, False):
        with RewardPool(require_isolation=required) as pool:
            assert pool.function.kwargs["options"]["code"]["require_isolation"] is required
            assert pool.score_all([RewardSample("mbpp", DOUBLE, ["assert double(2) == 4"])])[0].score == 1.0


def test_the_environment_is_not_handed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    assert "hunter2" not in run("import os; print(dict(os.environ))", None, limits=LIMITS).stdout


def test_endless_output_is_cut() -> None:
    result = run("while True: print('x' * 1000)", None, limits=Limits(wall_s=5.0, cpu_s=5.0, file_mb=1))
    assert len(result.stdout) <= 1 << 20
    assert result.passed == 0


def test_scratch_folders_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run("open('a', 'w').write('x')", ["pass"], limits=LIMITS)
    assert os.listdir(tmp_path) == []


def test_reference_programs_pass_their_own_tests(shared_dir: Path) -> None:
    mbpp = [json.loads(line) for line in (shared_dir / "data/mbpp/mbpp.jsonl").read_text().splitlines()]
    for row in mbpp[:12] + [row for row in mbpp if row["test_setup_code"]]:
        assert judged(f"```python\n{row['code']}\n```", {k: row[k] for k in ("test_list", "test_setup_code")})[0] == 1.0
    with gzip.open(shared_dir / "data/humaneval/HumanEval.jsonl.gz", "rt") as lines:
        human = [json.loads(line) for line in lines][:12]
    for row in human:
        truth = {k: row[k] for k in ("prompt", "test", "entry_point")}
        assert judged(f"```python\n{row['canonical_solution']}\n```", truth)[0] == 1.0
        assert judged(f"```python\n{row['prompt']}    return None\n```", truth)[0] == 0.0


def test_a_whole_function_may_call_what_its_prompt_defines(shared_dir: Path) -> None:
    """Chat models give the function without the imports and the helpers that stand before it in the prompt."""
    with gzip.open(shared_dir / "data/humaneval/HumanEval.jsonl.gz", "rt") as lines:
        rows = [row for row in map(json.loads, lines) if row["prompt"].count("def ") > 1]
    assert len(rows) >= 4
    for row in rows:
        function = row["prompt"][row["prompt"].rindex(f"def {row['entry_point']}(") :] + row["canonical_solution"]
        truth = {k: row[k] for k in ("prompt", "test", "entry_point")}
        for answer in (function, f"from math import *\n{function}", row["prompt"] + row["canonical_solution"]):
            assert judged(f"```python\n{answer}\n```", truth)[0] == 1.0, answer
        wrong = function.replace(f"def {row['entry_point']}(", f"def {row['entry_point']}_too(", 1)
        assert judged(f"```python\n{wrong}\n```", truth)[0] == 0.0, wrong
