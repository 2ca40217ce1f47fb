"""A policy that many clients share: one generation service in front of one engine, reached from an event loop."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from quadriga.agents.conversation import ChatTemplate
from quadriga.agents.endpoint.app import Caller
from quadriga.agents.policy import Generation, Message
from quadriga.data.chat import ChatEncoder
from quadriga.errors import DataError, WorkerError
from quadriga.rollout.interface import Request, SamplingParams
from quadriga.rollout.service import Delivery, GenerationService, Sample

OnTokens = Callable[[list[int], list[float], list[float]], None]
"""Called with ids, log-probs and full log-probs of the tokens that are new."""

_MARKS = {
    "hermes": ("<tool_call>",),
    "qwen": ("<tool_call>",),
    "qwen3_coder": ("<tool_call>",),
    "glm": ("<tool_call>",),
    "seed": ("<seed:tool_call>",),
    "minimax": ("<minimax:tool_call>",),
}
"""With which text a tool call begins, in the formats in which that is plain text. In others, streams wait for the end."""
_LONG_TEXT = 50_000
"""Characters from which on rendering and tokenising is done beside the event loop."""


class _Waiting(NamedTuple):
    future: asyncio.Future[Sample]
    on_tokens: OnTokens | None


class LiveService:
    """A generation service for coroutines of one event loop; nobody else takes from it.

    Attributes:
        failure: what has broken the service, if it is broken.
        on_failure: called in the loop when that happens.
    """

    def __init__(self, service: GenerationService) -> None:
        self.service = service
        self.on_failure: Callable[[], None] = lambda: None
        self.failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, _Waiting] = {}
        self._numbers = itertools.count()
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="deliveries", daemon=True)
        self._thread.start()

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, deadline_s: float, on_tokens: OnTokens | None = None
    ) -> Sample:
        """One sample. If the caller is cancelled, the engine drops it.

        Raises:
            DataError or ConfigError: it can never run.
        """
        if self.failure is not None:
            raise WorkerError(f"the engine has failed: {self.failure}", "start the server anew")
        request = Request(str(next(self._numbers)), prompt_ids, params, deadline_s=deadline_s)
        self.service.engine.check(request)
        future: asyncio.Future[Sample] = self._loop.create_future()
        self._waiting[request.request_id] = _Waiting(future, on_tokens)
        self.service.submit([request], watched=on_tokens is not None)
        try:
            return await future
        except asyncio.CancelledError:
            self.service.abort([request.request_id])
            raise
        finally:
            self._waiting.pop(request.request_id, None)

    def close(self) -> None:
        """Stop the service; who still waits is told."""
        self._closed = True
        self.service.close()
        self._thread.join(5)
        self._fail(WorkerError("the server is at its end", "start it anew"))

    def _listen(self) -> None:
        while not self._closed:
            try:
                delivery = self.service.take()
            except BaseException as error:
                self._in_loop(self._break, error)
                return
            if delivery.samples or delivery.progress:
                self._in_loop(self._give_out, delivery)

    def _in_loop(self, function: Callable[[Any], None], argument: Any) -> None:
        if not self._closed:
            self._loop.call_soon_threadsafe(function, argument)

    def _give_out(self, delivery: Delivery) -> None:
        for part in delivery.progress:
            waiting = self._waiting.get(part.request_id)
            if waiting is not None and waiting.on_tokens is not None:
                waiting.on_tokens(part.token_ids, part.log_probs, part.full_log_probs)
        for sample in delivery.samples:
            waiting = self._waiting.get(sample.request_id)
            if waiting is not None and not waiting.future.done():
                waiting.future.set_result(sample)

    def _break(self, error: BaseException) -> None:
        self.failure = error
        self._fail(WorkerError(f"the engine has failed: {error}", "start the server anew"))
        self.on_failure()

    def _fail(self, error: Exception) -> None:
        for waiting in self._waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(error)


class ServedPolicy:
    """A model as any number of clients ask it; see `quadriga.agents.policy.Policy`.

    It keeps nothing between two calls: a conversation is rendered as the client sends it.

    Args:
        encoder: its tokenizer is not the engine's, which reads tokens in another thread.
        end_token_ids: tokens that end an answer.
        defaults: what holds where a client says nothing; `max_new_tokens` gives way where the context ends before.
        context_tokens: of the longest prompt and answer together.
        deadline_s: seconds after which an answer is given out as it is.
    """

    streams = True

    def __init__(
        self,
        live: LiveService,
        encoder: ChatEncoder,
        end_token_ids: Sequence[int],
        *,
        defaults: SamplingParams,
        context_tokens: int,
        tool_format: str = "hermes",
        deadline_s: float = 600.0,
    ) -> None:
        self.live, self.encoder, self.defaults = live, encoder, defaults
        self.context_tokens, self.deadline_s = context_tokens, deadline_s
        has_template = encoder.chat_template is not None
        self.template = (
            ChatTemplate(encoder, end_token_ids=end_token_ids, tool_format=tool_format) if has_template else None
        )
        self.marks = _MARKS.get(tool_format)
        self._encoding = threading.Lock()

    async def generate(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        on_tokens: OnTokens | None = None,
        **sampling: Any,
    ) -> Generation:
        """As `Policy.generate`; `on_tokens` hears of the answer while it is written, but not of its last tokens."""
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)
        ids: list[Any] = await self._ids_of(prompt, tools) if is_chat or isinstance(prompt, str) else list(prompt)
        if is_chat and self.template is not None:
            ends = (*self.template.end_token_ids, *sampling.get("stop_token_ids", ()))
            sampling = {**sampling, "stop_token_ids": tuple(dict.fromkeys(ends))}
        params = self._params(len(ids), sampling)
        sample = await self.live.sample(ids, params, self.deadline_s, on_tokens)
        return self._generation(prompt if is_chat else None, tools, ids, sample)

    async def _ids_of(self, prompt: Any, tools: Sequence[dict[str, Any]] | None) -> list[int]:
        size = len(prompt) if isinstance(prompt, str) else sum(len(message.get("content") or "") for message in prompt)
        if size < _LONG_TEXT:
            return self._encode(prompt, tools)
        return await asyncio.to_thread(self._encode, prompt, tools)

    def _encode(self, prompt: Any, tools: Sequence[dict[str, Any]] | None) -> list[int]:
        with self._encoding:
            if isinstance(prompt, str):
                return self.encoder.encode_prompts([prompt], lambda _: "the prompt")[0]
            if self.template is None:
                raise DataError(
                    "this model has no chat template, so it cannot be talked to in messages",
                    "use /v1/completions, or start the server with --chat-template",
                )
            return self.template.encode(self.template.render(prompt, tools))

    def _params(self, prompt: int, sampling: dict[str, Any]) -> SamplingParams:
        room = self.context_tokens - prompt
        wanted = sampling.get("max_new_tokens")
        if room < 1 or (wanted is not None and wanted > room):
            asked = "" if wanted is None else f" and max_tokens={wanted}"
            raise DataError(
                f"a prompt of {prompt} tokens{asked} does not fit into the context of {self.context_tokens} tokens",
                f"shorten the prompt, or ask for at most {room} tokens" if room > 0 else "shorten the prompt",
            )
        given = {field.name: getattr(self.defaults, field.name) for field in fields(SamplingParams)}
        given |= {"seed": secrets.randbits(62)} | sampling
        if wanted is None:
            given["max_new_tokens"] = max(min(self.defaults.max_new_tokens, room), given["min_new_tokens"])
        return SamplingParams(**given)

    def _generation(
        self, messages: Any, tools: Sequence[dict[str, Any]] | None, prompt_ids: list[int], sample: Sample
    ) -> Generation:
        token_ids = sample.token_ids.tolist()
        told: dict[str, Any] = {
            "prompt_ids": prompt_ids,
            "token_ids": token_ids,
            "log_probs": sample.log_probs.tolist(),
            "full_log_probs": sample.full_log_probs.tolist(),
            "finish_reason": sample.finish_reason,
            "versions": sample.versions,
        }
        if messages is None or self.template is None:
            text = self.encoder.tokenizer.decode(token_ids, skip_special_tokens=True)
            return Generation(text=text, message={"role": "assistant", "content": text}, **told)
        calls = sum(len(message.get("tool_calls") or ()) for message in messages)
        answer = self.template.read_answer(token_ids, tools, calls)
        return Generation(text=answer.text, tool_calls=answer.tool_calls, message=answer.message, **told)


class OneModel:
    """What stands behind the API where one model is served, to whoever has the key, or to everybody if there is none."""

    takes_any_name = False

    def __init__(self, policy: ServedPolicy, name: str, created: int, key: str | None) -> None:
        self.tokenizer = policy.encoder.tokenizer
        self.models = [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "quadriga",
                "max_model_len": policy.context_tokens,
                "has_chat_template": policy.template is not None,
            }
        ]
        self._caller = Caller(policy)
        self._key = None if key is None else _digest(key)

    def caller(self, key: str | None) -> Caller | None:
        if self._key is None or (key is not None and hmac.compare_digest(_digest(key), self._key)):
            return self._caller
        return None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
