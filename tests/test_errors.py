"""What reaches the terminal: our own sentence, without control codes, in any locale, and no file of the user's in our way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quadriga.errors import ConfigError, printable, run_command

REPO = Path(__file__).resolve().parents[1]


def test_an_error_cannot_move_the_cursor(capsys):
    def fail(_):
        raise ConfigError("\x1b[2J\x1b]0;owned\x07 is no\tkey", "write \u202e another\nline")

    assert run_command(fail, []) == 1
    text = capsys.readouterr().err
    assert not set(text) & {"\x1b", "\x07", "\u202e"}
    assert "\\x1b[2J" in text
    assert "is no\tkey\n  fix: write" in text


@pytest.mark.parametrize("text", ["half \ud800 a character", "ünïcode → fine", "bell \x07"])
def test_any_text_can_be_printed(text):
    printable(text).encode("utf-8")
    assert printable("ünïcode → fine") == "ünïcode → fine"


@pytest.mark.parametrize("arguments", [["plan", "trainer.nodes=2"], ["plan"], ["sft", "--help"]])
def test_a_locale_without_our_letters_is_no_obstacle(arguments):
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "quadriga", *arguments], env=env, capture_output=True, timeout=60)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert done.returncode == (1 if "trainer.nodes=2" in arguments else 0)


def run_module(module: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, env=environment, **options)


MODULES = ["quadriga", "quadriga.trainer.main_ppo", "quadriga.trainer.sft_trainer", "quadriga.compat.verl"]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("file", "what"),
    [("numpy.py", "package numpy"), ("random.py", "module random"), ("json/__init__.py", "module json")],
)
def test_a_file_that_would_be_imported_instead_of_a_package_is_named(tmp_path, module, file, what):
    """Whatever the program imports first."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("1/0")
    done = run_module(module, "plan", cwd=tmp_path)
    assert done.returncode == 1
    assert f"{file} hides the {what}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_hides_nothing_that_is_imported_is_no_obstacle(tmp_path):
    for name in ("test.py", "trace.py", "numpy.txt", "datasets.py"):
        (tmp_path / name).write_text("1/0")
    assert run_module("quadriga", "plan", cwd=tmp_path, stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["plan"], ["completion", "bash"]])
def test_a_full_disk_behind_standard_output_is_one_sentence(arguments):
    with open("/dev/full", "w") as full:
        done = run_module("quadriga", *arguments, stdout=full)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "standard output or a file: No space left on device" in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["eval", "--help"], ["plan"]])
def test_a_reader_who_is_gone_needs_no_word(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = run_module("quadriga", *arguments, stdout=pipe)
    assert done.stderr == ""


def test_a_working_folder_that_is_gone_is_one_sentence(tmp_path):
    (folder := tmp_path / "folder").mkdir()
    done = run_module("quadriga", "plan", cwd=folder, preexec_fn=folder.rmdir)
    assert done.returncode == 1
    assert "the folder that this command was started in is gone" in done.stderr
    assert "Traceback" not in done.stderr
