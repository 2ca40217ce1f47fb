"""Finding the part of a response that states the answer."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


def last_boxed(text: str) -> str | None:
    r"""Content of the last balanced `\boxed{…}` or `\fbox{…}`; `\boxed 7` without braces counts too."""
    for match in reversed(list(_BOX.finditer(text))):
        start = match.end()
        if start < len(text) and text[start] == "{":
            end = _closing_brace(text, start)
            if end is not None:
                return text[start + 1 : end].strip()
        elif match.group().endswith((" ", "\t")):
            bare = re.match(r"[^\s$\\{}]+", text[start:])
            if bare:
                return bare.group().rstrip(".,;")
    return None


def _closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one at `start`; escaped braces do not count."""
    depth = 0
    escaped = False
    for index in range(start, len(text)):
        character = text[index]
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return index
    return None


def last_tag(text: str, tag: str = "answer") -> str | None:
    """Content of the last complete `<tag>…</tag>`."""
    end = text.rfind(f"</{tag}>")
    if end < 0:
        return None
    start = text.rfind(f"<{tag}>", 0, end)
    return None if start < 0 else text[start + len(tag) + 2 : end].strip()


def last_code_block(text: str, languages: tuple[str, ...] = ("python", "py", "python3", "")) -> str | None:
    """The last complete Markdown code fence in one of these languages."""
    blocks = [body for language, body in _FENCE.findall(text) if language.lower() in languages]
    return blocks[-1] if blocks else None
