"""What mkdocs adds while it builds the site: pages that nobody listed, and every error message, read from the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).resolve().parents[1] / "quadriga"
KINDS = ("ConfigError", "ResourceError", "DataError", "RewardError", "WorkerError", "CheckpointError")
MARKER = "<!-- every message: filled in when the site is built, from the source -->"


class Message(NamedTuple):
    kind: str
    what: str
    fix: str
    place: str


def on_config(config: Any) -> Any:
    """Called by mkdocs once: pages that the navigation does not list go to its end, so that none is left out."""
    listed = str(config.nav)
    missing = [page.name for page in sorted(Path(config.docs_dir).glob("*.md")) if f"'{page.name}'" not in listed]
    config.nav[-1]["Inside"].extend(missing)
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return typeset(markdown.replace(MARKER, render()) if MARKER in markdown else markdown)


CODE = re.compile(r"(^```.*?^```|`[^`\n]*`|^(?: {4}|\t).*$|https?://\S+|\]\([^)]*\))", flags=re.DOTALL | re.MULTILINE)
SUBSCRIPT = re.compile(
    r"(?<![\w\\])([A-Za-zΑ-Ωα-ωℓ]|len|score|kl)_(\{[^{}\n]+\}|[A-Za-z0-9]{1,3}(?:\([a-z]\))?)(?![\w_])"
)
SUM = re.compile(r"([ΣΠ])_(\{[^{}\n]+\}|[a-z])(?![\w_])")


def typeset(markdown: str) -> str:
    """Formulas as formulas: `s_i` and `Σ_{k≥t}` outside code with real subscripts, variables in italics.

    The source stays as people read and write it; no script and no font is needed to see the result.
    """
    parts = CODE.split(markdown)
    for at in range(0, len(parts), 2):  # the others are code
        text = SUM.sub(lambda m: f"{m[1]}<sub>{m[2].strip('{}')}</sub>", parts[at])
        parts[at] = SUBSCRIPT.sub(lambda m: f"<i>{m[1]}</i><sub>{m[2].strip('{}')}</sub>", text)
    return "".join(parts)


def render() -> str:
    lines, every = [], sorted(set(messages()))
    for kind in KINDS:
        lines += [f"### {kind}", "", "| message | fix | raised in |", "|---|---|---|"]
        found = [m for m in every if m.kind == kind and m.what.strip("… ")]
        lines += [f"| {_cell(m.what)} | {_cell(m.fix)} | `{m.place}` |" for m in found]
        lines.append("")
    return "\n".join(lines)


def texts() -> Iterator[str]:
    """Every text of the source, messages or not; `…` stands for what is filled in."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.JoinedStr, ast.Constant)):
                yield _text(node)


def messages() -> Iterator[Message]:
    """Every error that the source makes with a text of its own; `…` stands for what is filled in."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and (kind := _kind(node)):
                texts = [_text(argument) for argument in node.args[:2]] + [""]
                yield Message(kind, texts[0], texts[1], str(file.relative_to(PACKAGE.parent)))


def _kind(call: ast.Call) -> str | None:
    name = call.func
    if isinstance(name, ast.Name) and name.id in KINDS:
        return name.id
    is_problem = isinstance(name, ast.Attribute) and name.attr == "add" and isinstance(name.value, ast.Name)
    return "ConfigError" if is_problem and name.value.id == "problems" else None  # type: ignore[attr-defined]


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return _text(node.body)
    return "…"


def _cell(text: str) -> str:
    for character, safe in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("{", "&#123;"), ("*", "\\*"), ("_", "\\_")):
        text = text.replace(character, safe)
    return " ".join(text.split())
