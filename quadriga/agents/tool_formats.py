"""How models write tool calls: one parser a format, by registry.

A parser is `(text, tools) -> (content, calls)`: the text without its calls, and the calls in the order in which they stand. What
it cannot read becomes a `ToolCall` with `error`, which the policy is told; no text makes it raise.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quadriga.agents.policy import ToolCall
from quadriga.registry import Registry

Tools = Sequence[dict[str, Any]] | None
Parser = Callable[[str, Tools], tuple[str, list[ToolCall]]]

_FORMATS: Registry[Parser] = Registry("tool format", "actor_rollout_ref.rollout.multi_turn.format")
register_tool_format = _FORMATS.register
tool_format_names = _FORMATS.names
_THINKING_ENDS = "</think>"


@dataclass(frozen=True)
class ToolFormat:
    """A parser by name, made safe: what is thought is no call, calls have ids, and nothing is raised."""

    name: str
    parser: Parser

    def parse(self, text: str, tools: Tools = None, first_id: int = 0) -> tuple[str, list[ToolCall]]:
        """Content and calls of an answer; the ids of the calls count from `first_id`."""
        thought, ends, rest = text.rpartition(_THINKING_ENDS)
        try:
            content, calls = self.parser(rest, tools)
            calls = [
                replace(call, call_id=call.call_id or f"call{first_id + number:05d}")
                for number, call in enumerate(calls)
            ]
        except Exception as problem:  # a parser of the user's own, or text that nobody has foreseen
            content, calls = (
                rest,
                [ToolCall("", None, rest, f"call{first_id:05d}", f"the call cannot be read: {problem}")],
            )
        return thought + ends + content, calls


def tool_format(name: str) -> ToolFormat:
    """The format of that name, or of the user's own as `file.py:name`.

    Raises:
        ConfigError: no such format, file or function.
    """
    return ToolFormat(name, _FORMATS.get(name))


# -- JSON between marks


@register_tool_format("hermes", "qwen")
def parse_hermes(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them."""
    content, inner = _blocks(text, "<tool_call>", "</tool_call>")
    return content, [_call_of_json(raw, closed) for raw, closed in inner]


@register_tool_format("llama3", "llama3_json")
def parse_llama3(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """The whole answer is `{"name": …, "parameters": {…}}`, several with `;` between them, maybe after `<|python_tag|>`.

    After that tag also `name.call(key="value")`.
    """
    before, tag, body = text.partition("<|python_tag|>")
    if not tag:
        before, body = "", text
        if not body.lstrip().startswith("{"):
            return text, []
    for mark in ("<|eom_id|>", "<|eot_id|>"):
        body = body.removesuffix(mark)
    body = body.strip()
    if built_in := re.fullmatch(r"(\w+)\.call\((.*)\)", body, re.S):
        return before, [_call_of_python(f"{built_in[1]}({built_in[2]})")]
    calls, place, decoder = [], 0, json.JSONDecoder()
    while place < len(body):
        try:
            value, end = decoder.raw_decode(body, place)
        except ValueError as problem:
            calls.append(_unread(body[place:], f"it is no JSON: {problem}"))
            break
        if not tag and not calls and not (isinstance(value, dict) and "name" in value):
            return text, []  # an answer that is JSON, but no call
        calls.append(_call_of_value(value, body[place:end]))
        place = end + len(re.match(r"[\s;]*", body[end:])[0])  # type: ignore[index]
    return before, calls


@register_tool_format("mistral")
def parse_mistral(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name{…}` for each call."""
    content, *parts = text.split("[TOOL_CALLS]")
    calls = []
    for part in map(str.strip, parts):
        if part.startswith("["):
            try:
                values = json.loads(part)
            except ValueError as problem:
                calls.append(_unread(part, f"it is no JSON: {problem}"))
                continue
            calls += [_call_of_value(value, json.dumps(value)) for value in values]
        else:
            name, _, arguments = part.removesuffix("[ARGS]").replace("[ARGS]", "").partition("{")
            calls.append(_call_of_arguments(name.strip(), "{" + arguments, part))
    return content, calls


@register_tool_format("kimi")
def parse_kimi(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """`<|tool_call_begin|>functions.N:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`."""
    content, inner = _blocks(text, "<|tool_call_begin|>", "<|tool_call_end|>")
    calls = []
    for raw, _ in inner:
        call_id, _, arguments = raw.partition("<|tool_call_argument_begin|>")
        name = call_id.strip().removeprefix("functions.").rpartition(":")[0] or call_id.strip()
        calls.append(replace(_call_of_arguments(name, arguments, raw), call_id=call_id.strip()))
    return re.sub(r"<\|tool_calls_section_(begin|end)\|>", "", content), calls


@register_tool_format("gpt-oss")
def parse_gpt_oss(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """`<|channel|>commentary to=functions.N <|constrain|>json<|message|>{…}<|call|>`; the channel `analysis` is thought."""
    calls, content = [], []
    for part in re.split(r"<\|start\|>", text):
        header, _, body = part.partition("<|message|>")
        if not _:
            content.append(header if "<|channel|>" not in header else "")
            continue
        body = re.sub(r"<\|(call|end|return)\|>\s*$", "", body)
        if to := re.search(r"to=(?:functions\.)?([\w.-]+)", header):
            calls.append(_call_of_arguments(to[1], body, part))
        elif "analysis" not in header:
            content.append(body)
    return "".join(content), calls


# -- names and values between marks


@register_tool_format("qwen3_coder")
def parse_qwen3_coder(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """`<tool_call><function=N><parameter=K>V</parameter></function></tool_call>`; an unclosed last one is taken."""
    return _parse_tagged(
        text, tools, "<tool_call>", "</tool_call>", r"<function=([^>]*)>", r"<parameter=([^>]*)>", "</parameter>"
    )


@register_tool_format("seed")
def parse_seed(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """As `qwen3_coder`, between `<seed:tool_call>` and `</seed:tool_call>`."""
    opening, closing = "<seed:tool_call>", "</seed:tool_call>"
    return _parse_tagged(text, tools, opening, closing, r"<function=([^>]*)>", r"<parameter=([^>]*)>", "</parameter>")


@register_tool_format("minimax")
def parse_minimax(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """`<minimax:tool_call><invoke name="N"><parameter name="K">V</parameter></invoke></minimax:tool_call>`."""
    name, key = r'<invoke name="?([^">]*)"?>', r'<parameter name="?([^">]*)"?>'
    return _parse_tagged(text, tools, "<minimax:tool_call>", "</minimax:tool_call>", name, key, "</parameter>")


@register_tool_format("glm")
def parse_glm(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """`<tool_call>N<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>`."""
    content, inner = _blocks(text, "<tool_call>", "</tool_call>")
    calls = []
    for raw, _ in inner:
        name = raw.partition("<arg_key>")[0].strip()
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", raw, re.S)
        calls.append(_call_of_texts(name, [(key.strip(), value) for key, value in pairs], raw, tools))
    return content, calls


def _parse_tagged(
    text: str, tools: Tools, opening: str, closing: str, name: str, key: str, value_ends: str
) -> tuple[str, list[ToolCall]]:
    content, inner = _blocks(text, opening, closing)
    calls = []
    for raw, _ in inner:
        starts = list(re.finditer(name, raw))
        if not starts:
            calls.append(_unread(raw, "it names no function"))
        for start, following in zip(starts, [*starts[1:], None]):
            body = raw[start.end() : following.start() if following else len(raw)]
            pattern = rf"{key}(.*?)(?:{re.escape(value_ends)}|(?=<parameter)|</function>|</invoke>|\Z)"
            pairs = [(k.strip(), _without_line_ends(v)) for k, v in re.findall(pattern, body, re.S)]
            calls.append(_call_of_texts(start[1].strip(), pairs, raw, tools))
    return content, calls


@register_tool_format("pythonic")
def parse_pythonic(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """The whole answer is a Python list of calls with literal keywords: `[f(a=1), g(b="x")]`."""
    body = text.strip()
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\(", body):
        return text, []
    try:
        tree = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        return "", [_unread(body, f"it is no list of calls: {problem}")]
    elements = tree.elts if isinstance(tree, ast.List) else [tree]
    return "", [_call_of_python(ast.get_source_segment(body, element) or "") for element in elements]


# -- pieces


def _blocks(text: str, opening: str, closing: str) -> tuple[str, list[tuple[str, bool]]]:
    """The text outside the marks, and (text inside, whether the closing mark is there) of each block."""
    content, *parts = text.split(opening)
    inner = []
    for part in parts:
        raw, closed, after = part.partition(closing)
        inner.append((raw.strip(), bool(closed)))
        content = content.rstrip() + after if not after.strip() else content + after
    return (content.rstrip() if inner else content), inner


def _unread(raw: str, why: str, name: str = "") -> ToolCall:
    return ToolCall(name, None, raw, error=why)


def _call_of_json(raw: str, closed: bool = True) -> ToolCall:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as problem:
        end = "" if closed else " (and it is not closed)"
        return _unread(raw, f"it is no JSON: {problem}{end}")
    return _call_of_value(value, raw)


def _call_of_value(value: Any, raw: str) -> ToolCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _unread(raw, 'it is no object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return _call_of_arguments(value["name"], arguments, raw)
    return _call_of_dict(value["name"], arguments, raw)


def _call_of_arguments(name: str, arguments: str, raw: str) -> ToolCall:
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as problem:
        return _unread(raw, f"its arguments are no JSON: {problem}", name)
    return _call_of_dict(name, value, raw)


def _call_of_dict(name: str, arguments: Any, raw: str) -> ToolCall:
    if not isinstance(arguments, dict):
        return _unread(raw, "its arguments are no JSON object", name)
    return ToolCall(name, arguments, raw)


def _call_of_python(source: str) -> ToolCall:
    try:
        call = ast.parse(source.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            return _unread(source, "it is no call with keywords only")
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        json.dumps(arguments)
        return ToolCall(ast.unparse(call.func), arguments, source)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as problem:
        return _unread(source, f"its arguments are no plain values: {problem}")


def _call_of_texts(name: str, pairs: list[tuple[str, str]], raw: str, tools: Tools) -> ToolCall:
    """A call whose values are text: each is read as the type that the tool's schema gives it."""
    if not name:
        return _unread(raw, "it names no function")
    types = _types_of(name, tools)
    return ToolCall(name, {key: _cast(value, types.get(key)) for key, value in pairs}, raw)


def _types_of(name: str, tools: Tools) -> dict[str, Any]:
    for tool in tools or ():
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: schema.get("type") for key, schema in properties.items() if isinstance(schema, dict)}
    return {}


def _cast(value: str, kind: Any) -> Any:
    kinds = set(_texts(kind))
    if not kinds or kinds == {"string"}:
        return value
    plain = value.strip()
    if kinds & {"boolean"} and plain.lower() in ("true", "false"):
        return plain.lower() == "true"
    if kinds & {"null"} and plain.lower() in ("null", "none"):
        return None
    try:
        return json.loads(plain)
    except (ValueError, RecursionError):
        return value  # the check against the schema says what is wrong with it


def _texts(kind: Any) -> Iterator[str]:
    if isinstance(kind, str):
        yield kind
    elif isinstance(kind, list):
        yield from (k for k in kind if isinstance(k, str))


def _without_line_ends(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")
