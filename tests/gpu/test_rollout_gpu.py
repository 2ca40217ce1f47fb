"""The native engine on a GPU: it generates what the CPU generates, in graphs and without, asleep and awake."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
from rollout_models import CONFIGS, VOCAB, tiny_model

from quadriga.rollout import Completion, Request, SamplingParams, create_engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Samples = dict[tuple[str, int], Completion]


def make(family: str = "qwen2", device: str = "cuda", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    settings = {"max_num_seqs": 16, "max_model_len": 160, "block_size": 16} | options
    return create_engine("native", module=tiny_model(family).to(device, dtype), **settings)


def ask(params: SamplingParams, lengths: tuple[int, ...] = (1, 16, 30, 67), samples: int = 3) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [Request(str(i), p, params, (0, i), tuple(range(samples))) for i, p in enumerate(prompts)]


def run(engine: Any, requests: list[Request]) -> Samples:
    return {(c.request_id, c.sample_index): c for c in engine.generate(requests)}


def assert_alike(ours: Samples, others: Samples, at_most_different: int = 0, tolerance: float = 2e-4) -> None:
    """The same samples; a few may part ways where a random number lay on the edge between two tokens."""
    assert ours.keys() == others.keys()
    different = [key for key in ours if ours[key].token_ids != others[key].token_ids]
    assert len(different) <= at_most_different, different
    for key in ours.keys() - set(different):
        assert ours[key].finish_reason == others[key].finish_reason
        gap = torch.tensor(ours[key].full_log_probs) - torch.tensor(others[key].full_log_probs)
        assert gap.abs().max() < tolerance
        gap = torch.tensor(ours[key].log_probs) - torch.tensor(others[key].log_probs)
        assert gap.abs().max() < tolerance


@pytest.mark.parametrize("family", CONFIGS)
def test_samples_are_those_of_the_cpu(family):
    """Float32; prompts longer than a pass, shared by samples, and so little cache that samples are preempted."""
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 40, "kv_cache_tokens": 288}
    requests = ask(SamplingParams(max_new_tokens=40, temperature=0.9))
    gpu = make(family, **options)
    assert_alike(run(gpu, requests), run(make(family, "cpu", **options), requests), at_most_different=1)
    assert gpu.statistics()["preemptions"] > 0
    assert gpu.pool.num_free == gpu.pool.num_blocks


@pytest.mark.parametrize(
    "more",
    [{"top_p": 0.8}, {"top_k": 7, "repetition_penalty": 1.3}, {"min_p": 0.1, "min_new_tokens": 20}, {"temperature": 0.0}],
    ids=["top-p", "top-k and penalty", "min-p and min-new", "greedy"],
)  # fmt: skip
def test_other_ways_to_sample_are_those_of_the_cpu(more):
    requests = ask(SamplingParams(max_new_tokens=30, **more))
    options = {"eos_token_ids": [3, 50, 117]}
    assert_alike(run(make(**options), requests), run(make(device="cpu", **options), requests), at_most_different=1)


def test_samples_end_at_their_stop_token_though_the_device_runs_ahead():
    requests = ask(SamplingParams(max_new_tokens=100), lengths=(1, 16, 30, 50), samples=12)
    options = {"eos_token_ids": [3, 50, 117, 200, 290], "max_num_seqs": 16}
    gpu = make(**options)
    ours = run(gpu, requests)
    assert_alike(ours, run(make(device="cpu", **options), requests), at_most_different=2)
    assert {"stop"} <= {c.finish_reason for c in ours.values()}
    assert gpu.pool.num_free == gpu.pool.num_blocks


def test_stop_strings_end_a_sample():
    class Letters:
        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            return "".join(chr(ord("a") + i % 26) for i in ids)

    free = run(make(), ask(SamplingParams(max_new_tokens=40), samples=1))["2", 0]
    text = Letters().decode(free.token_ids)
    stopped = ask(SamplingParams(max_new_tokens=40, stop_strings=(text[20:23],)), samples=1)
    ended = run(make(tokenizer=Letters()), stopped)["2", 0]
    assert ended.finish_reason == "stop_string"
    assert Letters().decode(ended.token_ids) == text[: text.index(text[20:23]) + 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_change_nothing(dtype):
    requests = ask(SamplingParams(max_new_tokens=50))
    graphs, eager = make(dtype=dtype), make(dtype=dtype, enforce_eager=True)
    assert_alike(run(graphs, requests), run(eager, requests), tolerance=1e-6)
    assert graphs.cuda.runner.graphs.captured
    assert not eager.cuda.runner.graphs.captured


def test_sleep_gives_the_cache_back_and_wake_needs_no_new_graphs():
    requests = ask(SamplingParams(max_new_tokens=50))
    engine = make(kv_cache_tokens=1 << 18, max_num_seqs=16, memory_fraction=0.5)
    before = run(engine, requests)
    size = engine.pool.num_blocks * engine.shape.bytes_per_block
    graphs = dict(engine.cuda.runner.graphs.captured)
    awake = torch.cuda.memory_allocated()
    engine.sleep()
    assert awake - torch.cuda.memory_allocated() >= size
    in_the_way = torch.empty(size, dtype=torch.uint8, device="cuda")  # the cache will lie elsewhere
    engine.wake()
    assert run(engine, requests) == before
    assert engine.cuda.runner.graphs.captured == graphs
    del in_the_way


def test_a_batch_larger_than_the_largest_graph_is_done_in_parts():
    requests = ask(SamplingParams(max_new_tokens=30))
    engine, small = make(), make()
    small.cuda.runner.graphs.max_bucket = 5
    assert_alike(run(small, requests), run(engine, requests), at_most_different=1)
    assert max(small.cuda.runner.graphs.captured) <= 5


def test_no_memory_for_a_graph_means_smaller_ones(monkeypatch, caplog):
    engine = make()
    graphs = engine.cuda.runner.graphs
    graphs.captured.clear()
    capture = graphs._capture

    def short_of_memory(rows: int) -> None:
        if rows > 4:
            raise torch.OutOfMemoryError("out of memory: asked for too much")
        capture(rows)

    monkeypatch.setattr(graphs, "_capture", short_of_memory)
    requests = ask(SamplingParams(max_new_tokens=20))
    assert_alike(run(engine, requests), run(make(), requests), at_most_different=1)
    assert graphs.max_bucket <= 4
    assert "going on with" in caplog.text


def test_aborted_samples_come_back_with_what_they_have():
    engine = make()
    long, short = ask(SamplingParams(max_new_tokens=60), samples=1)[:2], ask(SamplingParams(max_new_tokens=5), (8,), 1)
    stream = engine.generate([long[1], short[0]])
    assert next(stream).finish_reason == "length"
    engine.abort(["1"])
    rest = {c.request_id: c for c in stream}
    assert rest["1"].finish_reason == "aborted"
    assert 5 <= len(rest["1"].token_ids) < 60
    assert engine.pool.num_free == engine.pool.num_blocks


def test_log_probs_are_the_trainers_in_bfloat16():
    """A model of sharp distributions: the mean gap between what generation says and what training says."""
    from quadriga.engine import TrainingEngine
    from quadriga.models.attention import register_packed_attention
    from quadriga.models.token_model import PolicyModel
    from quadriga.protocol import DataProto

    requests = ask(SamplingParams(max_new_tokens=60), lengths=(30, 30, 30), samples=5)
    samples = run(make(dtype=torch.bfloat16), requests)
    model = tiny_model().to(torch.bfloat16).to(torch.float32)
    model.set_attn_implementation(register_packed_attention())
    engine = TrainingEngine(PolicyModel(model), device="cuda")
    ids = torch.tensor([[*r.prompt_ids, *samples[r.request_id, i].token_ids] for r in requests for i in range(5)])
    data = DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "response_mask": torch.ones(15, 60, dtype=torch.int64),
        }
    )
    packed, _ = engine.log_probs(data, 1.0, 100_000)
    single, _ = engine.log_probs(data, 1.0, 1)
    generated = torch.tensor([samples[r.request_id, i].full_log_probs for r in requests for i in range(5)])
    assert (packed - single).abs().mean() < 0.01
    assert (packed - generated).abs().mean() < 0.02
