"""What a client asks for, read from JSON that may be anything: every field is understood, or refused by name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quadriga.agents.policy import Message

MOST_CHOICES = 256
"""Answers of one call, over all its prompts."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of the API → roles that chat templates know."""

_SAMPLING = {
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "top_k": ("top_k", int),
    "min_p": ("min_p", float),
    "repetition_penalty": ("repetition_penalty", float),
    "min_tokens": ("min_new_tokens", int),
    "ignore_eos": ("ignore_eos", bool),
    "seed": ("seed", int),
}
"""Field of the API → field of `SamplingParams`, and its type."""
_HINTS = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "verbosity",
}
"""Labels and hints to other people's machines; whatever they say, the answer may be the same."""
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none",),
}
"""Fields that this endpoint has no means for, and the values at which they ask for nothing."""
_JSON_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a whole number"}
_JSON_NAMES |= {float: "a number"}


class ApiError(Exception):
    """An answer that is an error, as the API words it: what, where (`param`), and how to mend it."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, kind: str = ""
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")

    @property
    def body(self) -> dict[str, Any]:
        told = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": told}


@dataclass(frozen=True)
class Call:
    """One call of the API, checked."""

    chat: bool
    prompts: list[Any]
    """Conversations (for a chat, one), texts or lists of token ids."""
    model: str | None
    sampling: dict[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams` that the client has set."""
    n: int = 1
    stops: tuple[str, ...] = ()
    tools: list[dict[str, Any]] | None = None
    call_wanted: bool = False
    """`tool_choice` asked for a tool call."""
    one_call: bool = False
    """At most one tool call an answer."""
    stream: bool = False
    stream_usage: bool = False
    log_probs: bool = False
    token_ids: bool = True
    ignored: tuple[str, ...] = ()
    """Fields of `SamplingParams` that were set and are not the client's to choose."""

    def without(self, names: Iterable[str]) -> Call:
        """The call without these fields of `SamplingParams`."""
        gone = tuple(sorted(names))
        sampling = {name: value for name, value in self.sampling.items() if name not in gone}
        return replace(self, sampling=sampling, ignored=gone) if gone else self


def read_json(body: bytes) -> dict[str, Any]:
    """The object in a request's body."""
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        json.dumps(found, ensure_ascii=False).encode("utf-8")  # halves of characters cannot be encoded
    except UnicodeEncodeError:
        raise ApiError(400, "The body holds half a character (a lone surrogate): send whole characters.") from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is not UTF-8 (byte {error.start}): encode it as UTF-8.") from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply: send plain lists and objects.") from None
    except ValueError as error:
        raise ApiError(400, f"The body is not JSON: {error}. Send one JSON object.") from None
    if not isinstance(found, dict):
        raise ApiError(400, f"The body is {_kind(found)}, not an object: send a JSON object such as {{…}}.")
    return found


def read_chat(body: dict[str, Any]) -> Call:
    """A call of /v1/chat/completions."""
    fields = _Fields(body)
    messages = read_messages(fields.take("messages", list, required=True))
    tools, call_wanted = _tools(fields)
    one_call = fields.take("parallel_tool_calls", bool) is False
    log_probs = bool(fields.take("logprobs", bool))
    most = fields.take("max_tokens", int)
    newer = fields.take("max_completion_tokens", int)
    if fields.take("top_logprobs", int):
        raise ApiError(
            400,
            "top_logprobs must be 0: the engine computes the log-prob of each token that it sampled, and of no other. "
            "Ask for logprobs alone.",
            "top_logprobs",
            "unsupported_value",
        )
    return _call(
        fields,
        True,
        [messages],
        newer if newer is not None else most,
        tools=tools,
        call_wanted=call_wanted,
        one_call=one_call,
        log_probs=log_probs,
    )


def read_completion(body: dict[str, Any]) -> Call:
    """A call of /v1/completions."""
    fields = _Fields(body)
    prompts = _prompts(fields.take("prompt", str, list, required=True))
    most = fields.take("max_tokens", int)
    asked = fields.take("logprobs", int, bool)
    if asked is not None and int(asked) not in (0, 1):
        raise ApiError(
            400,
            f"logprobs is {asked}, but only the log-probs of the sampled tokens are known: set it to 0 or 1.",
            "logprobs",
            "unsupported_value",
        )
    return _call(fields, False, prompts, most, log_probs=asked is not None and asked is not False)


def read_messages(value: list[Any]) -> list[Message]:
    """The conversation as chat templates take it: roles that they know, contents as text, arguments of calls as objects."""
    if not value:
        raise ApiError(400, "messages is empty: send at least one message.", "messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(value)]


def _call(fields: _Fields, chat: bool, prompts: list[Any], most: int | None, **more: Any) -> Call:
    """What both kinds of calls have in common."""
    sampling = {name: fields.take(key, kind) for key, (name, kind) in _SAMPLING.items()} | {"max_new_tokens": most}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    if abs(sampling.get("seed", 0)) >= 1 << 63:
        raise ApiError(400, f"seed is {sampling['seed']}: choose one of at most 63 bits.", "seed")
    if most is not None and most < 1:
        raise ApiError(400, f"max_tokens is {most}: ask for at least one token.", "max_tokens")
    stops = _stops(fields)
    if stops:
        sampling["stop_strings"] = stops
    ids = fields.take("stop_token_ids", list) or []
    if ids:
        sampling["stop_token_ids"] = tuple(_ids(ids, "stop_token_ids"))
    n = fields.take("n", int)
    n = 1 if n is None else n
    if not 1 <= n * len(prompts) <= MOST_CHOICES:
        raise ApiError(
            400, f"{len(prompts)} prompts and n={n}: a call has from 1 to {MOST_CHOICES} answers. Send several.", "n"
        )
    options = fields.take("stream_options", dict) or {}
    if unknown := options.keys() - {"include_usage", "include_obfuscation"}:
        raise ApiError(400, f"stream_options knows include_usage, not {_listed(unknown)}.", "stream_options")
    wants_ids = fields.take("return_token_ids", bool)
    call = Call(
        chat=chat,
        prompts=prompts,
        model=fields.take("model", str),
        sampling=sampling,
        n=n,
        stops=stops,
        stream=bool(fields.take("stream", bool)),
        stream_usage=bool(options.get("include_usage")),
        token_ids=True if wants_ids is None else wants_ids,
        **more,
    )
    fields.refuse_the_rest(chat)
    return call


class _Fields:
    """The fields of a body, each taken once."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.left = dict(body)
        self.known: list[str] = []

    def take(self, name: str, *kinds: type, required: bool = False) -> Any:
        """The value of a field, of one of these types; None where it is absent or null."""
        self.known.append(name)
        value = self.left.pop(name, None)
        if value is None:
            if required:
                raise ApiError(400, f"{name} is missing: send it as {_JSON_NAMES[kinds[0]]}.", name)
            return None
        if bool in kinds and isinstance(value, bool):
            return value
        if not isinstance(value, bool):
            if float in kinds and isinstance(value, int | float):
                try:
                    return float(value)
                except OverflowError:
                    pass
            elif isinstance(value, tuple(kind for kind in kinds if kind is not bool)):
                return value
        wanted = " or ".join(_JSON_NAMES[kind] for kind in kinds)
        raise ApiError(400, f"{name} is {_kind(value)} ({_short(value)}), not {wanted}.", name)

    def refuse_the_rest(self, chat: bool) -> None:
        """ApiError for a field that would change the answer if it were understood, and for one that nobody knows."""
        for name, value in self.left.items():
            if value is None or name in _HINTS:
                continue
            if name in _WITHOUT_EFFECT:
                if value not in _WITHOUT_EFFECT[name]:
                    message = f"{name}={_short(value)} is not supported here: leave {name} out."
                    raise ApiError(400, message, name, "unsupported_parameter")
                continue
            near = difflib.get_close_matches(name, [*self.known, *_WITHOUT_EFFECT, *_HINTS], n=1)
            where = "chat completions" if chat else "completions"
            message = f"{where} have no field {_short(name)}: " + (
                f"did you mean {near[0]}?" if near else "leave it out."
            )
            raise ApiError(400, message, name[:80], "unknown_parameter")


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise ApiError(400, f"{where} is {_kind(value)}, not an object with role and content.", where)
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(400, f"{where}.role is {_short(role)}: use one of {', '.join(ROLES)}.", f"{where}.role")
    calls = value.get("tool_calls")
    if calls and role != "assistant":
        raise ApiError(400, f"{where} has tool_calls, but only an assistant calls tools.", f"{where}.tool_calls")
    content = value.get("content")
    if content is None and role != "assistant":
        raise ApiError(400, f"{where} has no content: send a string.", f"{where}.content")
    message: Message = {"role": ROLES[role], "content": _text_of(content, f"{where}.content")}
    if calls:
        if not isinstance(calls, list):
            raise ApiError(400, f"{where}.tool_calls is {_kind(calls)}, not a list.", f"{where}.tool_calls")
        message["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for name in ("name", "tool_call_id"):
        if isinstance(value.get(name), str):
            message[name] = value[name]
    return message


def _text_of(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} is {_kind(content)}, neither a string nor a list of parts.", where)
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise ApiError(
                400,
                f"{where}[{number}] is {_short(kind or part)}: this model reads text alone, as "
                '{"type": "text", "text": "…"}.',
                f"{where}[{number}]",
            )
        texts.append(text)
    return "".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise ApiError(
            400, f'{where} is no call: send {{"id", "type": "function", "function": {{"name", "arguments"}}}}.', where
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None  # what the policy wrote was no JSON; the template gets it as it is
        arguments = parsed if isinstance(parsed, dict) else arguments
    found: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call["id"], **found} if isinstance(call.get("id"), str) else found


def _tools(fields: _Fields) -> tuple[list[dict[str, Any]] | None, bool]:
    """The tools that the template shows, and whether a call was asked for."""
    tools = fields.take("tools", list) or []
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            where = f"tools[{number}]"
            raise ApiError(
                400, f'{where} is no tool: send {{"type": "function", "function": {{"name", "parameters"}}}}.', where
            )
    choice = fields.take("tool_choice", str, dict)
    if choice in (None, "auto"):
        return tools or None, False
    if choice == "none":
        return None, False
    if choice == "required" and tools:
        return tools, True
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if chosen := [tool for tool in tools if name is not None and tool["function"]["name"] == name]:
        return chosen, True
    names = _listed(tool["function"]["name"] for tool in tools) or "none"
    raise ApiError(
        400,
        f"tool_choice={_short(choice)} fits no tool (given: {names}): use auto, none, required, or "
        '{"type": "function", "function": {"name": "…"}}.',
        "tool_choice",
    )


def _stops(fields: _Fields) -> tuple[str, ...]:
    stop = fields.take("stop", str, list)
    stops = [stop] if isinstance(stop, str) else stop or []
    if not all(isinstance(text, str) and text for text in stops) or len(stops) > 16:
        raise ApiError(400, "stop is one text, or a list of at most 16, of at least one character each.", "stop")
    return tuple(stops)


def _prompts(prompt: str | list[Any]) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(part, str) for part in prompt):
        return prompt
    if prompt and all(isinstance(part, list) for part in prompt):
        return [_ids(part, f"prompt[{number}]") for number, part in enumerate(prompt)]
    if not prompt:
        raise ApiError(400, "prompt is empty: send a text, token ids, or a list of either.", "prompt")
    return [_ids(prompt, "prompt")]


def _ids(value: Sequence[Any], where: str) -> list[int]:
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 1 << 31 for token in value):
        raise ApiError(400, f"{where} is neither text nor a list of token ids.", where)
    return list(value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return _JSON_NAMES.get(type(value), type(value).__name__)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def _listed(names: Any) -> str:
    return ", ".join(sorted(map(str, names)))[:400]
