"""The API on a port: connections are bounded, silent ones give way, and the server lives in the event loop it was started in."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import hmac
import logging
import resource
import secrets
import socket
from collections.abc import Iterable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from quadriga.agents.endpoint.answers import Echoes
from quadriga.agents.endpoint.app import Caller, Limits, create_app
from quadriga.agents.policy import Policy
from quadriga.errors import ConfigError, WorkerError

MOST_CONNECTIONS = 4096
REQUEST_S = 15.0
"""Seconds in which a connection must send the head of a request; of one that is kept open, the next."""
LEAVE_S = 0.5
"""Seconds that a client which is turned away has to read why."""
STOP_S = 5.0
"""Seconds that calls have to end when the server stops."""
FREE = ("max_new_tokens", "min_new_tokens", "stop_token_ids", "stop_strings", "ignore_eos")
LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


class Endpoint:
    """The API on a port of 127.0.0.1, in the running event loop; every episode has a key of its own.

        async with Endpoint(tokenizer) as endpoint:
            key = endpoint.admit(policy)          # OpenAI(base_url=endpoint.base_url, api_key=key) now talks to `policy`
            ...
            endpoint.dismiss(key)                 # what still runs for it is ended

    Args:
        tokenizer: for the texts of single tokens, which `logprobs` and streams want.
        model: the name that answers give; a call may ask for any.
        limits: what a call may take.
        may_set: fields of `SamplingParams` that calls may set. The distribution is the run's, since training computes log-probs
            of that one: what a client says of it has no effect, and the answer's field `ignored` names it.
    """

    takes_any_name = True

    def __init__(
        self, tokenizer: Any = None, model: str = "policy", limits: Limits | None = None, may_set: Iterable[str] = FREE
    ) -> None:
        self.tokenizer, self._may_set = tokenizer, frozenset(may_set)
        self.models = [{"id": model, "object": "model", "created": 0, "owned_by": "quadriga"}]
        self._limits = limits
        self._secret = secrets.token_bytes(32)
        self._callers: dict[bytes, Caller] = {}
        self._server: LoopServer | None = None

    def admit(self, policy: Policy) -> str:
        """A new key: its calls go to `policy`."""
        key = secrets.token_urlsafe(24)
        self._callers[self._digest(key)] = Caller(policy, Echoes(), self._may_set)
        return key

    def dismiss(self, key: str) -> None:
        """The key is no more; calls that run for it are ended."""
        caller = self._callers.pop(self._digest(key), None)
        for task in list(caller.tasks) if caller else ():
            task.cancel()

    def caller(self, key: str | None) -> Caller | None:
        # Keys are found by a keyed digest of them: how long that takes says nothing about the keys themselves.
        return self._callers.get(self._digest(key)) if key else None

    @property
    def base_url(self) -> str:
        if self._server is None:
            raise WorkerError("the endpoint is not running", "start it first")
        return f"http://127.0.0.1:{self._server.port}/v1"

    def over(self, key: str) -> BaseException | None:
        """What the policy ended a call of this key with, if it said that its episode is over."""
        caller = self.caller(key)
        return None if caller is None else caller.over

    @property
    def runs(self) -> bool:
        return self._server is not None and self._server.runs

    def open(self) -> None:
        """Begin to serve: from now on clients may connect, and are answered once the event loop has its turn."""
        self._server = LoopServer(create_app(self, self._limits), listen("127.0.0.1", 0))
        self._server.open()

    async def start(self) -> None:
        self.open()
        assert self._server is not None
        await self._server.started()

    async def stop(self) -> None:
        """Ends every call, and leaves no task and no socket behind."""
        for caller in self._callers.values():
            for task in list(caller.tasks):
                task.cancel()
        self._callers.clear()
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop()

    async def __aenter__(self) -> Endpoint:
        await self.start()
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.stop()

    def _digest(self, key: str) -> bytes:
        return hmac.new(self._secret, key.encode("utf-8", "surrogateescape"), hashlib.sha256).digest()


class LoopServer:
    """An application on a listening socket, as a task of the running event loop."""

    def __init__(self, app: Starlette, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        config = uvicorn.Config(
            app,
            http=bounded_protocol(most_connections()),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(REQUEST_S),
            timeout_graceful_shutdown=int(STOP_S),
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def runs(self) -> bool:
        return self._task is not None and not self._task.done()

    def open(self) -> None:
        # A context of its own: whoever happened to need the server first has no part in what it does for others.
        serve = self._server.serve(sockets=[self._listener])
        self._task = asyncio.get_running_loop().create_task(serve, context=contextvars.Context())

    async def start(self) -> None:
        self.open()
        await self.started()

    async def started(self) -> None:
        assert self._task is not None
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise WorkerError("the server of the endpoint ended at once", "see what it printed")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Answer what runs within `STOP_S`, then end it."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task

    async def wait(self) -> None:
        """Until it ends, which it does when `ask_to_stop` was called."""
        assert self._task is not None
        await self._task

    def ask_to_stop(self) -> None:
        self._server.force_exit = self._server.should_exit  # asked twice: at once
        self._server.should_exit = True


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process that the server is a part of."""
        yield


def bounded_protocol(most: int) -> type[H11Protocol]:
    """HTTP connections of which there are at most `most`.

    A connection that waits for its first request makes room for a new one, the oldest first; so thousands that only open
    connections keep nobody out. Where all are at work, a new one is told to come again.
    """
    silent: dict[H11Protocol, asyncio.TimerHandle] = {}
    leaving: set[Any] = set()

    class Bounded(H11Protocol):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.logger = _QUIET

        def connection_made(self, transport: Any) -> None:
            if len(self.connections) >= most:
                if not silent:
                    self.turn_away(transport)
                    return
                oldest = next(iter(silent))
                oldest.connections.discard(oldest)
                oldest.hang_up()  # type: ignore[attr-defined]
            super().connection_made(transport)
            silent[self] = self.loop.call_later(REQUEST_S, self.hang_up)

        def turn_away(self, transport: Any) -> None:
            # Closed at once, with its request unread, the system would tear the connection down before the answer is read.
            transport.write(_BUSY)
            leaving.add(transport)
            self.loop.call_later(LEAVE_S, leaving.discard, transport)
            self.loop.call_later(LEAVE_S if len(leaving) < most // 8 + 8 else 0, transport.abort)

        def hang_up(self) -> None:
            self.heard()
            self.transport.abort()

        def heard(self) -> None:
            if timer := silent.pop(self, None):
                timer.cancel()

        def data_received(self, data: bytes) -> None:
            if self.transport is None:  # turned away, and still sending
                return
            super().data_received(data)
            is_busy = self.cycle is not None and not self.cycle.response_complete
            if is_busy:
                self.heard()
            elif self not in silent and not self.transport.is_closing():
                silent[self] = self.loop.call_later(REQUEST_S, self.hang_up)  # the head of a next request drips in

        def connection_lost(self, exc: Exception | None) -> None:
            self.heard()
            if self.transport is not None:
                super().connection_lost(exc)

    return Bounded


_QUIET = logging.getLogger("quadriga.agents.endpoint.http")
_QUIET.setLevel(logging.ERROR)  # a client that sends nonsense must not fill the logs
_BUSY_BODY = (
    b'{"error": {"message": "Too many connections: come again.", "type": "server_error", "param": null, "code": null}}'
)
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BUSY_BODY), _BUSY_BODY)
)


def most_connections() -> int:
    """`MOST_CONNECTIONS`, or as many as the process may open files for, a fifth of them left for the rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS * 5 // 4
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, soft * 4 // 5)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; ConfigError where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio knows that it is TCP and sends every piece at once, instead of 40 ms later.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)  # whoever comes before the server is up, or in a crowd, waits and is not turned away
        return listener
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}", "choose another host or port") from None
