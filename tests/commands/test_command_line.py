"""The `quadriga` command: help that teaches, completion that works, exit codes, Ctrl-C."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quadriga.cli import run
from quadriga.commands import COMMANDS
from quadriga.commands.completion import words_of
from quadriga.commands.help import HELPS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_with_an_example(name, capsys):
    try:
        code = run([name, "--help"])
    except SystemExit as end:  # argparse's way to end
        code = end.code
    assert code == 0
    text = capsys.readouterr().out
    assert f"quadriga {name}" in text
    assert name == "doctor" or "example" in text or "completion" in text


def test_help_shows_keys_with_default_and_meaning(capsys):
    assert run(["sft", "--help"]) == 0
    text = capsys.readouterr().out
    assert "data.train_batch_size=256" in text
    assert "rows per optimiser step" in text
    assert set(HELPS) == {"train", "plan", "sft", "rm", "dpo"}


@pytest.mark.parametrize("name", ["train", "dpo", "plan"])
@pytest.mark.parametrize("text", [None, b"a: [1", b"\xff\xfe", b"a: ${no_such}"])
def test_a_configuration_that_hydra_cannot_compose_is_no_stack(name, text, tmp_path, capsys):
    if text is not None:
        (tmp_path / "mine.yaml").write_bytes(text)
    assert run([name, f"--config-path={tmp_path}", "--config-name=mine"]) == 1
    assert capsys.readouterr().err.startswith("ConfigError: ")


@pytest.mark.parametrize("name", ["train", "sft"])
def test_an_error_inside_hydras_job_stands_alone(name, capsys):
    """Hydra by itself puts `Error executing job with overrides` above whatever goes through it."""
    assert run([name, "data.train_files=/no/such.jsonl", "data.val_files=/no/such.jsonl"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("ConfigError: ")
    assert "/no/such.jsonl does not exist" in told
    assert "overrides" not in told


def test_exit_codes(tmp_path, capsys):
    assert run([]) == 2
    assert run(["--version"]) == 0
    assert run(["evaluate"]) == 2
    assert "did you mean eval?" in capsys.readouterr().err
    assert run(["export", str(tmp_path / "none"), "--output", str(tmp_path / "x")]) == 1
    assert "CheckpointError" in capsys.readouterr().err
    assert run(["sft", "data.train_fils=x"]) == 1
    assert "did you mean data.train_files?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        run(["eval"])
    assert end.value.code == 2


def complete_in_bash(tmp_path: Path, *words: str) -> list[str]:
    script = tmp_path / "completion.bash"
    if not script.exists():
        with script.open("w") as file:
            subprocess.run(
                [sys.executable, "-m", "quadriga", "completion", "bash"], stdout=file, check=True, timeout=60
            )
    quoted = " ".join(f"'{word}'" for word in ("quadriga", *words))
    program = f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _quadriga; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_flags_and_keys(tmp_path):
    assert complete_in_bash(tmp_path, "ex") == ["export"]
    assert set(complete_in_bash(tmp_path, "")) == set(COMMANDS)
    assert complete_in_bash(tmp_path, "eval", "--temp") == ["--temperature"]
    assert complete_in_bash(tmp_path, "train", "algorithm.adv") == ["algorithm.adv_estimator="]
    assert complete_in_bash(tmp_path, "dpo", "dpo.") == ["dpo.beta=", "dpo.loss_type=", "dpo.label_smoothing="]
    assert complete_in_bash(tmp_path, "prep", "gsm") == ["gsm8k"]
    assert complete_in_bash(tmp_path, "sft", "data.train_files", "=") == []  # bash itself offers file names


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_for_other_shells_name_every_command_and_parse(shell, tmp_path, capsys):
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    assert "algorithm.adv_estimator=" in script
    if found := shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([found, "-n", str(tmp_path / "script")], check=True, timeout=30)


def test_words_are_known_for_every_command():
    assert all(words_of(name) for name in COMMANDS)


def long_job(kind: str, tmp_path: Path) -> list[str]:
    """Arguments of a command that takes minutes and makes the file `out` when it has begun its work."""
    if kind == "sft":
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"question": "1+1=", "answer": "#### 2"}\n' * 64)
        data = [f"data.train_files={rows}", "data.train_batch_size=64", "data.max_length=32"]
        run = ["trainer.total_epochs=100000", f"trainer.default_local_dir={tmp_path / 'out'}", "trainer.device=cpu"]
        return ["sft", "model.partial_pretrain=builtin:arithmetic", *data, *run]
    prompts = tmp_path / "prompts.jsonl"
    row = '{"prompt": "1+1=", "data_source": "arithmetic", "reward_model": {"ground_truth": "2"}}\n'
    prompts.write_text(row * 2000)
    model = ["--model", "builtin:arithmetic", "--ignore-eos", "--max-new-tokens", "900", "--n", "8"]
    return [kind, str(prompts), *model, "--output", str(tmp_path / "out")]


@pytest.mark.parametrize("kind", ["generate", "eval", "sft"])
def test_ctrl_c_ends_with_130_and_without_a_stack(kind, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "quadriga", *long_job(kind, tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "out").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    program = f"{sys.executable} -m quadriga completion fish | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 141)  # 0: all was written before the reader left
    assert "Traceback" not in done.stderr
