"""Answers in the words of the API: whole, or as the pieces of a stream; and what a client was shown in place of what was written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quadriga.agents.endpoint.requests import ApiError, Call
from quadriga.agents.endpoint.text import Pieces, Showing, cut_at_stop
from quadriga.agents.policy import Generation, Message

_FINISH = {"stop": "stop", "stop_string": "stop", "length": "length", "deadline": "length"}


@dataclass(frozen=True)
class Shown:
    """What a client sees of a generation."""

    text: str
    tool_calls: list[dict[str, Any]]
    """As the API has them: arguments are text."""
    finish_reason: str

    @property
    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.text or (None if self.tool_calls else "")}
        return message | ({"tool_calls": self.tool_calls} if self.tool_calls else {})


def show(generation: Generation, call: Call) -> Shown:
    """Text up to the stop text, and the tool calls if tools were given. Where one call cannot be read, all is shown as text."""
    if generation.finish_reason == "aborted":
        raise ApiError(
            503, "The answer was given up before it was finished: the server, or the episode, is at its end."
        )
    reason = _FINISH[generation.finish_reason]
    calls = generation.tool_calls if call.tools else ()
    if calls and all(found.arguments is not None for found in calls):
        kept = calls[:1] if call.one_call else calls
        shown = [
            {
                "id": found.call_id or f"call_{secrets.token_hex(6)}",
                "type": "function",
                "function": {"name": found.name, "arguments": json.dumps(found.arguments, ensure_ascii=False)},
            }
            for found in kept
        ]
        return Shown(generation.message.get("content") or "", shown, "tool_calls" if reason == "stop" else reason)
    return Shown(cut_at_stop(generation.text, call.stops), [], reason)


class Wording:
    """The objects of the API for one call.

    Args:
        model: the name that the answer gives.
        tokenizer: for the texts of single tokens.
    """

    def __init__(self, call: Call, model: str, tokenizer: Any) -> None:
        self.call, self.tokenizer = call, tokenizer
        self._head = {
            "id": ("chatcmpl-" if call.chat else "cmpl-") + secrets.token_hex(12),
            "object": "chat.completion" if call.chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        } | ({"ignored": list(call.ignored)} if call.ignored else {})

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer to a call that does not stream; choices in the order of prompts, `n` of each."""
        choices = [self._choice(index, generation) for index, generation in enumerate(generations)]
        return {**self._head, "choices": choices, "usage": self.usage(generations)} | self._prompt_ids(generations[0])

    def usage(self, generations: Sequence[Generation]) -> dict[str, int]:
        prompts = sum(len(generation.prompt_ids) for generation in generations[:: self.call.n])
        written = sum(len(generation.token_ids) for generation in generations)
        return {"prompt_tokens": prompts, "completion_tokens": written, "total_tokens": prompts + written}

    def chunk(self, index: int, text: str, new: Written, first: bool) -> dict[str, Any]:
        """A piece of an answer that is being written."""
        choice: dict[str, Any] = {"index": index, "finish_reason": None}
        if self.call.chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | {"content": text}
        else:
            choice["text"] = text
        return self._as_chunk([choice | self._of_tokens(new)])

    def last_chunk(self, index: int, text: str, new: Written, first: bool, generation: Generation) -> dict[str, Any]:
        """The end of an answer: what had not been sent yet, tool calls among it, and how it ended."""
        shown = show(generation, self.call)
        told = self.chunk(index, text, new, first)
        (choice,) = told["choices"]
        choice |= {"finish_reason": shown.finish_reason} | self._of_generation(generation, bool(shown.tool_calls))
        if shown.tool_calls:
            choice["delta"]["tool_calls"] = [{"index": i, **found} for i, found in enumerate(shown.tool_calls)]
        return told | self._prompt_ids(generation)

    def usage_chunk(self, generations: Sequence[Generation]) -> dict[str, Any]:
        return self._as_chunk([]) | {"usage": self.usage(generations)}

    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        shown = show(generation, self.call)
        choice: dict[str, Any] = {"index": index, "finish_reason": shown.finish_reason, "logprobs": None}
        choice |= {"message": shown.message} if self.call.chat else {"text": shown.text}
        new = Written(self.tokenizer)
        new.add(generation.token_ids, generation.log_probs, generation.full_log_probs)
        return choice | self._of_tokens(new) | self._of_generation(generation, bool(shown.tool_calls))

    def _of_tokens(self, new: Written) -> dict[str, Any]:
        """Log-probs as the API has them, and ids."""
        told: dict[str, Any] = {}
        if self.call.log_probs:
            told["logprobs"] = _chat_log_probs(new) if self.call.chat else _completion_log_probs(new)
        if self.call.token_ids:
            told |= {"token_ids": new.ids, "token_log_probs": new.log_probs, "token_full_log_probs": new.full_log_probs}
        return told

    def _of_generation(self, generation: Generation, has_calls: bool) -> dict[str, Any]:
        told: dict[str, Any] = {"stop_reason": generation.finish_reason}
        if self.call.call_wanted:
            told["tool_choice_met"] = has_calls
        return told | {"weight_versions": [list(run) for run in generation.versions]}

    def _prompt_ids(self, generation: Generation) -> dict[str, Any]:
        several = len(self.call.prompts) > 1
        return {"prompt_token_ids": generation.prompt_ids} if self.call.token_ids and not several else {}

    def _as_chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.call.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}


@dataclass
class Written:
    """Tokens that have been written and not been told of yet."""

    tokenizer: Any
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    full_log_probs: list[float] = field(default_factory=list)
    offset: int = 0
    """Characters of the answer before them."""
    pieces: Pieces | None = None

    def add(self, ids: Sequence[int], log_probs: Sequence[float], full_log_probs: Sequence[float]) -> None:
        self.ids += map(int, ids)
        self.log_probs += map(float, log_probs)
        self.full_log_probs += map(float, full_log_probs)

    def texts(self) -> list[str]:
        self.pieces = self.pieces or Pieces(self.tokenizer)
        return list(map(self.pieces.add, self.ids))


class Unfolding:
    """One choice of a stream: takes tokens as they come and then the generation; gives the chunks to send."""

    def __init__(self, wording: Wording, index: int, marks: Sequence[str] | None) -> None:
        self._wording, self._index = wording, index
        call = wording.call
        self._waits = wording.tokenizer is None or (bool(call.tools) and marks is None)
        self._showing = Showing(wording.tokenizer, call.stops, (marks or ()) if call.tools else ())
        self._new = Written(wording.tokenizer)
        self._told = 0
        self._first = True

    def add(self, ids: Sequence[int], log_probs: Sequence[float], full: Sequence[float]) -> dict[str, Any] | None:
        """The chunk for new tokens; None if none of them can be shown yet."""
        self._new.add(ids, log_probs, full)
        text = "" if self._waits else self._showing.add(ids)
        if not text:
            return None
        return self._sent(self._wording.chunk(self._index, text, self._new, self._first))

    def end(self, generation: Generation) -> dict[str, Any]:
        """The chunk with all that is left."""
        known = self._told + len(self._new.ids)
        self._new.add(generation.token_ids[known:], generation.log_probs[known:], generation.full_log_probs[known:])
        text = self._showing.rest(show(generation, self._wording.call).text)
        return self._sent(self._wording.last_chunk(self._index, text, self._new, self._first, generation))

    def _sent(self, chunk: dict[str, Any]) -> dict[str, Any]:
        self._told += len(self._new.ids)
        self._new = Written(self._wording.tokenizer, pieces=self._new.pieces, offset=self._new.offset)
        self._first = False
        return chunk


class Echoes:
    """What the policy wrote, by what its client was shown in its place.

    A client sends back what it was shown: without the stop text, with arguments of calls as text, with one call of several. The
    policy is given its own message again, so that it goes on from its own tokens.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Message] = {}

    def note(self, messages: Sequence[Message], shown: Message, written: Message) -> None:
        """After `messages`, as the client sent them, it was shown `shown` for what the policy wrote."""
        if written:
            self._known[_mark([*messages, shown])[-1]] = written

    def restore(self, messages: Sequence[Message]) -> list[Message]:
        """The messages, with the policy's own in the place of what was shown."""
        return [self._known.get(mark, message) for mark, message in zip(_mark(messages), messages)]


def _mark(messages: Sequence[Message]) -> list[bytes]:
    """Of each message a digest of it and all before it, the same for all ways to write it in JSON."""
    marks, so_far = [], b""
    for message in messages:
        calls = []
        for found in message.get("tool_calls") or ():
            arguments = found["function"]["arguments"]
            if isinstance(arguments, str):
                with contextlib.suppress(ValueError, RecursionError):
                    arguments = json.loads(arguments)
            calls.append([found["function"]["name"], arguments])
        told = [message["role"], message.get("content") or "", calls, message.get("tool_call_id")]
        text = json.dumps(told, sort_keys=True)
        so_far = hashlib.blake2b(so_far + text.encode(), digest_size=16).digest()
        marks.append(so_far)
    return marks


def _chat_log_probs(new: Written) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, log_prob in zip(new.texts(), new.log_probs)
    ]
    return {"content": content, "refusal": None}


def _completion_log_probs(new: Written) -> dict[str, Any]:
    texts, offsets = new.texts(), []
    for text in texts:
        offsets.append(new.offset)
        new.offset += len(text)
    return {"tokens": texts, "token_logprobs": new.log_probs, "top_logprobs": None, "text_offset": offsets}
