"""The shape of a chat: a non-empty list of {role, content}, checked once so that templates cannot fail obscurely."""

from __future__ import annotations

from typing import Any

from quadriga.errors import DataError

Message = dict[str, Any]
_SHAPE = 'a chat is a list such as [{"role": "user", "content": "2+2?"}]'


def check_messages(value: Any, where: str) -> list[Message]:
    """The chat as a fresh list of dicts, without the empty fields that a columnar file adds to every message.

    Args:
        value: what stands in the file.
        where: file, row and column, for messages.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: expected a non-empty list of messages, found {_short(value)}", _SHAPE)
    return [_check_message(message, f"{where}, message {number}") for number, message in enumerate(value)]


def _check_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(f"{where}: expected an object with role and content, found {_short(message)}", _SHAPE)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise DataError(f"{where}: 'role' must be a non-empty string, found {_short(message.get('role'))}", _SHAPE)
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        kind = "images and other media are not supported here; " if isinstance(content, list) else ""
        raise DataError(f"{where}: 'content' must be a string, found {_short(content)}", kind + _SHAPE)
    return {key: field for key, field in message.items() if field is not None or key == "content"}


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
