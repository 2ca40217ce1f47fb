"""`quadriga serve`: any OpenAI client, many at once, a key, a page, and an end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from calling_model import ANSWER, CALL, calling_model
from test_endpoint import ADD, ASK

from quadriga.commands.serve import main
from quadriga.errors import CheckpointError, ConfigError, DataError


class Server:
    """A running command."""

    def __init__(self, process: subprocess.Popen[str], told: str) -> None:
        self.process, self.told = process, told
        self.url = re.search(r"OPENAI_BASE_URL=(\S+)", told)[1]
        self.key = re.search(r"OPENAI_API_KEY=(\S+)", told)[1]

    def client(self, key: str | None = None) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key or self.key, max_retries=0, timeout=60)


@contextmanager
def serving(model: str | Path, *arguments: str, **environment: str) -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, "-m", "quadriga", "serve", str(model), "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    told = ""
    try:
        for line in process.stdout:  # type: ignore[union-attr]
            told += line
            if "OPENAI_BASE_URL" in line:
                break
        else:
            pytest.fail(f"it ended before it served:\n{told}")
        yield Server(process, told)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(calling_model(), "--name", "caller", "--temperature", "0") as found:
        yield found


def test_a_conversation_with_a_tool(server: Server) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["caller"]
    assert client.models.retrieve("caller").max_model_len == 8192
    first = client.chat.completions.create(model="caller", messages=ASK, tools=[ADD])
    (call,) = first.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    second = client.chat.completions.create(
        model="caller", messages=[*ASK, first.choices[0].message, result], tools=[ADD]
    )
    assert second.choices[0].message.content == ANSWER
    with client.chat.completions.stream(model="caller", messages=ASK) as stream:
        assert stream.get_final_completion().choices[0].message.content == CALL, "without tools it is text"


def test_log_probs_are_the_models_own(server: Server) -> None:
    from quadriga.config.schema_models import ModelConfig
    from quadriga.models.load import load_policy

    answer = server.client().completions.create(
        model="caller", prompt="Some words", max_tokens=12, logprobs=0, temperature=1
    )
    choice = answer.choices[0]
    ids, start = answer.prompt_token_ids + choice.token_ids, len(answer.prompt_token_ids)
    model = load_policy(ModelConfig(path=str(calling_model()))).huggingface.eval()
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, start - 1 : -1]
    own = logits.log_softmax(-1).gather(1, torch.tensor(choice.token_ids)[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(choice.logprobs.token_logprobs), own, atol=1e-3, rtol=1e-3)


def test_a_seed_repeats_and_choices_differ(server: Server) -> None:
    client = server.client()
    asked: dict[str, Any] = {"model": "caller", "prompt": "Zz", "max_tokens": 24, "temperature": 4.0, "n": 3}
    told = [[c.token_ids for c in client.completions.create(**asked, seed=5).choices] for _ in range(2)]
    assert told[0] == told[1]
    assert len(set(map(tuple, told[0]))) == 3
    assert client.completions.create(**asked | {"n": 1}, seed=6).choices[0].token_ids == told[0][1]
    assert client.completions.create(**asked | {"n": 1}).choices[0].token_ids != told[0][0]


def test_several_prompts_and_ids_as_prompts(server: Server) -> None:
    client = server.client()
    ids = client.completions.create(model="caller", prompt="One", max_tokens=1).prompt_token_ids
    several = client.completions.create(model="caller", prompt=["One", "Two"], max_tokens=5, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    by_ids = client.completions.create(model="caller", prompt=ids, max_tokens=5)
    assert by_ids.choices[0].text == several.choices[0].text == several.choices[1].text


def test_a_stop_text_ends_an_answer_and_is_not_in_it(server: Server) -> None:
    client = server.client()
    asked: dict[str, Any] = {"model": "caller", "messages": [*ASK, {"role": "tool", "content": "5"}], "stop": ["says"]}
    whole = client.chat.completions.create(**asked)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("The tool ", "stop")
    pieces = [event.choices[0].delta.content or "" for event in client.chat.completions.create(**asked, stream=True)]
    assert "".join(pieces) == "The tool "


def test_too_long_a_prompt_is_told_with_numbers(server: Server) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError, match=r"prompt of 9000 tokens.*context of 8192"):
        client.completions.create(model="caller", prompt="x" * 9000)
    with pytest.raises(openai.BadRequestError, match=r"max_tokens=8190.*at most 8182 tokens"):
        client.completions.create(model="caller", prompt="x" * 10, max_tokens=8190)
    with pytest.raises(openai.NotFoundError, match="only caller"):
        client.completions.create(model="other", prompt="x")


def test_many_clients_are_answered_together(server: Server) -> None:
    async def crowd() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=100) as client:
            asked = [client.chat.completions.create(model="caller", messages=ASK, tools=[ADD]) for _ in range(100)]
            return [answer.choices[0].finish_reason for answer in await asyncio.gather(*asked)]

    assert asyncio.run(crowd()) == ["tool_calls"] * 100


def test_the_page_may_run_its_own_script_and_nothing_else(server: Server) -> None:
    with urllib.request.urlopen(server.url.replace("/v1", "/")) as answer:
        policy, page = answer.headers["content-security-policy"], answer.read().decode()
    assert "default-src 'none'" in policy
    assert "'unsafe-inline'" not in policy
    assert not re.search(r"(src|href)=[\"'](?!data:)", page), "it loads nothing"
    assert "innerHTML" not in page
    request = urllib.request.Request(server.url + "/models", headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="421"):
        urllib.request.urlopen(request)


def test_ctrl_c_lets_an_answer_end_and_then_the_server_ends() -> None:
    with serving("builtin:arithmetic", "--api-key") as found:
        assert len(found.key) > 20
        with pytest.raises(openai.AuthenticationError):
            found.client("wrong").models.list()
        client = found.client()
        stream = client.completions.create(
            model="builtin:arithmetic", prompt="1+2=", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        found.process.send_signal(signal.SIGINT)
        ids = [token for event in stream for token in event.choices[0].token_ids]
        assert len(ids) > 100, "what had begun was finished"
        assert found.process.wait(20) == 0
        assert found.process.stdout.read().splitlines() == ["stopped"]


def test_a_model_without_a_template_completes_and_says_what_chat_needs() -> None:
    with serving("builtin:arithmetic", QUADRIGA_API_KEY="a key of mine") as found:
        assert "no chat template" in found.told
        assert found.key == "…", "it is not printed"
        client = found.client("a key of mine")
        answer = client.completions.create(model="builtin:arithmetic", prompt="3+4=", temperature=0)
        assert answer.choices[0].text == "#### 7"
        with pytest.raises(openai.BadRequestError, match="--chat-template"):
            client.chat.completions.create(model="builtin:arithmetic", messages=ASK)


def test_what_cannot_be_served_is_said_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUADRIGA_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"--host 0.0.0.0 lets other machines in"):
        main(["builtin:arithmetic", "--host", "0.0.0.0"])
    with pytest.raises(ConfigError, match="temperature=-1"):
        main(["builtin:arithmetic", "--temperature", "-1"])
    with pytest.raises(ConfigError, match="tool format"):
        main(["builtin:arithmetic", "--tool-format", "morse"])
    with pytest.raises(ConfigError, match="cannot listen"):
        main(["builtin:arithmetic", "--port", "99999"])
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError):
        main([str(tmp_path), "--port", "0"])
    with pytest.raises(DataError):
        main([str(tmp_path / "nothing"), "--port", "0"])


def test_tokens_of_a_request_that_is_not_streamed_are_not_looked_at() -> None:
    """Watching costs those alone who watch."""
    from live_endpoint import run, served_policy

    async def talk() -> None:
        async with served_policy() as policy:
            engine, looks = policy.live.service.engine, []
            look = engine.look

            def noting(seen: Any) -> Any:
                looks.append(dict(seen))
                return look(seen)

            engine.look = noting
            await policy.generate(ASK, max_new_tokens=50, ignore_eos=True)
            assert not looks
            seen: list[int] = []
            generation = await policy.generate(
                ASK, max_new_tokens=800, ignore_eos=True, on_tokens=lambda ids, *_: seen.extend(ids)
            )
            assert looks
            assert seen == generation.token_ids[: len(seen)]
            assert len(seen) > 0

    run(talk())


def test_help_and_completion_know_the_command() -> None:
    from quadriga.commands.completion import words_of

    assert {"--port", "--host", "--api-key", "--name"} <= set(words_of("serve"))
