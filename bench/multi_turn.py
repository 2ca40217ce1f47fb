"""Many turns beside one: what it costs a native engine on a CPU that episodes come back with a longer prompt.

    python bench/multi_turn.py [--rounds 3] [--episodes 64] [--turns 4]

The model of bench/rollout.py (7 million weights, float32, random). Each episode begins with a prompt of 32 tokens; a turn writes 32
tokens and an observation of 8 follows it. The single-turn job writes the same number of tokens after the same prompt in one go.
The contenders take turns, round after round, in one process: each job with known beginnings taken from the cache, and with every
prompt computed from its start. Generated tokens per second, best and median, and the share of single-turn.
An episode asks for its next turn as soon as it has the one before, as agents do; nobody waits for the other episodes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rollout import VOCAB, make_model

from quadriga.rollout import Request, SamplingParams, create_engine

PROMPT, WRITTEN, OBSERVED = 32, 32, 8


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def single(engine: Any, episodes: int, turns: int) -> int:
    """Tokens written by `episodes` requests of as many tokens as all turns of an episode."""
    params = SamplingParams(max_new_tokens=turns * WRITTEN, ignore_eos=True)
    asked = [Request(str(e), ids(PROMPT, e), params, (0, e)) for e in range(episodes)]
    return sum(len(c.token_ids) for c in engine.generate(asked))


def many(engine: Any, episodes: int, turns: int) -> int:
    """Tokens written by episodes of several turns."""
    params = SamplingParams(max_new_tokens=WRITTEN, ignore_eos=True)
    contexts, calls, written = [ids(PROMPT, e) for e in range(episodes)], [0] * episodes, 0
    for e in range(episodes):
        engine.submit(Request(str(e), contexts[e], params, (0, e), affinity=str(e)))
    while not engine.idle:
        for done in engine.step():
            e = int(done.request_id)
            written += len(done.token_ids)
            contexts[e] = [*contexts[e], *done.token_ids, *ids(OBSERVED, 1000 * calls[e] + e)]
            calls[e] += 1
            if calls[e] < turns:
                engine.submit(Request(str(e), contexts[e], params, (0, e), call=calls[e], affinity=str(e)))
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    model, size = make_model(), {"max_num_seqs": options.episodes, "max_model_len": 512}
    engines = {
        reuses: create_engine("native", module=model, reuses_prefixes=reuses, **size) for reuses in (True, False)
    }
    jobs: dict[str, tuple[Callable[[Any, int, int], int], bool]] = {
        "single-turn": (single, True),
        "single-turn, nothing kept": (single, False),
        "many turns, known beginnings": (many, True),
        "many turns, each from the start": (many, False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    tokens = options.episodes * options.turns * WRITTEN
    for _ in range(options.rounds + 1):  # the first warms up
        for name, (job, reuses) in jobs.items():
            engine = engines[reuses]
            engine.update_weights(engine.version + 1)  # as in a run: nothing is known when a step begins
            before = time.perf_counter()
            assert job(engine, options.episodes, options.turns) == tokens
            seconds[name].append(time.perf_counter() - before)
    best_single = min(seconds["single-turn"][1:])
    report = {
        name: {
            "seconds": [round(s, 3) for s in took[1:]],
            "best_tokens_per_s": round(tokens / min(took[1:])),
            "median_tokens_per_s": round(tokens / statistics.median(took[1:])),
            "share_of_single_turn": round(best_single / min(took[1:]), 3),
        }
        for name, took in seconds.items()
    }
    told = {key: engines[True].statistics()[key] for key in ("prompt_tokens", "cached_tokens", "preemptions")}
    print(json.dumps({"threads": torch.get_num_threads(), "contenders": report, "with reuse": told}, indent=2))


if __name__ == "__main__":
    main()
