"""`python -m quadriga.compat.verl [-m MODULE | FILE] arguments…`: run what was written for verl, with the alias in place."""

from __future__ import annotations

import runpy
import sys

from quadriga.compat.verl import install

COMMANDS: dict[str, tuple[str, bool | None]] = {
    "verl.trainer.main_ppo": ("train", None),
    "verl.trainer.fsdp_sft_trainer": ("sft", False),
    "verl.trainer.sft_trainer": ("sft", True),
}
"""verl's programs → ours, and whether the defaults of verl's newer supervised trainer hold (None: as its keys suggest)."""
USAGE = "usage: python -m quadriga.compat.verl [-m MODULE | FILE] arguments…"


def main(arguments: list[str]) -> int:
    install()
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] != "-m":
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
        return 0
    if len(arguments) < 2:
        print(USAGE, file=sys.stderr)
        return 2
    name, rest = arguments[1], arguments[2:]
    if name in COMMANDS:
        return run_module(name, rest)
    sys.argv = [name, *rest]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def run_module(name: str, arguments: list[str]) -> int:
    """One of verl's programs with its command line; returns the exit code."""
    from quadriga.compat.command import FLAG, understand
    from quadriga.errors import run_command

    if name not in COMMANDS:
        print(f"{name} is no program of Quadriga's alias of verl; it has {', '.join(COMMANDS)}", file=sys.stderr)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
