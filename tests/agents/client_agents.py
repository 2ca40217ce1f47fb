"""Agents that play the same game: through the policy itself, through an OpenAI client, and one that never ends."""

from __future__ import annotations

import openai

TURNS = 3


def vowels(text: str) -> float:
    return sum(letter in "aeiou" for letter in text) / 5


async def directly(task, policy):
    messages, reward = task.messages, 0.0
    for _ in range(TURNS):
        answer = await policy.generate(messages, max_new_tokens=5)
        reward += vowels(answer.text)
        messages += [answer.message, {"role": "user", "content": f"{len(answer.text)}?"}]
    return reward


async def by_client(task, policy):
    """As somebody would write it who has never heard of us."""
    reward = 0.0
    async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
        messages = task.messages
        for _ in range(TURNS):
            answer = await client.chat.completions.create(
                model="gpt-4.1-mini", messages=messages, max_tokens=5, temperature=0.3
            )
            message = answer.choices[0].message
            reward += vowels(message.content)
            messages += [message, {"role": "user", "content": f"{len(message.content)}?"}]
    return reward


async def by_stream(task, policy):
    reward = 0.0
    async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
        messages = task.messages
        for _ in range(TURNS):
            stream = await client.chat.completions.create(model="m", messages=messages, max_tokens=5, stream=True)
            text = "".join([event.choices[0].delta.content or "" async for event in stream])
            reward += vowels(text)
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": [{"type": "text", "text": f"{len(text)}?"}]},
            ]
    return reward


async def for_ever(task, policy):
    """Goes on until it is stopped; and with a key that is not its own, gets nothing."""
    async with openai.AsyncOpenAI(base_url=policy.base_url, api_key="sk-somebody-elses", max_retries=0) as thief:
        try:
            await thief.models.list()
        except openai.AuthenticationError:
            pass
        else:
            raise AssertionError("somebody else's key was good")
    async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
        messages = task.messages
        while True:
            answer = await client.chat.completions.create(model="m", messages=messages, stop=["a"])
            messages += [answer.choices[0].message, {"role": "user", "content": "on"}]
