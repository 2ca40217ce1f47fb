"""What reaches the terminal: our own sentence, without control codes, in any locale, and no file of the user's in our way."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quadriga.errors import ConfigError, printable, run_command


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


def test_a_file_that_would_be_imported_instead_of_a_package_is_named(tmp_path):
    (tmp_path / "numpy.py").write_text("1/0")
    done = subprocess.run(
        [sys.executable, "-m", "quadriga", "prep", "arithmetic", "--output", "x"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "numpy.py hides the package numpy" in done.stderr
    assert "Traceback" not in done.stderr
