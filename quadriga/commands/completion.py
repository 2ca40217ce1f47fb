"""The command `quadriga completion bash|zsh|fish`: a script with which the shell completes commands, flags and keys.

    source <(quadriga completion bash)          # in ~/.bashrc, likewise for zsh
    quadriga completion fish > ~/.config/fish/completions/quadriga.fish

All words are in the script itself: completing starts no Python.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from quadriga.commands import COMMANDS

PARSERS = {
    "generate": "quadriga.commands.generate:command_parser",
    "serve": "quadriga.commands.serve:command_parser",
    "eval": "quadriga.commands.evaluate:command_parser",
    "dash": "quadriga.commands.dash:command_parser",
    "runs": "quadriga.commands.runs:runs_parser",
    "watch": "quadriga.commands.watch:watch_parser",
    "compare": "quadriga.commands.runs:compare_parser",
    "samples": "quadriga.commands.runs:samples_parser",
    "tell": "quadriga.commands.watch:tell_parser",
    "export": "quadriga.commands.export:command_parser",
    "prep": "quadriga.commands.prep:command_parser",
    "doctor": "quadriga.commands.doctor.command:command_parser",
}


def main(argv: Sequence[str]) -> int:
    parser = command_parser()
    shell = parser.parse_args(argv).shell
    words = {name: words_of(name) for name in COMMANDS}
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](words), end="")
    return 0


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quadriga completion",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Print a script with which the shell completes commands, flags and configuration keys.",
        epilog="""bash:  echo 'source <(quadriga completion bash)' >> ~/.bashrc
zsh:   echo 'source <(quadriga completion zsh)' >> ~/.zshrc     (after compinit)
fish:  quadriga completion fish > ~/.config/fish/completions/quadriga.fish""",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


def words_of(command: str) -> list[str]:
    """Flags, sub-commands and `key=` words that may follow a command."""
    if command in ("train", "plan"):
        from quadriga.config.schema import Config

        return _key_words(Config)
    if command in ("sft", "rm", "dpo"):
        from quadriga.config.supervised_schema import SCHEMAS

        return [*_key_words(SCHEMAS[command]), "--nproc-per-node="]
    if command == "completion":
        return ["bash", "zsh", "fish"]
    module, function = PARSERS[command].split(":")
    return [*_parser_words(getattr(importlib.import_module(module), function)()), "--debug"]


def _key_words(schema: type) -> list[str]:
    from quadriga.config.typed import all_keys

    return [
        *(f"{key}=" for key in all_keys(schema)),
        "--config=",
        "--config-name=",
        "--config-path=",
        "--from-verl",
        "--help",
        "--debug",
    ]


def _parser_words(parser: argparse.ArgumentParser) -> list[str]:
    words: dict[str, None] = {}
    for action in parser._actions:
        words.update(dict.fromkeys(flag for flag in action.option_strings if flag.startswith("--")))
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                words[name] = None
                words.update(dict.fromkeys(_parser_words(inner)))
    return list(words)


def _bash(words: dict[str, list[str]]) -> str:
    cases = "\n".join(f'        {name}) words="{" ".join(choices)}" ;;' for name, choices in words.items())
    return f"""\
_quadriga() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$current"))
        return
    fi
    # What follows the "=" of key=value is a file name, if anything: bash's own completion does that.
    if [ "$current" = "=" ] || [ "${{COMP_WORDS[COMP_CWORD-1]}}" = "=" ]; then
        COMPREPLY=()
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
        *) words="" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [ "${{#COMPREPLY[@]}}" -eq 1 ] && [ "${{COMPREPLY[0]%=}}" != "${{COMPREPLY[0]}}" ]; then
        compopt -o nospace 2>/dev/null
    fi
}}
complete -o default -F _quadriga quadriga
"""


def _zsh(words: dict[str, list[str]]) -> str:
    commands = "\n".join(f"        '{name}:{_quoted(COMMANDS[name][1])}'" for name in words)
    cases = "\n".join(f"        {name}) found=({' '.join(choices)}) ;;" for name, choices in words.items())
    return f"""\
#compdef quadriga
_quadriga() {{
    local -a commands found
    commands=(
{commands}
    )
    if (( CURRENT == 2 )); then
        _describe 'command' commands
        return
    fi
    if [[ "$PREFIX" == *=* ]]; then
        compset -P '*='
        _files
        return
    fi
    case "${{words[2]}}" in
{cases}
    esac
    compadd -S '' -- ${{(M)found:#*=}}
    compadd -- ${{found:#*=}}
    _files
}}
compdef _quadriga quadriga
"""


def _fish(words: dict[str, list[str]]) -> str:
    lines = []
    for name, choices in words.items():
        text = _quoted(COMMANDS[name][1])
        lines.append(f"complete -c quadriga -n __fish_use_subcommand -f -a {name} -d '{text}'")
        for word in choices:
            lines.append(f"complete -c quadriga -n '__fish_seen_subcommand_from {name}' -a '{word}'")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return text.replace("'", "")
