"""The OpenAI-style API as an ASGI application: who may call, what is read, how long it may take, and who is gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quadriga.agents.endpoint.answers import Echoes, Unfolding, Wording, show
from quadriga.agents.endpoint.requests import ApiError, Call, read_chat, read_completion, read_json
from quadriga.agents.policy import Generation, Policy
from quadriga.errors import ConfigError, DataError, QuadrigaError

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Caller:
    """Whoever has a key: the policy that answers, and what runs for them.

    `policy` may have more than `Policy` asks for: `streams` = True says that `generate` takes `on_tokens`, a function that is
    called with ids, log-probs and full log-probs of new tokens; `marks` are the texts with which its tool calls begin.
    """

    policy: Policy
    echoes: Echoes | None = None
    """None: messages are taken as they come."""
    may_set: frozenset[str] | None = None
    """Fields of `SamplingParams` that calls may set; others are left out, and the answer names them. None: all."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    over: BaseException | None = None
    """What the policy has ended a call with, if it was no `Exception`: its episode is over."""


class Backend(Protocol):
    """What stands behind the API."""

    models: list[dict[str, Any]]
    """What /v1/models says of each; `id` is its name."""
    takes_any_name: bool
    """A call may name any model, and gets the first."""
    tokenizer: Any
    """For the texts of tokens; None: there is none at hand."""

    def caller(self, key: str | None) -> Caller | None:
        """Who has this key; None: nobody. The time that it takes says nothing of the keys there are."""
        ...


@dataclass(frozen=True)
class Limits:
    """What a client may take."""

    body_bytes: int = 16 << 20
    body_s: float = 30.0
    """Seconds to send the body in."""
    call_s: float | None = 600.0
    """Seconds for a whole call, its stream included; None: as long as it takes."""


def create_app(
    backend: Backend, limits: Limits | None = None, routes: Iterable[Route] = (), hosts: Iterable[str] | None = None
) -> Starlette:
    """/v1/chat/completions, /v1/completions, /v1/models and /health.

    Args:
        routes: further ones.
        hosts: names under which it answers, and with that no page of another site that was opened in a browser; None: any.
    """
    limits = limits or Limits()

    async def list_models(request: Request) -> Response:
        _admit(backend, request.scope)
        return JSONResponse({"object": "list", "data": backend.models})

    async def one_model(request: Request) -> Response:
        _admit(backend, request.scope)
        return JSONResponse(_model_named(backend, request.path_params["name"], strict=True))

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    served = [
        Route("/v1/chat/completions", _Answering(backend, limits, chat=True), methods=["POST"]),
        Route("/v1/completions", _Answering(backend, limits, chat=False), methods=["POST"]),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", one_model),
        Route("/health", health),
        *routes,
    ]
    known = None if hosts is None else frozenset(hosts)

    async def on_http_error(request: Request, error: Any) -> Response:
        what = {404: "there is no such address; the API is under /v1/", 405: "this address takes another method"}
        return _refusal(
            ApiError(error.status_code, f"{what.get(error.status_code, error.detail)} ({request.url.path})")
        )

    async def on_api_error(request: Request, error: Any) -> Response:
        return _refusal(error)

    app = Starlette(routes=served, exception_handlers={404: on_http_error, 405: on_http_error, ApiError: on_api_error})
    app.add_middleware(_Door, hosts=known)
    return app


class _Door:
    """Lets nobody in who comes under a foreign name or from a foreign page: a browser must not lend its user's loopback to others."""

    def __init__(self, app: Any, hosts: frozenset[str] | None) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (problem := self._problem(scope)):
            await _refusal(problem)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, scope: Any) -> ApiError | None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if self._hosts is not None and _without_port(host) not in self._hosts:
            return ApiError(421, f"This server is not called {host!r}: use the address that it printed.")
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").partition("://")[2] != host:
            return ApiError(403, "Pages of other sites may not call this server.")
        return None


class _Answering:
    """One address of the API that generates."""

    def __init__(self, backend: Backend, limits: Limits, chat: bool) -> None:
        self._backend, self._limits, self._chat = backend, limits, chat

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        out = _Out(scope, receive, send)
        try:
            caller = _admit(self._backend, scope)
            out.body_unread = True
            body = read_json(await _read_body(scope, receive, self._limits))
            out.body_unread = False
            call = read_chat(body) if self._chat else read_completion(body)
            model = _model_named(self._backend, call.model)["id"]
            if caller.may_set is not None:
                call = call.without(call.sampling.keys() - caller.may_set)
            wording = Wording(call, model, self._backend.tokenizer)
            answer = _stream(call, caller, wording, out) if call.stream else _whole(call, caller, wording, out)
            task = asyncio.current_task()
            assert task is not None
            caller.tasks.add(task)
            try:
                async with asyncio.timeout(self._limits.call_s):
                    await _while_connected(answer, receive)
            finally:
                caller.tasks.discard(task)
        except asyncio.CancelledError:
            # By whoever ended the episode, or the server: the client hears of it, if it is still there.
            await out.fail(ApiError(503, "The call was ended: the server, or the episode, is at its end."))
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            cause = _cause(error)
            if not isinstance(cause, Exception):
                caller.over = cause
            await out.fail(_as_api_error(cause, self._limits))


class _Out:
    """What goes to the client: one JSON object, or events."""

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._begun = False
        self.body_unread = False

    async def json(self, value: Any) -> None:
        self._begun = True
        await JSONResponse(value)(self._scope, self._receive, self._send)

    async def event(self, value: Any) -> None:
        if not self._begun:
            self._begun = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        body = f"data: {text}\n\n".encode()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        await self.event("[DONE]")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: ApiError) -> None:
        with contextlib.suppress(OSError):
            if self._begun:  # the status is out already: an event tells it
                await self.event(error.body)
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            await _refusal(error, closes=self.body_unread)(self._scope, self._receive, self._send)


async def _whole(call: Call, caller: Caller, wording: Wording, out: _Out) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_generate(call, caller, index)) for index in range(call.n * len(call.prompts))]
    await out.json(wording.whole([task.result() for task in tasks]))


async def _stream(call: Call, caller: Caller, wording: Wording, out: _Out) -> None:
    """Events as tokens come. What is wrong with the call shows before the first, and so as an error with a status."""
    count = call.n * len(call.prompts)
    news: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
    generations: dict[int, Generation] = {}
    unfolding = [Unfolding(wording, index, getattr(caller.policy, "marks", None)) for index in range(count)]

    async def one(index: int) -> None:
        try:
            news.put_nowait((index, await _generate(call, caller, index, news)))
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            news.put_nowait((index, error))

    tasks = [asyncio.create_task(one(index)) for index in range(count)]
    try:
        while len(generations) < count:
            index, new = await news.get()
            if isinstance(new, BaseException):
                raise new
            if isinstance(new, Generation):
                generations[index] = new
                await out.event(unfolding[index].end(new))
            elif chunk := unfolding[index].add(*new):
                await out.event(chunk)
        ordered = [generations[index] for index in range(count)]
        if call.stream_usage:
            await out.event(wording.usage_chunk(ordered))
        await out.end()
    finally:
        await _cancel(tasks)


async def _generate(
    call: Call, caller: Caller, index: int, news: asyncio.Queue[tuple[int, Any]] | None = None
) -> Generation:
    """One answer: number `index` of the call."""
    which, choice = divmod(index, call.n)
    sampling = dict(call.sampling)
    if "seed" in sampling:
        sampling["seed"] += choice
    if news is not None and getattr(caller.policy, "streams", False):
        sampling["on_tokens"] = lambda *new: news.put_nowait((index, new))
    prompt = call.prompts[which]
    if not call.chat:
        return await caller.policy.generate(prompt, **sampling)
    restored = prompt if caller.echoes is None else caller.echoes.restore(prompt)
    generation = await caller.policy.generate(restored, tools=call.tools, **sampling)
    if caller.echoes is not None:
        caller.echoes.note(prompt, show(generation, call).message, generation.message)
    return generation


async def _while_connected(work: Coroutine[Any, Any, None], receive: Any) -> None:
    """Do `work`, but drop it as soon as the client is gone."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(work), asyncio.create_task(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """End these tasks, and wait until they have ended."""
    waiting = [task for task in tasks if not task.done()]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def _read_body(scope: Any, receive: Any, limits: Limits) -> bytes:
    """The whole body; of one that is too large, no more than the limit is read."""
    too_large = ApiError(
        413, f"The body is larger than {limits.body_bytes:,} bytes: send less.", code="request_too_large"
    )
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if length.isdigit() and int(length) > limits.body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "The client is gone.")
                body += message.get("body", b"")
                if len(body) > limits.body_bytes:
                    raise too_large
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {limits.body_s:g} s: send it faster.") from None


def _admit(backend: Backend, scope: Any) -> Caller:
    """Who calls. ApiError where the key is missing or wrong."""
    given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
    kind, _, key = given.partition(" ")
    caller = backend.caller(key.strip() if kind.lower() == "bearer" and key.strip() else None)
    if caller is None:
        what = "This API key is not known here" if given else "There is no API key"
        fix = "send the one you were given, as the header Authorization: Bearer …"
        raise ApiError(401, f"{what}: {fix}.", code="invalid_api_key")
    return caller


def _model_named(backend: Backend, name: str | None, strict: bool = False) -> dict[str, Any]:
    found = next((model for model in backend.models if model["id"] == name), None)
    if found is None and not strict and (name is None or backend.takes_any_name):
        found = backend.models[0]
    if found is None:
        names = ", ".join(model["id"] for model in backend.models)
        raise ApiError(404, f"There is no model {str(name)[:200]!r} here, only {names}.", "model", "model_not_found")
    return found


def _cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _as_api_error(error: BaseException, limits: Limits) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TimeoutError) and limits.call_s is not None:
        return ApiError(
            504, f"The call took longer than {limits.call_s:g} s and was ended: ask for less.", code="deadline"
        )
    if isinstance(error, DataError | ConfigError):
        return ApiError(400, f"{error.what}: {error.fix}." if error.fix else error.what)
    if isinstance(error, QuadrigaError):
        return ApiError(500, f"{error.what}: {error.fix}." if error.fix else error.what)
    if not isinstance(error, Exception):  # a policy whose episode is over says so by what nobody catches by chance
        return ApiError(400, f"The episode is over: {error}.", code="episode_over")
    log.error("a call has failed", exc_info=error)
    return ApiError(500, f"The server failed: {type(error).__name__}: {error}")


def _refusal(error: ApiError, closes: bool = False) -> Response:
    headers = {"connection": "close"} if closes else {}
    if error.status >= 500:
        headers["x-should-retry"] = "false"  # the `openai` client would send the same again
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.body, error.status, headers)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
