"""`python -m quadriga.compat.verl [-m MODULE | FILE] arguments…`: run what was written for verl, with the alias in place."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from quadriga.compat.verl import install

COMMANDS: dict[str, tuple[str, bool | None]] = {
    "verl.trainer.main_ppo": ("train", None),
    "verl.trainer.main_ppo_v0": ("train", None),
    "verl.trainer.fsdp_sft_trainer": ("sft", False),
    "verl.trainer.sft_trainer": ("sft", True),
}
"""verl's programs → ours, and whether the defaults of verl's newer supervised trainer hold (None: as its keys suggest)."""
MERGER = "verl.model_merger"
USAGE = "usage: python -m quadriga.compat.verl [-m MODULE | FILE] arguments…"


def main(arguments: list[str]) -> int:
    install()
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] != "-m":
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))  # its neighbours, as when it is run alone
        runpy.run_path(arguments[0], run_name="__main__")
        return 0
    if len(arguments) < 2:
        print(USAGE, file=sys.stderr)
        return 2
    name, rest = arguments[1], arguments[2:]
    if name in (*COMMANDS, MERGER):
        return run_module(name, rest)
    sys.argv = [name, *rest]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def run_module(name: str, arguments: list[str]) -> int:
    """One of verl's programs with its command line; returns the exit code."""
    from quadriga.compat.command import FLAG, understand
    from quadriga.errors import run_command

    if name == MERGER:
        return run_command(merge, arguments)
    if name not in COMMANDS:
        known = ", ".join((*COMMANDS, MERGER))
        print(f"{name} is no program of Quadriga's alias of verl; it has {known}", file=sys.stderr)
        return 2
    command, defaults = COMMANDS[name]

    def run(given: list[str]) -> int | None:
        understood = understand(command, [FLAG, *given], defaults)
        if command == "sft":
            from quadriga.trainer.supervised.entry import sft

            return sft(understood)
        from quadriga.trainer.main_ppo import _run_hydra

        return _run_hydra(understood)

    return run_command(run, arguments)


def merge(arguments: list[str]) -> int:
    """`verl.model_merger merge --backend fsdp --local_dir …/actor --target_dir DIR`, of verl's checkpoints and of Quadriga's.

    Raises:
        ConfigError: another backend or operation.
    """
    from quadriga.checkpoint.export import export_policy_of
    from quadriga.checkpoint.store import locate
    from quadriga.compat.verl_checkpoint import SHARD, convert
    from quadriga.errors import ConfigError

    parser = argparse.ArgumentParser(prog=MERGER)
    parser.add_argument("operation", choices=("merge", "test"))
    parser.add_argument("--backend", default="fsdp")
    parser.add_argument("--local_dir", required=True)
    parser.add_argument("--target_dir", default="tmp")
    options, _ = parser.parse_known_args(arguments)
    if options.backend != "fsdp" or options.operation != "merge":
        raise ConfigError(
            f"{MERGER} {options.operation} --backend {options.backend} has no counterpart",
            "merge with --backend fsdp; what is written is read again to prove that it loads",
        )
    folder = Path(options.local_dir).expanduser()
    if folder.is_dir() and any(SHARD.fullmatch(file.name) for file in folder.iterdir()):
        exported = convert(folder, options.target_dir, overwrite=True)
    else:
        exported = export_policy_of(locate(folder), options.target_dir, overwrite=True)
    print(f"{exported.folder}: {exported.parameters:,} parameters in {exported.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
