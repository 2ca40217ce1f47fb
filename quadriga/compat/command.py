"""`--from-verl` of train, plan and sft: the rest of the command line is verl's; `--write FILE` keeps what it means here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from quadriga.compat.translation import Row, Translation, Verdict, shown, translate
from quadriga.config.devices import detect_local_device
from quadriga.config.foreign_keys import Kind
from quadriga.errors import ConfigError

FLAG, WRITE = "--from-verl", "--write"
KINDS: dict[str, Kind] = {"train": "rl", "plan": "rl", "sft": "sft"}
"""Commands that take verl's arguments."""
ORDER = (Verdict.TAKEN, Verdict.TRANSLATED, Verdict.DEFAULT, Verdict.ASIDE, Verdict.REFUSED)


def understand(command: str, arguments: list[str], defaults: bool | None = None) -> list[str]:
    """The arguments of `quadriga <command>` in Quadriga's own keys, where `--from-verl` says that they are verl's.

    Prints what became of each key, and writes the file that `--write` names.

    Args:
        defaults: see `translate`.

    Raises:
        ConfigError: a key is refused, an argument cannot be read, or the command takes none of verl's.
    """
    target, rest = _take_target(arguments)
    if FLAG not in rest:
        if target is not None:
            raise ConfigError(f"{WRITE} goes with {FLAG}", f"give {FLAG}, or remove {WRITE}")
        return rest
    if command not in KINDS:
        raise ConfigError(f"quadriga {command} knows no {FLAG}", f"{', '.join(KINDS)} do")
    own = [a for a in rest if a.startswith("--nproc")]
    device = detect_local_device() if command == "train" else None
    translation = translate([a for a in rest if a != FLAG and a not in own], KINDS[command], defaults, device)
    if os.environ.get("RANK", "0") == "0":
        show(translation)
        translation.raise_if_refused()
        if target is not None:
            write(translation, Path(target), command)
    else:
        translation.raise_if_refused()
    return [*own, *translation.arguments()]


def _take_target(arguments: list[str]) -> tuple[str | None, list[str]]:
    target, rest, queue = None, [], iter(arguments)
    for argument in queue:
        flag, equals, value = argument.partition("=")
        if flag == WRITE:
            target = value if equals else next(queue, "")
            if not target.endswith((".yaml", ".yml")):
                raise ConfigError(f"{WRITE} {target!r} is no yaml file", f"write {WRITE} my.yaml, for example")
        else:
            rest.append(argument)
    return target, rest


def show(translation: Translation, console: Any = None) -> None:
    """Everything that is not simply taken over, or of which there is something to say, as one table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    rows = list(translation.rows.values())
    counts = ", ".join(
        f"{sum(row.verdict is verdict for row in rows)} {verdict}"
        for verdict in ORDER
        if any(row.verdict is verdict for row in rows)
    )
    table = Table(title=f"verl's command line: {counts}", title_justify="left", title_style="bold")
    for column in ("verl", "", "here", "why"):
        table.add_column(column, overflow="fold")
    for verdict in ORDER:
        for row in rows:
            plain = row.verdict is Verdict.TAKEN and not (row.here and row.note)
            if row.verdict is verdict and not plain:
                table.add_row(*map(Text, (_said(row), verdict, row.here, row.note)))
    console.print(table if table.row_count else f"verl's command line: {counts or 'empty'}")


def _said(row: Row) -> str:
    if row.verdict is Verdict.DEFAULT or row.value is None:
        return row.key
    return f"{row.key}={shown(row.value)}"


def write(translation: Translation, file: Path, command: str) -> None:
    """The configuration that the command line amounts to, in Quadriga's keys and without what is default."""
    import yaml

    train = "train" if command == "plan" else command
    usage = f"quadriga {train} --config {file}"
    text = yaml.safe_dump(translation.nested(), sort_keys=False, allow_unicode=True, width=120)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# From a verl command line. Use it with: {usage}\n{text}", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error}", "name a file in a folder that can be written") from None
    print(f"wrote {file}; use it with: {usage}")
