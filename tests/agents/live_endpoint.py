"""A real model behind a real endpoint, in the event loop of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import torch
from calling_model import calling_model

from quadriga.agents.serving import LiveService, ServedPolicy
from quadriga.config.schema_models import ModelConfig
from quadriga.data.chat import ChatEncoder
from quadriga.models.load import end_token_ids, load_policy, load_tokenizer
from quadriga.rollout import SamplingParams, create_engine
from quadriga.rollout.service import GenerationService


def run(test: Coroutine[Any, Any, None], limit_s: float = 100) -> None:
    """Run a test that is a coroutine; nothing that it started may be left."""

    async def bounded() -> None:
        async with asyncio.timeout(limit_s):
            await test
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"left running: {left}"

    asyncio.run(bounded())


@asynccontextmanager
async def served_policy(**defaults: Any) -> AsyncIterator[ServedPolicy]:
    """The model that calls a tool; greedy unless `defaults` say otherwise."""
    path = str(calling_model())
    torch.set_num_threads(1)  # for so small a model; two threads that wait for each other are slower on a busy machine
    tokenizer = load_tokenizer(path)
    module = load_policy(ModelConfig(path=path), tokenizer, trainable=False).huggingface
    ends = end_token_ids(module, tokenizer)
    engine = create_engine(
        "native",
        module=module,
        eos_token_ids=ends,
        tokenizer=load_tokenizer(path),
        max_num_seqs=64,
        kv_cache_tokens=65536,
    )
    live = LiveService(GenerationService(engine))
    try:
        yield ServedPolicy(
            live,
            ChatEncoder(tokenizer),
            ends,
            defaults=SamplingParams(**{"temperature": 0.0, "max_new_tokens": 256, **defaults}),
            context_tokens=engine.longest,
        )
    finally:
        live.close()


async def until(holds: Any, limit_s: float = 20) -> None:
    """Wait until `holds()`."""
    async with asyncio.timeout(limit_s):
        while not holds():
            await asyncio.sleep(0.01)
