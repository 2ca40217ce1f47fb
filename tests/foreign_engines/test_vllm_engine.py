"""vLLM behind the contract of a rollout engine. Runs where vLLM is installed: `make test-vllm`."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vllm_models import tiny_llama, word_tokenizer

from quadriga.errors import ConfigError, DataError, ResourceError, WorkerError
from quadriga.rollout.interface import Request, SamplingParams, create_engine

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
    pytest.mark.timeout(600),
]

PROMPT = [5, 17, 300, 2, 2, 41]
LONG = [(7 * i) % 331 for i in range(150)]
"""Longer than a block of vLLM's cache on a CPU."""
PLAIN = SamplingParams(max_new_tokens=12)


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def new_engine(model, **options):
    engine = create_engine(
        "vllm",
        module=model,
        eos_token_ids=[1],
        tokenizer=word_tokenizer(),
        **{"max_num_seqs": 16, "max_model_len": 256, **options},
    )
    engine.update_weights(1, model.named_parameters())
    return engine


@pytest.fixture(scope="module")
def engine(model):
    engine = new_engine(model)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def same_weights_for_all(request, model):
    yield
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").update_weights(1, model.named_parameters())


def requests(params=PLAIN, count=4, samples=(0, 1), prompt=PROMPT, **more):
    return [Request(f"r{i}", prompt, params, uid=(0, i), sample_indices=samples, **more) for i in range(count)]


def by_name(completions):
    return {(c.request_id, c.sample_index): c for c in completions}


def tokens(completions):
    return {name: c.token_ids for name, c in by_name(completions).items()}


@torch.no_grad()
def logits(model, prompt, response):
    return model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float()


def own_log_probs(model, prompt, response, temperature=1.0):
    return (logits(model, prompt, response) / temperature).log_softmax(-1)[range(len(response)), response]


# ---- weights ----


def test_the_echo_is_that_of_the_native_engine(model, engine):
    native = create_engine("native", module=tiny_llama(), max_num_seqs=4, max_model_len=64)
    assert engine.update_weights(7, model.named_parameters()) == native.update_weights(7, model.named_parameters())
    assert engine.version == 7


def test_new_weights_write_what_comes_next_also_behind_a_prompt_that_is_cached(engine):
    before = tokens(engine.generate(requests(prompt=LONG)))
    other = tiny_llama(seed=1)
    engine.update_weights(2, other.named_parameters())
    done = by_name(engine.generate(requests(prompt=LONG)))
    assert {n: c.token_ids for n, c in done.items()} != before
    for c in done.values():
        assert c.version == 2
        assert torch.allclose(torch.tensor(c.full_log_probs), own_log_probs(other, LONG, c.token_ids), atol=1e-3)


def test_a_weight_that_is_missing_or_of_another_shape_is_refused(model, engine):
    with pytest.raises(WorkerError, match="were not sent"):
        engine.update_weights(3, [w for w in model.named_parameters() if "norm" not in w[0]])
    with pytest.raises(WorkerError):
        engine.update_weights(3, [(n, w[:-1] if w.ndim > 1 else w) for n, w in model.named_parameters()])


def test_nothing_is_generated_with_weights_of_another_version(engine):
    with pytest.raises(WorkerError, match="version 1, but 5"):
        engine.submit(replace(requests()[0], version=5))


# ---- samples ----


def test_log_probs_are_those_of_the_model(model, engine):
    params = SamplingParams(max_new_tokens=12, temperature=0.7)
    done = list(engine.generate(requests(params)))
    assert len(done) == 8
    for c in done:
        wanted = own_log_probs(model, PROMPT, c.token_ids, 0.7)
        assert torch.allclose(torch.tensor(c.full_log_probs), wanted, atol=1e-3)
        assert c.log_probs == c.full_log_probs


def test_both_log_probs_where_the_distribution_is_cut(model, engine):
    params = SamplingParams(max_new_tokens=12, temperature=0.8, top_k=5)
    for c in engine.generate([*requests(params), *[replace(r, request_id="p" + r.request_id) for r in requests()]]):
        temperature = c.request_id.startswith("p") or 0.8
        full = (logits(model, PROMPT, c.token_ids) / temperature).log_softmax(-1)
        chosen = full[range(len(c.token_ids)), c.token_ids]
        assert torch.allclose(torch.tensor(c.full_log_probs), chosen, atol=1e-3)
        if temperature == 0.8:
            kept = full.topk(5).values
            assert bool((chosen >= kept[:, -1] - 1e-4).all())
            chosen = chosen - kept.logsumexp(-1)
        assert torch.allclose(torch.tensor(c.log_probs), chosen, atol=1e-3)


def test_greedy_takes_the_likeliest_and_is_scored_at_temperature_one(model, engine):
    for c in engine.generate(requests(SamplingParams(do_sample=False, max_new_tokens=8, temperature=0.5), count=1)):
        rows = logits(model, PROMPT, c.token_ids)
        assert rows.argmax(-1).tolist() == c.token_ids
        assert torch.allclose(torch.tensor(c.full_log_probs), own_log_probs(model, PROMPT, c.token_ids), atol=1e-3)


def test_a_sample_depends_on_what_it_is_not_on_its_company(engine):
    together = tokens(engine.generate(requests()))
    alone = {}
    for request in reversed(requests()):
        for index in request.sample_indices:
            alone |= tokens(engine.generate([replace(request, sample_indices=(index,))]))
    assert alone == together
    assert len({tuple(t) for t in together.values()}) == len(together), "every sample is another one"
    later = tokens(engine.generate(requests(step=1)))
    assert later != together
    assert tokens(engine.generate(requests(replace(PLAIN, seed=9)))) not in (together, later)


def test_frequencies_are_those_of_the_distribution(model, engine):
    params = SamplingParams(max_new_tokens=1, ignore_eos=True, temperature=0.5)
    count = 1500
    done = engine.generate(requests(params, count=1, samples=tuple(range(count))))
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in done]), minlength=331)
    wanted = count * (logits(model, PROMPT, [0])[0] / 0.5).softmax(-1)
    often = wanted >= 5
    assert int(often.sum()) > 20
    pooled, seen = (torch.cat([x[often], x[~often].sum()[None]]) for x in (wanted, counts))
    chi_squared, freedom = float(((seen - pooled) ** 2 / pooled).sum()), len(pooled) - 1
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5


def test_why_samples_end(model, engine):
    greedy = SamplingParams(do_sample=False, max_new_tokens=10, ignore_eos=True)
    (whole,) = engine.generate(requests(greedy, 1, (0,)))
    assert whole.finish_reason == "length"
    assert len(whole.token_ids) == 10
    third = whole.token_ids[2]
    first = whole.token_ids.index(third)
    (stopped,) = engine.generate(requests(replace(greedy, stop_token_ids=(third,)), 1, (0,)))
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", whole.token_ids[: first + 1])
    (by_text,) = engine.generate(requests(replace(greedy, stop_strings=(f"word{third},",)), 1, (0,)))
    assert (by_text.finish_reason, by_text.token_ids) == ("stop_string", whole.token_ids[: first + 1])
    (later,) = engine.generate(requests(replace(greedy, stop_token_ids=(third,), min_new_tokens=8), 1, (0,)))
    assert len(later.token_ids) >= 8
    wanted = own_log_probs(model, PROMPT, later.token_ids)
    assert torch.allclose(torch.tensor(later.full_log_probs), wanted, atol=1e-3), "barring a stop token does not count"


def test_aborted_and_overdue_samples_come_out_as_they_are(engine):
    endless = SamplingParams(max_new_tokens=200, ignore_eos=True)
    first, second = requests(endless, 2)
    engine.submit(first)
    engine.submit(replace(second, deadline_s=0.3))
    engine.step()
    engine.abort(["r0"])
    done = []
    began = time.monotonic()
    while not engine.idle:
        done += engine.step()
    assert {c.finish_reason for c in done if c.request_id == "r0"} == {"aborted"}
    assert {c.finish_reason for c in done if c.request_id == "r1"} <= {"deadline", "length"}
    assert len(done) == 4
    assert all(len(c.token_ids) == len(c.log_probs) == len(c.full_log_probs) for c in done)
    assert time.monotonic() - began < 30


def test_closing_generate_frees_what_it_held(engine):
    running = engine.generate(requests(SamplingParams(max_new_tokens=200, ignore_eos=True), 8, (0, 1, 2, 3)))
    running.close()
    assert engine.idle
    assert len(list(engine.generate(requests(count=1)))) == 2


def test_samples_in_the_middle_go_on_under_new_weights(model, engine):
    (request,) = requests(SamplingParams(max_new_tokens=200, ignore_eos=True), 1, (0,))
    engine.submit(request)
    engine.step()
    engine.update_weights(2, tiny_llama(seed=1).named_parameters())
    done = []
    while not engine.idle:
        done += engine.step()
    ((old, few), (new, rest)) = done[0].versions
    assert (old, new, few + rest) == (1, 2, 200)
    assert few > 0
    before = own_log_probs(model, PROMPT, done[0].token_ids)[:few]
    assert torch.allclose(torch.tensor(done[0].full_log_probs[:few]), before, atol=1e-3)


def test_what_can_never_run_is_refused_at_once(engine):
    with pytest.raises(DataError, match="do not fit"):
        engine.check(requests(SamplingParams(max_new_tokens=255))[0])
    with pytest.raises(DataError, match="outside the vocabulary of 331"):
        engine.check(requests(prompt=[331])[0])


def test_sleep_and_wake(engine):
    before = tokens(engine.generate(requests()))
    engine.sleep()
    with pytest.raises(WorkerError, match="asleep"):
        engine.submit(requests()[0])
    engine.wake()
    assert tokens(engine.generate(requests())) == before


# ---- deaths ----


def test_a_process_that_is_killed_or_hangs_is_replaced_and_the_samples_are_the_same(model):
    engine = new_engine(model, answer_s=8.0)
    endless = requests(SamplingParams(max_new_tokens=150, ignore_eos=True), 8)
    undisturbed = tokens(engine.generate(endless))
    for how in (signal.SIGKILL, signal.SIGSTOP):
        victim, done = engine.pid, []
        for request in endless:
            engine.submit(request)
        done += engine.step()
        assert not engine.idle, "the death must fall into a generation"
        os.kill(victim, how)
        while not engine.idle:
            done += engine.step()
        assert tokens(done) == undisturbed
        assert engine.pid != victim
        assert not alive(victim)
    assert engine.statistics()["replaced"] == 2
    engine.replaced = 99
    engine.submit(endless[0])
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="SIGKILL"):
        engine.step()
    engine.close()


ENDS = {
    "exit": "sys.exit(3)",
    "error": "raise RuntimeError('a slot that fails')",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("end", ENDS)
def test_no_process_is_left_whatever_ends_the_slot(tmp_path, end):
    script = tmp_path / "slot.py"
    script.write_text(
        "import os, signal, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_vllm_engine import new_engine, requests, SamplingParams\n"
        "from vllm_models import tiny_llama, word_tokenizer\n"
        "engine = new_engine(tiny_llama())\n"
        "engine.submit(requests(SamplingParams(max_new_tokens=200, ignore_eos=True))[0])\n"
        "engine.step()\n"
        "print(engine.pid, flush=True)\n"
        f"{ENDS[end]}\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    pid = int(done.stdout.split()[-1])
    until = time.monotonic() + 10
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


# ---- what cannot be ----


def test_a_head_that_vllm_cannot_compute_is_told_at_the_start():
    with pytest.raises(ConfigError, match=r"cannot generate with LlamaForCausalLM[\s\S]*name=native"):
        new_engine(tiny_llama(hidden_size=48, num_attention_heads=2, head_dim=24))


def test_an_architecture_that_vllm_does_not_have(model):
    unknown = tiny_llama()
    unknown.config.architectures = ["QuadrigaOwnForCausalLM"]
    with pytest.raises(ConfigError, match=r"QuadrigaOwnForCausalLM[\s\S]*name=native"):
        new_engine(unknown)


def test_more_memory_than_there_is(model):
    with pytest.raises(ResourceError, match="gpu_memory_utilization"):
        new_engine(model, engine_kwargs={"kv_cache_memory_bytes": 1 << 50})


def test_arguments_of_vllm(model):
    with pytest.raises(ConfigError, match="max_num_seqs has a key of its own"):
        new_engine(model, engine_kwargs={"max_num_seqs": 3})
    with pytest.raises(ConfigError, match="no_such_argument"):
        new_engine(model, engine_kwargs={"no_such_argument": 3})
