"""Episodes whose tools take their time: is the engine kept busy?

    python bench/agents.py                      # 512 episodes × 4 turns, 200 ms between the turns
    python bench/agents.py --episodes 64 --turns 2

All parts are those of a run: agent processes, router, service, native engine on the CPU; the model is random, of 6 layers × 256. A
turn writes 16 to 48 tokens, then a tool takes 200 ms. `busy` is the share of the time, from the first question to the end of the last
answer, that the engine spends in its steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from typing import Any

TOOL_S = 0.2


async def run(task: Any, policy: Any) -> float:
    """Turns of token ids with a pause between them."""
    ids = [3 + task.random.randrange(10) for _ in range(16)]
    for turn in range(task.row["turns"]):
        if turn:
            await asyncio.sleep(task.row["tool_s"])
        answer = await policy.generate(ids, max_new_tokens=16 + task.random.randrange(33), ignore_eos=True)
        ids = [*answer.prompt_ids, *answer.token_ids, 13, 14, 15, 16]
    return 1.0


class OneEngine:
    """A service in this process, as a router reaches it."""

    def __init__(self, service: Any, capacity: int) -> None:
        self.service, self.capacities = service, [capacity]

    def submit(self, rank: int, requests: list[Any]) -> None:
        self.service.submit(requests)

    def abort(self, rank: int, request_ids: list[str]) -> None:
        self.service.abort(request_ids)

    def take_weights(self, rank: int, version: int) -> None:
        raise AssertionError("the weights do not change")

    def events(self, timeout_s: float) -> list[Any]:
        from quadriga.rollout.router import Delivered

        return [Delivered(0, self.service.take(timeout_s))]


def measure(episodes: int, turns: int, tool_s: float, slots: int, hidden: int, layers: int) -> dict[str, float]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from quadriga.agents.pool import EpisodePool, Start
    from quadriga.agents.process import AgentJob
    from quadriga.agents.recorder import Limits
    from quadriga.config.schema_rollout import AgentConfig, MultiTurnConfig
    from quadriga.models.load import load_tokenizer
    from quadriga.rollout import Request, SamplingParams, create_engine
    from quadriga.rollout.router import Router
    from quadriga.rollout.service import GenerationService

    torch.manual_seed(0)
    shape = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "vocab_size": 4096}
    model = LlamaForCausalLM(
        LlamaConfig(**shape, num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64)
    ).eval()
    limits = Limits(prompt_length=16, response_length=turns * 52, vocabulary=4096)
    engine = create_engine(
        "native",
        module=model,
        eos_token_ids=[1],
        max_num_seqs=slots,
        max_num_batched_tokens=8192,
        max_model_len=limits.prompt_length + limits.response_length,
    )
    service = GenerationService(engine)
    agent = f"{__file__}:run"
    job = AgentJob(
        agent, {}, load_tokenizer("builtin:arithmetic"), None, {}, (1,), limits, 300.0, 8, vars(MultiTurnConfig())
    )
    finished: list[Any] = []
    over, problems = threading.Event(), []

    def done(place: tuple[str, int], episode: Any) -> None:
        finished.append(episode)
        if len(finished) == episodes:
            over.set()

    def failed(error: BaseException) -> None:
        problems.append(error)
        over.set()

    pool = EpisodePool(job, AgentConfig(num_workers=2, max_concurrent=512))
    router = Router(OneEngine(service, slots), pool.answer)
    router.holds(0)
    pool.connect(router.submit, router.abort, done, failed)
    params = SamplingParams(max_new_tokens=limits.response_length)
    starts = [
        Start(
            agent,
            {
                "row": {"turns": turns, "tool_s": tool_s},
                "prompt": "",
                "uid": str(k),
                "sample_index": 0,
                "step": 1,
                "seed": (k,),
            },
            Request(f"{k}/0", [1], params, (0, k), (0,), 1),
            (str(k), 0),
        )
        for k in range(episodes)
    ]
    pool.start(starts[:1])  # the processes are up, everything is warm
    while not finished:
        time.sleep(0.05)
    before, began = service.take(0.0), time.monotonic()
    pool.start(starts[1:])
    over.wait(600)
    seconds = time.monotonic() - began
    after = service.take(0.0)
    pool.close()
    router.close()
    service.close()
    if problems:
        raise problems[0]
    bad = [episode.error for episode in finished if episode.finish_reason != "done"]
    assert not bad, bad[0]
    written = sum(int(row.mask.sum()) for episode in finished[1:] for row in episode.rows)
    busy = after.stepping_s - before.stepping_s
    return {
        "episodes": episodes,
        "turns": turns,
        "seconds": round(seconds, 2),
        "busy": round(busy / seconds, 3),
        "tokens": written,
        "tokens_per_s": round(written / seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tool-s", type=float, default=TOOL_S)
    parser.add_argument("--slots", type=int, default=256, help="sequences that the engine decodes together")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    given = parser.parse_args()
    print(json.dumps(measure(given.episodes, given.turns, given.tool_s, given.slots, given.hidden, given.layers)))


if __name__ == "__main__":
    main()
