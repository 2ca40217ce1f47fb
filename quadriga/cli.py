"""The `quadriga` command. Each sub-command lives beside what it does and is imported only when it is called."""

from __future__ import annotations

import atexit
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable

from quadriga.errors import QuadrigaError
from quadriga.version import __version__

INTERRUPTED = 130
COMMANDS = {
    "train": (
        "quadriga.trainer.main_ppo:_run_hydra",
        "run a PPO-family job with key=value …; without arguments, the quickstart",
    ),
    "sft": ("quadriga.trainer.supervised.entry:sft", "supervised fine-tuning on answers or conversations"),
    "rm": ("quadriga.trainer.supervised.entry:rm", "train a reward model on preference pairs"),
    "dpo": ("quadriga.trainer.supervised.entry:dpo", "optimise a policy directly on preference pairs"),
    "eval": ("quadriga.evaluation.command:main", "score a model's answers to a dataset"),
    "plan": ("quadriga.config.plan:main", "print what a configuration amounts to, without running it"),
    "doctor": ("quadriga.doctor:main", "check this machine, and say how to mend what is wrong"),
    "generate": ("quadriga.rollout.command:main", "complete prompts with a model, log-probs included"),
    "export": ("quadriga.checkpoint.command:main", "a checkpoint's model as a Hugging Face folder"),
    "prep": ("quadriga.data.prep.command:main", "turn a dataset into training and test files"),
    "completion": ("quadriga.completion:main", "a script with which bash, zsh or fish completes all this"),
}


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
    return run_command(lambda given: _call(name, given), rest)


def _call(name: str, arguments: list[str]) -> int | None:
    from quadriga.command_help import HELPS, help_text

    if name in HELPS and {"-h", "--help"} & set(arguments):
        print(help_text(name))
        return 0
    if name == "train" and not arguments:
        arguments = ["--config-name=quickstart"]  # the embedded model and its task, with settings that suit them
    module, function = COMMANDS[name][0].split(":")
    return getattr(importlib.import_module(module), function)(arguments)


def run_command(command: Callable[[list[str]], int | None], arguments: list[str]) -> int:
    """Run `command`; one of our own errors is printed without a stack, unless `--debug` is among the arguments."""
    debug = "--debug" in arguments
    try:
        return command([a for a in arguments if a != "--debug"]) or 0
    except QuadrigaError as error:
        if debug:
            traceback.print_exc()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    more = "quadriga <command> --help says more. --debug shows the stack of an error."
    codes = "exit codes: 0 done, 1 an error that is named, 2 wrong usage, 130 interrupted"
    return "usage: quadriga <command> …\n\n" + "\n".join(lines) + f"\n\n{more}\n{codes}"


if __name__ == "__main__":
    main()
