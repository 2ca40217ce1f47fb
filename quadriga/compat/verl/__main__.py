"""`python -m quadriga.compat.verl [-m MODULE | FILE] arguments…`: run what was written for verl, with the alias in place."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from quadriga.compat.verl import install

RAY_SFT = "verl.trainer.sft_trainer_ray"
COMMANDS: dict[str, tuple[str, bool | None]] = {
    "verl.trainer.main_ppo": ("train", None),
    "verl.trainer.main_ppo_v0": ("train", None),
    "verl.experimental.one_step_off_policy.main_ppo": ("train", None),
    "verl.experimental.fully_async_policy.fully_async_main": ("train", None),
    "verl.experimental.transfer_queue.main_ppo": ("train", None),
    "verl.trainer.fsdp_sft_trainer": ("sft", False),
    "verl.trainer.sft_trainer": ("sft", True),
    RAY_SFT: ("sft", True),
}
"""verl's programs → ours, and whether the defaults of verl's newer supervised trainer hold (None: as its keys suggest)."""
CONFIGS = {
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
}
"""The configuration files of the programs that have one of their own."""
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
        file = [f"--config-name={CONFIGS[name]}"] if name in CONFIGS else []
        understood = understand(command, [FLAG, *file, *given], defaults)
        if command == "sft":
            from quadriga.trainer.supervised.entry import PROCESSES, sft

            return sft([*([f"{PROCESSES}={_processes(given)}"] if name == RAY_SFT else []), *understood])
        from quadriga.trainer.main_ppo import _run_hydra

        return _run_hydra(understood)

    return run_command(run, arguments)


def _processes(arguments: list[str]) -> int:
    """How many processes verl's supervised trainer on Ray starts.

    Raises:
        ConfigError: they are not all on this machine.
    """
    from quadriga.compat.translation import read_arguments
    from quadriga.errors import ConfigError

    given = read_arguments(arguments)[0]
    if given.get("trainer.nnodes", 1) != 1:
        raise ConfigError(
            f"{RAY_SFT} with trainer.nnodes={given['trainer.nnodes']} has no counterpart",
            "start `torchrun -m quadriga.compat.verl -m verl.trainer.sft_trainer` on each node",
        )
    return int(given.get("trainer.n_gpus_per_node", 1))


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
