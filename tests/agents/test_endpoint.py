"""The endpoint of a training run: every episode has a key, and whatever a client does, the others go on."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import openai
import pytest
from calling_model import ANSWER, CALL, bytes_tokenizer
from live_endpoint import run, served_policy, until

from quadriga.agents.endpoint import Endpoint, Limits
from quadriga.agents.endpoint.server import LoopServer, bounded_protocol
from quadriga.agents.policy import Generation, ToolCall

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
ASK: list[Any] = [{"role": "user", "content": "2+3?"}]


def client(endpoint: Endpoint, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0)


async def raw(endpoint: Endpoint, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = int(endpoint.base_url.rsplit(":", 1)[1].split("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await writer.drain()
    return reader, writer


def post(key: str, body: bytes, length: int | None = None) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


class Told:
    """A policy that answers with what it was given beforehand, and keeps what it was asked."""

    def __init__(self, *answers: Generation | BaseException) -> None:
        self.answers, self.asked = list(answers), list[Any]()

    async def generate(self, prompt: Any, *, tools: Any = None, **sampling: Any) -> Generation:
        self.asked.append((prompt, tools, sampling))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def generation(text: str, **more: Any) -> Generation:
    ids = list(text.encode())
    told = {"finish_reason": "stop", "message": {"role": "assistant", "content": text}, "log_probs": [-0.5] * len(ids)}
    return Generation(
        **{"text": text, "prompt_ids": [1, 2], "token_ids": ids, "full_log_probs": [-0.25] * len(ids)} | told | more
    )


def test_a_tool_is_called_and_its_result_answered_by_the_openai_client() -> None:
    async def talk() -> None:
        async with (
            served_policy() as policy,
            Endpoint(policy.encoder.tokenizer) as endpoint,
            client(endpoint, endpoint.admit(policy)) as one,
        ):
            first = await one.chat.completions.create(model="gpt-x", messages=ASK, tools=[ADD])
            choice = first.choices[0]
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            (call,) = choice.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
            messages = [*ASK, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
            second = await one.chat.completions.create(model="gpt-x", messages=messages, tools=[ADD])
            assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", ANSWER)
            tokenizer = policy.encoder.tokenizer
            assert tokenizer.decode(choice.token_ids) == CALL + "<|end|>"
            assert tokenizer.decode(second.prompt_token_ids).endswith("<|start|>tool\n5<|told|><|answer|>")
            assert second.usage.prompt_tokens == len(second.prompt_token_ids)
            assert second.usage.completion_tokens == len(second.choices[0].token_ids)
            assert second.choices[0].weight_versions == [[0, len(second.choices[0].token_ids)]]

    run(talk())


def test_a_stream_says_the_same_as_the_whole_answer_and_comes_in_pieces() -> None:
    async def talk() -> None:
        async with (
            served_policy(temperature=1.5) as policy,
            Endpoint(policy.encoder.tokenizer) as endpoint,
            client(endpoint, endpoint.admit(policy)) as one,
        ):
            # The bytes of this model are often no characters, and never end by themselves.
            asked: dict[str, Any] = {"model": "m", "prompt": "Zz" * 30, "max_tokens": 400, "logprobs": 1}
            asked["extra_body"] = {"ignore_eos": True}
            endpoint._callers[next(iter(endpoint._callers))].may_set = None
            whole = await one.completions.create(**asked, seed=7, temperature=3)
            pieces, ids, log_probs, words = [], [], [], []
            options = {"include_usage": True}
            async for event in await one.completions.create(
                **asked, seed=7, temperature=3, stream=True, stream_options=options
            ):
                if not event.choices:
                    assert event.usage.completion_tokens == 400
                    continue
                (choice,) = event.choices
                pieces.append(choice.text)
                ids += choice.token_ids
                log_probs += choice.token_log_probs
                words += choice.logprobs.tokens
            assert len(pieces) > 2, "it came while it was written"
            assert "".join(pieces) == whole.choices[0].text
            assert ids == whole.choices[0].token_ids
            assert log_probs == whole.choices[0].token_log_probs == whole.choices[0].logprobs.token_logprobs
            assert words == whole.choices[0].logprobs.tokens
            assert whole.choices[0].finish_reason == "length"

    run(talk())


def test_a_streamed_tool_call_is_a_tool_call_and_never_text() -> None:
    async def talk() -> None:
        async with (
            served_policy() as policy,
            Endpoint(policy.encoder.tokenizer) as endpoint,
            client(endpoint, endpoint.admit(policy)) as one,
        ):
            stream = await one.chat.completions.create(model="m", messages=ASK, tools=[ADD], stream=True)
            events = [event async for event in stream]
            assert "".join(event.choices[0].delta.content or "" for event in events) == ""
            (call,) = events[-1].choices[0].delta.tool_calls
            assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
            assert events[-1].choices[0].finish_reason == "tool_calls"
            assert events[0].choices[0].delta.role == "assistant"

    run(talk())


def test_an_episode_is_reached_by_its_own_key_alone() -> None:
    async def talk() -> None:
        async with Endpoint() as endpoint:
            mine, yours = Told(generation("mine")), Told(generation("yours"))
            my_key, your_key = endpoint.admit(mine), endpoint.admit(yours)
            async with client(endpoint, your_key) as two, client(endpoint, my_key[:-1] + "~") as nobody:
                answer = await two.chat.completions.create(model="m", messages=ASK)
                assert answer.choices[0].message.content == "yours"
                with pytest.raises(openai.AuthenticationError, match="not known here"):
                    await nobody.chat.completions.create(model="m", messages=ASK)
                with pytest.raises(openai.AuthenticationError):
                    await nobody.models.list()
                endpoint.dismiss(your_key)
                with pytest.raises(openai.AuthenticationError):
                    await two.chat.completions.create(model="m", messages=ASK)
            assert not mine.asked
            reader, writer = await raw(endpoint, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 401 " in await reader.readline()
            writer.close()

    run(talk())


def test_what_the_client_was_shown_goes_back_to_the_policy_as_what_it_wrote() -> None:
    """Stop texts, several calls of which one was wanted, arguments as text: the policy gets its own message again."""
    call = ToolCall("add", {"b": 3, "a": 2}, "…", "call00000")
    written = {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"b": 3, "a": 2}}}
        ]
        * 2,
    }

    async def talk() -> None:
        policy = Told(
            generation("one END two", finish_reason="stop_string"),
            generation("…", tool_calls=(call, call), message=written),
            generation("done"),
        )
        async with Endpoint() as endpoint, client(endpoint, endpoint.admit(policy)) as one:
            first = await one.chat.completions.create(model="m", messages=ASK, stop=["END"])
            assert (first.choices[0].message.content, first.choices[0].finish_reason) == ("one ", "stop")
            messages = [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "one "}]}, *ASK]
            second = await one.chat.completions.create(
                model="m", messages=messages, tools=[ADD], parallel_tool_calls=False, tool_choice="required"
            )
            shown = second.choices[0].message
            assert len(shown.tool_calls) == 1
            assert second.choices[0].tool_choice_met is True
            messages += [shown, {"role": "tool", "tool_call_id": "call00000", "content": "5"}]
            await one.chat.completions.create(model="m", messages=messages, tools=[ADD])
        asked = policy.asked[2][0]
        assert asked[1] == {"role": "assistant", "content": "one END two"}
        assert asked[3] == written
        assert asked[4] == {"role": "tool", "content": "5", "tool_call_id": "call00000"}

    run(talk())


def test_the_distribution_is_the_runs_and_the_answer_says_what_was_left_out() -> None:
    async def talk() -> None:
        policy = Told(generation("a"), generation("b"), generation("c"))
        async with Endpoint() as endpoint, client(endpoint, endpoint.admit(policy)) as one:
            answer = await one.chat.completions.create(
                model="m", messages=ASK, temperature=0.2, max_tokens=9, seed=3, n=2
            )
            assert answer.ignored == ["seed", "temperature"]
            assert [choice.message.content for choice in answer.choices] == ["a", "b"]
            answer = await one.chat.completions.create(model="m", messages=ASK)
            assert "ignored" not in answer.model_extra
        assert policy.asked[0][2] == {"max_new_tokens": 9}

    run(talk())


def test_a_call_that_cannot_be_read_is_text_and_the_end_of_an_episode_is_named() -> None:
    class Over(BaseException): ...

    async def talk() -> None:
        bad = ToolCall("add", None, "{", "call00000", error="it is no JSON")
        policy = Told(
            generation("<tool_call>{</tool_call>", tool_calls=(bad,)), Over("turns"), Over("turns"), ValueError("hm")
        )
        async with Endpoint(bytes_tokenizer()) as endpoint, client(endpoint, endpoint.admit(policy)) as one:
            answer = await one.chat.completions.create(model="m", messages=ASK, tools=[ADD])
            assert answer.choices[0].message.content == "<tool_call>{</tool_call>"
            assert answer.choices[0].message.tool_calls is None
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError, match="turns") as caught:
                    await one.chat.completions.create(model="m", messages=ASK, stream=stream)
                assert caught.value.code == "episode_over"
            with pytest.raises(openai.InternalServerError, match="ValueError: hm"):
                await one.chat.completions.create(model="m", messages=ASK)

    run(talk())


def test_a_client_that_goes_away_takes_its_request_out_of_the_engine() -> None:
    async def talk() -> None:
        async with served_policy() as policy, Endpoint(policy.encoder.tokenizer) as endpoint:
            service = policy.live.service
            key = endpoint.admit(policy)
            for stream in (True, False):
                body = json.dumps({"messages": ASK, "max_tokens": 4000, "ignore_eos": True, "stream": stream}).encode()
                reader, writer = await raw(endpoint, post(key, body))
                if stream:
                    assert b" 200 " in await reader.readline()
                    await reader.readuntil(b"data: ")
                await until(lambda: service.engine.scheduler.running)
                writer.transport.abort()
                await until(lambda: service.engine.idle, 10)
                await until(lambda: not policy.live._waiting and not service._watched)

    run(talk())


def test_the_end_of_an_episode_ends_its_calls() -> None:
    async def talk() -> None:
        async with served_policy() as policy, Endpoint(policy.encoder.tokenizer) as endpoint:
            key = endpoint.admit(policy)
            async with client(endpoint, key) as one:
                call = asyncio.create_task(
                    one.chat.completions.create(
                        model="m", messages=ASK, max_tokens=8000, extra_body={"ignore_eos": True}, timeout=30
                    )
                )
                await until(lambda: policy.live.service.engine.scheduler.running)
                endpoint.dismiss(key)
                with pytest.raises(openai.InternalServerError, match="at its end"):
                    await call
            await until(lambda: policy.live.service.engine.idle)

    run(talk())


def test_a_call_has_a_deadline() -> None:
    class Slow:
        ended = False

        async def generate(self, prompt: Any, **_: Any) -> Generation:
            try:
                await asyncio.sleep(1000)
            finally:
                self.ended = True
            raise AssertionError

    async def talk() -> None:
        slow = Slow()
        async with Endpoint(limits=Limits(call_s=0.2)) as endpoint, client(endpoint, endpoint.admit(slow)) as one:
            with pytest.raises(openai.InternalServerError, match=r"longer than 0.2 s"):
                await one.chat.completions.create(model="m", messages=ASK)
        assert slow.ended

    run(talk())


def test_without_a_deadline_a_call_takes_as_long_as_the_policy() -> None:
    """As in training, where engines may be at other weights for steps on end; what the policy raises is told all the same."""

    class Slow:
        async def generate(self, prompt: Any, **_: Any) -> Generation:
            await asyncio.sleep(0.3)
            raise TimeoutError("its own")

    async def talk() -> None:
        endpoint = Endpoint(limits=Limits(call_s=None))
        async with endpoint, client(endpoint, endpoint.admit(Slow())) as one:
            with pytest.raises(openai.InternalServerError, match="its own"):
                await one.chat.completions.create(model="m", messages=ASK)

    run(talk())


def test_a_body_of_100_mb_is_refused_unread() -> None:
    async def talk() -> None:
        policy = Told(generation("still here"))
        async with Endpoint(limits=Limits(body_s=0.3)) as endpoint:
            key = endpoint.admit(policy)
            reader, writer = await raw(endpoint, post(key, b"{", length=100 << 20))
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b"16,777,216 bytes" in answer
            writer.close()
            # Without a length, it is counted while it comes.
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nTransfer-Encoding: chunked\r\n\r\n"
            reader, writer = await raw(endpoint, head.encode())
            sent = 0
            try:
                while sent < 100 << 20:
                    writer.write(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
                    await writer.drain()
                    sent += 1 << 20
            except ConnectionError:
                pass
            assert sent < 64 << 20, "it was not read to its end"
            writer.close()
            # One that does not come is not waited for.
            reader, writer = await raw(endpoint, post(key, b"{", length=100))
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            writer.close()
            async with client(endpoint, key) as one:
                answer = await one.chat.completions.create(model="m", messages=ASK)
                assert answer.choices[0].message.content == "still here"

    run(talk())


def test_five_thousand_silent_connections_keep_nobody_out() -> None:
    async def talk() -> None:
        policy = Told(*[generation("here")] * 20)
        async with Endpoint() as endpoint:
            key = endpoint.admit(policy)
            # Its own limit is lower than this machine's, so that one process can hold both ends.
            endpoint._server._server.config.http_protocol_class = bounded_protocol(300)
            port = endpoint._server.port
            silent = []
            async with client(endpoint, key) as one:
                for number in range(5000):
                    connection = socket.create_connection(("127.0.0.1", port), 5)
                    connection.setblocking(False)
                    silent.append(connection)
                    if len(silent) > 600:
                        silent.pop(0).close()
                    if number % 20 == 0:
                        await asyncio.sleep(0)
                    if number % 500 == 499:
                        answer = await one.chat.completions.create(model="m", messages=ASK, timeout=5)
                        assert answer.choices[0].message.content == "here"
                assert len(endpoint._server._server.server_state.connections) <= 300
            for connection in silent:
                connection.close()

    run(talk())


def test_where_all_connections_are_at_work_one_more_is_told_to_come_again() -> None:
    class Waiting:
        def __init__(self) -> None:
            self.go = asyncio.Event()

        async def generate(self, prompt: Any, **_: Any) -> Generation:
            await self.go.wait()
            return generation("now")

    async def talk() -> None:
        policy = Waiting()
        async with Endpoint() as endpoint:
            endpoint._server._server.config.http_protocol_class = bounded_protocol(3)
            key = endpoint.admit(policy)
            async with client(endpoint, key) as one, client(endpoint, key) as late:
                calls = [asyncio.create_task(one.chat.completions.create(model="m", messages=ASK)) for _ in range(3)]
                caller = endpoint.caller(key)
                await until(lambda: len(caller.tasks) == 3)
                with pytest.raises(openai.InternalServerError, match="come again"):
                    await late.chat.completions.create(model="m", messages=ASK)
                policy.go.set()
                assert [(await call).choices[0].message.content for call in calls] == ["now"] * 3

    run(talk())


BAD: list[tuple[Any, str]] = [
    (b"{", "not JSON"),
    (b"[]", "not an object"),
    (b"\xff\xfe", "not UTF-8"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "lone surrogate"),
    (b'{"temperature": NaN, "messages": []}', "NaN"),
    (b"[" * 200_000, "nested too deeply"),
    ({}, "messages is missing"),
    ({"messages": []}, "at least one message"),
    ({"messages": "hi"}, "not a list"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "text alone"),
    ({"messages": ASK, "temperature": "hot"}, "temperature is a string"),
    ({"messages": ASK, "max_tokens": True}, "not a whole number"),
    ({"messages": ASK, "max_tokens": 0}, "at least one token"),
    ({"messages": ASK, "n": 0}, "n=0"),
    ({"messages": ASK, "n": 10**9}, "n=1000000000"),
    ({"messages": ASK, "seed": 10**400}, "63 bits"),
    ({"messages": ASK, "temperature": 10**400}, "not a number"),
    ({"messages": ASK, "temprature": 1}, "did you mean temperature"),
    ({"messages": ASK, "top_logprobs": 5, "logprobs": True}, "top_logprobs must be 0"),
    ({"messages": ASK, "response_format": {"type": "json_object"}}, "not supported"),
    ({"messages": ASK, "presence_penalty": 0.5}, "not supported"),
    ({"messages": ASK, "stop": [""]}, "at least one character"),
    ({"messages": ASK, "tools": [{"name": "add"}]}, "tools[0] is no tool"),
    ({"messages": ASK, "tools": [ADD], "tool_choice": "sub"}, "given: add"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}, "tool_calls[0]"),
]


@pytest.mark.parametrize(("body", "told"), BAD, ids=[told for _, told in BAD])
def test_a_request_that_is_wrong_is_told_where(body: Any, told: str) -> None:
    async def talk() -> None:
        async with Endpoint() as endpoint:
            sent = body if isinstance(body, bytes) else json.dumps(body).encode()
            reader, writer = await raw(endpoint, post(endpoint.admit(Told()), sent))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 "), head
            length = int(
                next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")).split(b":")[1]
            )
            error = json.loads(await reader.readexactly(length))["error"]
            assert told in error["message"]
            assert error["type"] == "invalid_request_error"
            writer.close()

    run(talk())


def test_pages_of_other_sites_may_not_call() -> None:
    async def talk() -> None:
        async with Endpoint() as endpoint:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {endpoint.admit(Told())}\r\n"
            reader, writer = await raw(
                endpoint, f"{head}Origin: http://evil.example\r\nContent-Length: 0\r\n\r\n".encode()
            )
            assert b" 403 " in await reader.readline()
            writer.close()

    run(talk())


def test_addresses_that_do_not_exist_and_nonsense_are_answered() -> None:
    async def talk() -> None:
        async with Endpoint() as endpoint:
            for request, status in (
                (b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n", b" 404 "),
                (b"GET /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n", b" 405 "),
                (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b" 400 "),
                (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b" 200 "),
            ):
                reader, writer = await raw(endpoint, request)
                assert status in await reader.readline()
                writer.close()

    run(talk())


def test_the_endpoint_stops_with_a_client_connected_and_a_call_under_way() -> None:
    async def talk() -> None:
        async with served_policy() as policy:
            endpoint = Endpoint(policy.encoder.tokenizer)
            await endpoint.start()
            body = json.dumps({"messages": ASK, "max_tokens": 8000, "ignore_eos": True, "stream": True}).encode()
            reader, writer = await raw(endpoint, post(endpoint.admit(policy), body))
            await reader.readuntil(b"data: ")
            address = endpoint.base_url
            async with asyncio.timeout(5):
                await endpoint.stop()
            assert b"at its end" in await reader.read()
            writer.close()
            await until(lambda: policy.live.service.engine.idle)
            with pytest.raises(openai.APIConnectionError):
                async with openai.AsyncOpenAI(base_url=address, api_key="x", max_retries=0) as one:
                    await one.models.list()

    run(talk())


def test_loop_server_leaves_signals_alone() -> None:
    import signal

    async def talk() -> None:
        before = signal.getsignal(signal.SIGINT)
        async with Endpoint() as endpoint:
            assert isinstance(endpoint._server, LoopServer)
            assert signal.getsignal(signal.SIGINT) is before

    run(talk())
