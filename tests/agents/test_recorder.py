"""The policy as one episode has it: what is asked at the same time is told apart."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from letter_model import write_model

from quadriga.agents.recorder import Limits, RecordingPolicy, Texts
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.service import Sample


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(write_model(tmp_path_factory.mktemp("model")))
    return Texts(tokenizer, None, {}, [0], "hermes")


def policy_that_says(texts: Texts, *answers: str) -> tuple[RecordingPolicy, list[str]]:
    """A policy with one answer for each call; and the contexts that it was asked with."""
    asked: list[str] = []

    async def ask(call: int, ids: list[int], params: SamplingParams) -> Sample:
        asked.append(texts.decode(ids))
        await asyncio.sleep(0)  # whoever asks beside it asks now
        tokens = np.array(texts.encode(answers[call], first=False), np.int32)
        zeros = np.zeros(len(tokens), np.float32)
        return Sample(str(call), 0, tokens, zeros, zeros, "length", ((0, len(tokens)),))

    return RecordingPolicy(texts, Limits(64, 64, 60), SamplingParams(max_new_tokens=8), ask, lambda: None), asked


def test_two_answers_to_one_text_asked_for_at_once_are_two_contexts(texts):
    policy, asked = policy_that_says(texts, "ab", "cd", "ef")

    async def agent() -> str:
        first, second = await asyncio.gather(policy.generate("say "), policy.generate("say "))
        return (await policy.generate(f"say {first.text}{second.text} which")).text

    assert asyncio.run(agent()) == "ef"
    assert asked == ["say ", "say ", "say abcd which"], "the engine reads what the agent has written"


def test_two_answers_to_the_same_ids_asked_for_at_once_can_both_be_gone_on_from(texts):
    policy, asked = policy_that_says(texts, "ab", "cd", "ef", "gh")

    async def agent() -> None:
        ids = texts.encode("say ", first=False)
        both = await asyncio.gather(policy.generate(ids), policy.generate(ids))
        for answer in both:
            await policy.generate([*answer.prompt_ids, *answer.token_ids])

    asyncio.run(agent())
    assert asked == ["say ", "say ", "say ab", "say cd"]
    assert [context.prompt_tokens for context in policy._contexts] == [4, 4]


def test_a_call_that_was_given_up_can_be_made_again_in_its_context(texts):
    policy, asked = policy_that_says(texts, "ab", "cd")

    async def agent() -> None:
        given_up = asyncio.create_task(policy.generate("say "))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        await policy.generate("say ")

    asyncio.run(agent())
    assert asked == ["say ", "say "]
    assert len(policy._contexts) == 1
