"""The `quadriga` command: finds the word's function (`quadriga.commands`) and calls it."""

from __future__ import annotations

import atexit
import difflib
import importlib
import os
import sys

from quadriga.commands import COMMANDS
from quadriga.errors import INTERRUPTED, run_command
from quadriga.version import __version__


def main() -> None:
    code = run(sys.argv[1:])
    if code == INTERRUPTED:
        # Python itself would end as killed by SIGINT if the interrupt came while some module was executing code.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    return run_command(_run, arguments)


def _run(arguments: list[str]) -> int | None:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"quadriga {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        print(f"quadriga: unknown command {name!r}" + (f"; did you mean {near[0]}?" if near else ""), file=sys.stderr)
        print(_help(), file=sys.stderr)
        return 2
    return _call(name, rest)


def _call(name: str, arguments: list[str]) -> int | None:
    from quadriga.commands.help import HELPS, help_text

    if name in HELPS and {"-h", "--help"} & set(arguments):
        print(help_text(name))
        return 0
    if {"--from-verl", "--write"} & {argument.partition("=")[0] for argument in arguments}:
        from quadriga.compat.command import understand

        arguments = understand(name, arguments)
    if name == "train" and not arguments:
        arguments = ["--config-name=quickstart"]  # the embedded model and its task, with settings that suit them
    module, function = COMMANDS[name][0].split(":")
    return getattr(importlib.import_module(module), function)(arguments)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    more = "quadriga <command> --help says more. --debug shows the stack of an error."
    codes = "exit codes: 0 done, 1 an error that is named, 2 wrong usage, 130 interrupted"
    return "usage: quadriga <command> …\n\n" + "\n".join(lines) + f"\n\n{more}\n{codes}"


if __name__ == "__main__":
    main()
