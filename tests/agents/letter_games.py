"""Environments that a tiny model can play."""

from __future__ import annotations


class Vowels:
    """Three turns at most; a turn's reward is the share of vowels in it. A turn without any letter ends the game."""

    def __init__(self, turns: int = 3) -> None:
        self.left = turns

    def reset(self, row):
        return [{"role": "user", "content": f"say {row['uid'][-1]}"}]

    def step(self, text):
        self.left -= 1
        vowels = sum(letter in "aeiou" for letter in text) / 5
        return f"{len(text)}?", vowels, self.left == 0 or not text


class SlowVowels(Vowels):
    """The same, asynchronous, and each episode takes its own time."""

    async def reset(self, row):
        self.pause = (hash(row["uid"]) % 7) / 200
        return super().reset(row)

    async def step(self, text):
        import asyncio

        await asyncio.sleep(self.pause)
        return super().step(text)


async def rewrites(task, policy):
    """Two turns; then, in two samples of three, the conversation begins anew with what was said in it, up to twice."""
    messages, reward = task.messages, 0.0
    for _ in range(2):
        answer = await policy.generate(messages)
        messages += [answer.message, {"role": "user", "content": f"{len(answer.text)}?"}]
    policy.reward(0.25)
    for _ in range(sum(map(ord, task.uid)) % 3 if not task.validates else 0):
        answer = await policy.generate([{"role": "user", "content": answer.text[:8] or "say"}])
        reward += sum(letter in "aeiou" for letter in answer.text) / 5
    return reward
