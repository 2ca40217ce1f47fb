"""What the endpoint costs beside the engine, and whether it holds a crowd.

    python bench/endpoint.py

Two figures: milliseconds that a call takes through HTTP more than the same call of the policy itself (one at a time, and a client
that writes its HTTP by hand, so that it is not the client that is measured), and how 1,000 clients at the same time are served, each
with a connection of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from typing import Any

from quadriga.agents.endpoint import Endpoint
from quadriga.agents.serving import LiveService, ServedPolicy
from quadriga.checkpoint.huggingface import model_path
from quadriga.config.schema_models import ModelConfig
from quadriga.data.chat import ChatEncoder
from quadriga.models.load import end_token_ids, load_policy, load_tokenizer
from quadriga.rollout import SamplingParams, create_engine
from quadriga.rollout.service import GenerationService


async def call(port: int, key: str, connection: Any, body: bytes) -> dict[str, Any]:
    """One completion over an open connection."""
    reader, writer = connection
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {key}\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    told = await reader.readuntil(b"\r\n\r\n")
    fields = dict(line.split(b": ", 1) for line in told.lower().split(b"\r\n") if b": " in line)
    answer = await reader.readexactly(int(fields[b"content-length"]))
    if b" 200 " not in told.split(b"\r\n", 1)[0]:
        raise RuntimeError(answer.decode())
    return json.loads(answer)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:arithmetic")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--calls-per-client", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=16)
    options = parser.parse_args()
    path = model_path(options.model)
    tokenizer = load_tokenizer(path)
    module = load_policy(ModelConfig(path=path), tokenizer, trainable=False).huggingface
    ends = end_token_ids(module, tokenizer)
    engine = create_engine("native", module=module, eos_token_ids=ends, max_num_seqs=256, max_model_len=256)
    live = LiveService(GenerationService(engine))
    sys.setswitchinterval(0.0005)
    policy = ServedPolicy(live, ChatEncoder(tokenizer), ends, defaults=SamplingParams(), context_tokens=engine.longest)
    sampling = {"max_new_tokens": options.new_tokens, "ignore_eos": True}
    body = json.dumps({"prompt": "12+7=", "max_tokens": options.new_tokens, "ignore_eos": True}).encode()
    async with Endpoint(tokenizer) as endpoint:
        key = endpoint.admit(policy)
        port = int(endpoint.base_url.rsplit(":", 1)[1].removesuffix("/v1"))
        connection = await asyncio.open_connection("127.0.0.1", port)
        direct, through = [], []
        for number in range(options.calls + 10):  # by turns, so that what else the machine does meets both
            began = time.perf_counter()
            await policy.generate("12+7=", **sampling)
            between = time.perf_counter()
            await call(port, key, connection, body)
            if number >= 10:
                direct.append(between - began)
                through.append(time.perf_counter() - between)
        connection[1].close()
        overhead = [(b - a) * 1e3 for a, b in zip(direct, through)]
        print(
            f"one call of {options.new_tokens} tokens: direct {statistics.median(direct) * 1e3:.2f} ms, through the endpoint "
            f"{statistics.median(through) * 1e3:.2f} ms; overhead {statistics.median(overhead):.2f} ms (median of {options.calls})"
        )

        async def client() -> list[float]:
            connection = await asyncio.open_connection("127.0.0.1", port)
            took = []
            for _ in range(options.calls_per_client):
                began = time.perf_counter()
                answer = await call(port, key, connection, body)
                assert len(answer["choices"][0]["token_ids"]) == options.new_tokens
                took.append(time.perf_counter() - began)
            connection[1].close()
            return took

        began = time.perf_counter()
        results = await asyncio.gather(*(client() for _ in range(options.clients)), return_exceptions=True)
        seconds = time.perf_counter() - began
        errors = [result for result in results if isinstance(result, BaseException)]
        took = sorted(t for result in results if not isinstance(result, BaseException) for t in result)
        print(
            f"{options.clients} clients at once, {options.calls_per_client} calls each: {len(errors)} errors, "
            f"{len(took) / seconds:.0f} calls/s, {len(took) * options.new_tokens / seconds:.0f} tokens/s, "
            f"median {took[len(took) // 2]:.2f} s, longest {took[-1]:.2f} s"
        )
        for error in errors[:3]:
            print(repr(error))
        assert not errors, f"{len(errors)} of {options.clients} clients met an error"
    live.close()


if __name__ == "__main__":
    asyncio.run(main())
