"""Exact tokens of a conversation: what the policy wrote stays as it wrote it, and only what is new is rendered.

    ids   = header of turn 1 · answer 1 · what the template puts between · answer 2 · …
    mask  =        0         ·    1     ·               0                 ·    1     · …

An answer is never tokenised again. What stands between two answers is cut out of one rendering of the whole conversation, in
which every answer of the policy is replaced by a short stand-in: a template that strips thinking or whitespace from earlier turns
then changes nothing that matters, and a rendering that does not begin with the text so far proves that the template rewrites
the past, which is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quadriga.agents.policy import Message, ToolCall
from quadriga.agents.tool_formats import tool_format as find_format
from quadriga.data.chat import ChatEncoder
from quadriga.errors import DataError

_STAND_IN = "Aa"
_TOOL_CALL = {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": {}}}
_PROBES: dict[str, list[Message]] = {
    "user": [{"role": "user", "content": "And then?"}],
    "tool": [{"role": "tool", "content": "42", "name": "look", "tool_call_id": "call00000"}],
    "system": [{"role": "system", "content": "Be brief."}],
    "assistant": [
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "Look.", "tool_calls": [_TOOL_CALL]},
        {"role": "tool", "content": "42", "name": "look", "tool_call_id": "call00000"},
    ],
}
_A_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class Answer:
    """What the policy wrote, read as a message."""

    text: str
    """Without special tokens."""
    message: Message
    """Role, content, and `tool_calls` where there are calls without an error (arguments as a dict, as templates want them)."""
    tool_calls: tuple[ToolCall, ...]
    """All calls, also those that cannot be read."""
    ended: bool
    """Its last token is an end token."""


class ChatTemplate:
    """A chat template and its tokenizer, checked once for conversations that grow.

    Args:
        encoder: renders and encodes.
        end_token_ids: tokens that end an answer; None: the tokenizer's eos.
        tool_format: how the policy writes tool calls: a name of `tool_formats`, or `file.py:name`.

    Attributes:
        offending: role → why a message of it is not simply appended. Such a template is still exact here: see the module.
        refused: role → why a conversation cannot go on with it at all.
        shows_tools: the template tells the model of the tools.
    """

    def __init__(
        self,
        encoder: ChatEncoder,
        *,
        end_token_ids: Iterable[int] | None = None,
        tool_format: str = "hermes",
    ) -> None:
        self.encoder = encoder
        self.tokenizer = encoder.tokenizer
        self.format = find_format(tool_format)
        ends = [self.tokenizer.eos_token_id] if end_token_ids is None else list(end_token_ids)
        self._special = _special_tokens(self.tokenizer)
        self.end_token_ids = frozenset(i for i in ends if i is not None)
        self._end: tuple[int, str] | None = None
        self._end = self._find_turn_end()
        if self._end:
            self.end_token_ids |= {self._end[0]}
        self._ends = {self._text_of(i): i for i in self.end_token_ids}
        self.offending: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        for role in _PROBES:
            self._check(role)
        asked: list[Message] = [{"role": "user", "content": "Hi"}]
        try:
            self.shows_tools = self.render(asked, [_A_TOOL]) != self.render(asked)
        except DataError:
            self.shows_tools = False

    # -- what agents use

    def require(self, *roles: str) -> None:
        """Raises DataError if a conversation cannot go on with a message of one of these roles."""
        for role in roles:
            if role in self.refused:
                raise DataError(
                    f"the chat template of {self.tokenizer.name_or_path!r} cannot go on with a message of role "
                    f"{role!r}: {self.refused[role]}",
                    "set data.chat_template to a template that only appends, or do without this role",
                )

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None, *, for_answer: bool = True
    ) -> str:
        chat = [template_message(message) for message in messages]
        return self.encoder.render([chat], lambda _: "this conversation", for_answer=for_answer, tools=tools)[0]

    def encode(self, text: str) -> list[int]:
        return self.encoder.encode([text], lambda _: "this conversation")["input_ids"][0]

    def read_answer(
        self, token_ids: Sequence[int], tools: Sequence[dict[str, Any]] | None = None, first_id: int = 0
    ) -> Answer:
        """Content and tool calls of what the policy wrote; never an error, whatever it wrote.

        The ids of the calls count from `first_id`.
        """
        ended = bool(token_ids) and token_ids[-1] in self.end_token_ids
        written = list(token_ids[:-1] if ended else token_ids)
        marked = self._decode(written, skip_special_tokens=False)
        content, calls = self.format.parse(marked, tools, first_id)
        for text in self._special:
            content = content.replace(text, "")
        message: Message = {"role": "assistant", "content": content}
        if any(call.error is None for call in calls):
            message["tool_calls"] = [as_template_call(call) for call in calls if call.error is None]
        text = self._decode(written, skip_special_tokens=True)
        return Answer(text, message, tuple(calls), ended)

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        # Some tokenizers tidy up spaces before punctuation, which would change the arguments of a call.
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    # -- what stands between two answers

    def between(
        self,
        before: str,
        past: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        last_id: int | None,
    ) -> tuple[list[int], str]:
        """Ids from the end of an answer to the end of the next header, and the text of the whole, for the next time.

        Args:
            before: the rendering that the answer continued.
            past: the messages up to that answer, with stand-ins for the policy's.
            last_id: the last token of the answer.

        Raises:
            DataError: the template fails, or rewrites what stood before.
        """
        after = self.render([*past, *new], tools)
        start = self._start_of_answer(before, past, after, tools)
        end_of_answer = self._end_of_answer(past, after, start, tools)
        rest = after[end_of_answer:]
        found = re.match(rf"(\s*)({'|'.join(map(re.escape, self._ends))})", rest) if self._ends else None
        has_ended = last_id in self.end_token_ids
        if found and (self._end or self._ends[found[2]] == last_id):
            anchor, rest, lead = found[2], rest[found.end() :], [] if has_ended else self._encode_some(found[1])
            ids = self.encode_after(anchor, rest)
            return (ids if has_ended else [*lead, self._ends[anchor], *ids]), after
        anchor = self._text_of(last_id) if has_ended and last_id is not None else _STAND_IN
        return self.encode_after(anchor, rest), after

    def encode_after(self, anchor: str, text: str) -> list[int]:
        """Ids of `text` as they are where it follows `anchor` (some tokenizers put a space before every text)."""
        front, whole = self.encode(anchor), self.encode(anchor + text)
        return whole[len(front) :] if whole[: len(front)] == front else self._encode_some(text)

    def _encode_some(self, text: str) -> list[int]:
        return self.encode(text) if text else []

    def _start_of_answer(self, before: str, past: Sequence[Message], after: str, tools: Any) -> int:
        """Where the turn of the answer begins in `after`; with the proof that all before it is as it was."""
        if after.startswith(before):
            return len(before)
        bare = self.render(past[:-1], tools, for_answer=False)  # a header may differ from the turn, as in Qwen3
        if before.startswith(bare) and after.startswith(bare):
            return len(bare)
        place = next((i for i, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))
        raise DataError(
            "the chat template changes what stands before the new messages: "
            f"{before[max(0, place - 20) : place + 20]!r} has become {after[max(0, place - 20) : place + 20]!r}",
            "set data.chat_template to a template that only appends",
        )

    def _end_of_answer(self, past: Sequence[Message], after: str, start: int, tools: Any) -> int:
        """Where the stand-in of the last answer ends in `after`: before its end token."""
        if not past[-1].get("tool_calls"):
            place = after.find(_STAND_IN, start)
            if place < 0:
                raise DataError(
                    "the chat template does not render the content of an assistant's message",
                    "set data.chat_template to one that does",
                )
            return place + len(_STAND_IN)
        if self._end:
            ends = [place for text in self._ends if (place := after.find(text, start)) >= 0]
            if ends:
                return min(ends)
        alone = self.render(past, tools, for_answer=False)
        for text in self._ends:
            alone = alone.rstrip().removesuffix(text)
        if not after.startswith(alone):
            raise DataError(
                "the chat template renders the last tool call otherwise than an earlier one",
                "set data.chat_template to a template that only appends",
            )
        return len(alone)

    # -- once at start

    def _find_turn_end(self) -> tuple[int, str] | None:
        """The token that ends every turn of the assistant, if there is one: id and text."""
        if not self._special:
            return None
        asked: list[Message] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _STAND_IN}]
        last = self.render(asked, for_answer=False)
        amid = self.render([*asked, *_PROBES["user"]])
        pattern = re.compile(rf"{_STAND_IN}\s*({'|'.join(map(re.escape, self._special))})")
        found = [pattern.search(text) for text in (last, amid)]
        texts = {match[1] for match in found if match}
        if None in found or len(texts) != 1:
            return None
        text = texts.pop()
        return self._special[text], text

    def _check(self, role: str) -> None:
        """Fills `offending` and `refused` for one role, by a conversation of one answer."""
        calls = [_TOOL_CALL] if role == "tool" else None
        past: list[Message] = [{"role": "user", "content": "Hi"}, stand_in({"tool_calls": calls} if calls else {})]
        tools = [_A_TOOL] if role in ("tool", "assistant") else None
        try:
            before = self.render(past[:-1], tools)
            end = self._end[0] if self._end else None
            ids, after = self.between(before, past, _PROBES[role], tools, end)
        except DataError as problem:
            self.refused[role] = self.offending[role] = problem.what
            return
        text = self.render(past, tools, for_answer=False)
        if not after.startswith(text):
            self.offending[role] = "the rendering with it does not begin with the rendering without it"
        elif self.encode(after)[: len(self.encode(text))] != self.encode(text):
            self.offending[role] = "the tokens with it do not begin with the tokens without it"
        elif self.encode(after)[-len(ids) :] != ids:
            self.offending[role] = "its tokens depend on what stands before it"

    def _text_of(self, token_id: int) -> str:
        return next((text for text, i in self._special.items() if i == token_id), None) or self.tokenizer.decode(
            [token_id]
        )


class Conversation:
    """A conversation of the policy as it grows.

    Attributes:
        ids: all tokens so far.
        mask: of each token, 1: written by the policy, 0: read.
        messages: as given and as written.
        answers: (start, end) in `ids` of each answer of the policy.
        last: the latest answer.

    Raises:
        DataError: the template fails on these messages.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        self.template, self.tools = template, list(tools) if tools else None
        self.messages: list[Message] = [dict(message) for message in messages]
        self._past: list[Message] = list(self.messages)  # the policy's answers as stand-ins
        self._text = template.render(self.messages, self.tools)
        self.ids: list[int] = template.encode(self._text)
        self.mask = [0] * len(self.ids)
        self.answers: list[tuple[int, int]] = []
        self.last: Answer | None = None
        self._calls = 0
        self._waits = True

    def add_answer(self, token_ids: Sequence[int]) -> Message:
        """Take in what the policy wrote, token for token; returns it as a message (see `last` for all of it)."""
        if not self._waits:
            raise DataError("this conversation has an answer already", "add messages before the next answer")
        self.answers.append((len(self.ids), len(self.ids) + len(token_ids)))
        self.ids.extend(token_ids)
        self.mask.extend([1] * len(token_ids))
        self.last = self.template.read_answer(token_ids, self.tools, self._calls)
        self._calls += len(self.last.tool_calls)
        self.messages.append(self.last.message)
        self._past.append(stand_in(self.last.message))
        self._waits = False
        return self.last.message

    def add(self, messages: Sequence[Message]) -> list[int]:
        """Take in messages after an answer; returns the tokens to be read, which end in the header of the next answer.

        Raises:
            DataError: there are none, the template refuses them, or it rewrites what stood before. Nothing is changed then.
        """
        if self._waits or not messages:
            raise DataError(
                "messages are added after an answer, and at least one", "add the answer of the policy before them"
            )
        start, end = self.answers[-1]
        last_id = self.ids[-1] if end > start else None
        try:
            ids, text = self.template.between(self._text, self._past, messages, self.tools, last_id)
        except DataError as problem:
            roles = ", ".join(dict.fromkeys(str(message.get("role")) for message in messages))
            raise DataError(f"a message of role {roles}: {problem.what}", problem.fix) from problem
        self.ids.extend(ids)
        self.mask.extend([0] * len(ids))
        self.messages.extend(dict(message) for message in messages)
        self._past.extend(messages)
        self._text = text
        self._waits = True
        return ids

    def continues(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[Message] | None:
        """What is new in `messages` if they begin with this conversation, an answer last; None if they do not."""
        known = len(self.messages)
        if self._waits or len(messages) <= known or (list(tools) if tools else None) != self.tools:
            return None
        same = all(same_message(mine, theirs) for mine, theirs in zip(self.messages, messages))
        return [dict(message) for message in messages[known:]] if same else None


def stand_in(message: Message) -> Message:
    """An answer of the policy as the template is shown it later: no thinking, nothing to trim, calls without arguments."""
    calls = message.get("tool_calls")
    if not calls:
        return {"role": "assistant", "content": _STAND_IN}
    bare = []
    for call in calls:
        function = call.get("function", call)
        bare.append(
            {"type": "function", "id": call.get("id", ""), "function": {"name": function["name"], "arguments": {}}}
        )
    return {"role": "assistant", "content": "", "tool_calls": bare}


def template_message(message: Message) -> Message:
    """A message as chat templates want it: content as text, arguments of tool calls as a dict.

    Raises:
        DataError: it is no message, or holds an image or the like.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(
            f"this is no message: {str(message)[:80]!r}", 'a message is such as {"role": "user", "content": "2+2?"}'
        )
    content = message.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, dict) or not isinstance(part.get("text"), str) for part in content):
            raise DataError("a message holds something else than text", "send text only")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise DataError(f"the content of a message is a {type(content).__name__}", "send text")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = content or ""
    if "tool_calls" in plain:
        plain["tool_calls"] = [_with_arguments(call) for call in plain["tool_calls"]]
        if not plain["tool_calls"]:
            del plain["tool_calls"]
    return plain


def _with_arguments(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function", call), dict):
        raise DataError(f"this is no tool call: {str(call)[:80]!r}", "send it as the chat API returned it")
    function = dict(call.get("function", call))
    if not isinstance(function.get("name"), str):
        raise DataError(f"this tool call has no name: {str(call)[:80]!r}", "send it as the chat API returned it")
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # as the chat API has it
        try:
            function["arguments"] = json.loads(arguments)
        except ValueError:
            function["arguments"] = {"text": arguments}
    elif arguments is None:
        function["arguments"] = {}
    return {**call, "function": function} if "function" in call else function


def same_message(mine: Message, theirs: Message) -> bool:
    """Whether two messages mean the same: an empty content is none, and arguments may be text or a dict."""
    try:
        return _essence(mine) == _essence(theirs)
    except DataError:
        return False


def _essence(message: Message) -> tuple[Any, ...]:
    plain = template_message(message)
    calls = [
        (call.get("function", call).get("name"), call.get("function", call).get("arguments"))
        for call in plain.get("tool_calls", ())
    ]
    return plain["role"], plain["content"], calls, plain.get("tool_call_id", "")


def as_template_call(call: ToolCall) -> dict[str, Any]:
    return {
        "type": "function",
        "id": call.call_id,
        "function": {"name": call.name, "arguments": dict(call.arguments or {})},
    }


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """Text → id of the tokens that decoding leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token): i for i, token in added.items() if getattr(token, "special", False)}
