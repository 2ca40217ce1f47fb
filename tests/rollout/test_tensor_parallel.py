"""One model over two and four processes generates what one process does: the same tokens, the same log-probs."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import in_a_set, plain, sharded
from rollout_models import CONFIGS, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from quadriga.controller.device_gate import DeviceGate
from quadriga.errors import ConfigError, WorkerError
from quadriga.models.outline import outline
from quadriga.rollout.interface import Request, SamplingParams
from quadriga.rollout.native.engine import NativeEngine
from quadriga.rollout.native.sharded import Cut, ShardedModel
from quadriga.rollout.rank_set import Meeting, RankSet, SetBroken, SetOpening
from quadriga.rollout.set_service import FollowingService, LeadingService
from quadriga.rollout.weights import checksum

FAMILIES = ["llama", "qwen2", "qwen3", "gemma2_softcap_window", "qwen3_moe", "mixtral"]


def requests() -> list[Request]:
    """Greedy and sampled, alone and in groups, one longer than a chunk."""
    prompts = [[(31 * i + 7 * n) % 331 for i in range(n)] for n in (3, 20, 41)]
    greedy = SamplingParams(max_new_tokens=12, do_sample=False, ignore_eos=True)
    drawn = SamplingParams(max_new_tokens=12, temperature=0.9, seed=5)
    narrow = SamplingParams(max_new_tokens=9, temperature=1.2, top_p=0.8, top_k=40, seed=5)
    asked = [Request(f"greedy{i}", ids, greedy, uid=(0, i)) for i, ids in enumerate(prompts)]
    asked += [Request(f"drawn{i}", ids, drawn, uid=(0, i), sample_indices=(0, 1, 2)) for i, ids in enumerate(prompts)]
    return [*asked, Request("narrow", prompts[1], narrow, uid=(1, 1), sample_indices=(0, 1))]


def alone(family: str) -> dict[tuple[str, int], Any]:
    """What one process with the whole model generates."""
    engine = NativeEngine(
        tiny_model(family), [7], max_num_seqs=8, max_model_len=96, block_size=8, max_num_batched_tokens=32
    )
    return plain(engine.generate(requests()))


def together(ranks: RankSet, families: list[str]) -> dict[str, Any]:
    """Each family in turn: completions, weights held here and in the whole model, checksum of the set."""
    told = {}
    for family in families:
        model, engine = sharded(family, ranks, max_num_batched_tokens=32)
        completions = plain(engine.generate(requests()))
        held = sum(p.numel() for p in model.module.parameters())
        whole = sum(p.numel() for p in outline(tiny_model(family)).parameters())
        told[family] = (completions, held, whole, engine.update_weights(2).checksum)
    return told


def assert_alike(mine: dict[tuple[str, int], Any], theirs: dict[tuple[str, int], Any]) -> None:
    assert mine.keys() == theirs.keys()
    for key, (tokens, log_probs, reason) in theirs.items():
        assert mine[key][0] == tokens, key
        assert mine[key][2] == reason, key
        assert torch.allclose(torch.tensor(mine[key][1]), torch.tensor(log_probs), rtol=0, atol=1e-5), key


def test_two_processes_generate_what_one_does():
    told = in_a_set(2, together, FAMILIES)
    for family in FAMILIES:
        expected = alone(family)
        for of_rank in told:
            completions, held, whole, total = of_rank[family]
            assert_alike(completions, expected)
            assert held < 0.6 * whole, f"{family}: a member holds {held} of {whole} weights"
            assert total == checksum(tiny_model(family).named_parameters()), family


@pytest.mark.slow
def test_four_processes_repeat_two_key_heads():
    assert CONFIGS["llama"]().num_key_value_heads == 2
    told = in_a_set(4, together, FAMILIES)
    for family in FAMILIES:
        expected = alone(family)
        for of_rank in told:
            completions, held, whole, total = of_rank[family]
            assert_alike(completions, expected)
            assert held < 0.4 * whole, f"{family}: a member holds {held} of {whole} weights"
            assert total == checksum(tiny_model(family).named_parameters()), family


def serve(ranks: RankSet, meeting: Meeting) -> Any:
    """The services of a set, with callers at the leader: samples by request, and what the engine was left with."""
    driver = RankSet(ranks.rank, ranks.size, meeting, 120.0)  # lets calls begin at the same time everywhere
    _, engine = sharded("llama", ranks)
    gate = DeviceGate()
    service: Any = (LeadingService if ranks.leads else FollowingService)(engine, ranks, gate, frees_cache=True)
    told: dict[str, Any] = {}
    if ranks.leads:
        long = SamplingParams(max_new_tokens=60, seed=3, ignore_eos=True)
        service.submit([Request("late", [5, 6, 7], long, deadline_s=0.0)])
        service.submit([Request("ended", [8, 9], long), Request("whole", [9, 9, 9], long)])
        service.abort(["ended"])
        told = received(service, 3)
    driver.smallest(0, torch.device("cpu"))
    with gate.call():
        told["echo"] = service.take_weights(2, tiny_model("llama", seed=1).named_parameters()).version
    if ranks.leads:
        service.submit(
            [Request("after", [9, 9, 9], SamplingParams(max_new_tokens=5, do_sample=False, ignore_eos=True))]
        )
        told |= received(service, 1)
        service.close()
    else:
        service._thread.join(60)
        assert service._failure is None
    told["asleep"], told["version"] = engine.asleep, engine.version
    return told


def received(service: Any, count: int) -> dict[str, Any]:
    samples: list[Any] = []
    while len(samples) < count:
        samples += service.take(10).samples
    return {s.request_id: (s.finish_reason, len(s.token_ids), s.versions) for s in samples}


def test_the_services_of_a_set_answer_as_one():
    opening = SetOpening(60.0)
    leader, follower = in_a_set(2, serve, opening.meeting, timeout_s=120.0)
    assert leader["late"][0] == "deadline"
    assert leader["ended"][0] == "aborted"
    assert leader["whole"] == ("length", 60, ((1, 60),))
    assert leader["after"] == ("length", 5, ((2, 5),))
    for member in (leader, follower):
        assert (member["echo"], member["version"], member["asleep"]) == (2, 2, True)


def take_wrong(ranks: RankSet) -> list[str]:
    """What a set says when its second member keeps another part of a weight, another copy of one, or is not sent one."""
    model, engine = sharded("llama", ranks)
    weights, said = dict(tiny_model("llama", seed=1).named_parameters()), []
    up, norm = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
    right = model.cuts[up]

    def attempt(sent: dict[str, Any]) -> None:
        try:
            engine.update_weights(2, sent.items())
        except WorkerError as error:
            said.append(str(error))

    if ranks.rank == 1:
        model.cuts[up] = Cut(dim=0, start=0, length=48)
    attempt(weights)
    model.cuts[up] = right
    attempt({**weights, norm: weights[norm] + 1} if ranks.rank == 1 else weights)
    attempt({name: weight for name, weight in weights.items() if name != norm})
    attempt({**weights, norm: weights[norm][:5]})
    assert engine.update_weights(3, weights.items()).checksum == checksum(weights.items())
    return said


def test_a_member_that_holds_something_else_is_named_by_its_weight():
    for said in in_a_set(2, take_wrong):
        assert "version 2" in said[0]
        assert "what was sent as model.layers.0.mlp.up_proj.weight" in said[0]
        assert "what was sent as model.norm.weight" in said[1]
        assert "1 weights were not sent, the first is 'model.norm.weight'" in said[2]
        assert "'model.norm.weight' has shape (5,)" in said[3]


def outlive(ranks: RankSet, how: str, meeting: Meeting) -> tuple[str, float]:
    """Rank 1 leaves, or waits for ever; rank 0 says what it learns of that, and after how long."""
    ranks.smallest(0, torch.device("cpu"))  # both are there
    hasty = RankSet(ranks.rank, ranks.size, meeting, timeout_s=4.0)
    hasty.add_up(torch.ones(3))
    if ranks.rank == 1:
        if how == "hangs":
            time.sleep(12)
        return "", 0.0  # and its process ends
    began = time.monotonic()
    try:
        while True:
            hasty.add_up(torch.ones(3))
    except SetBroken as broken:
        return str(broken), time.monotonic() - began


@pytest.mark.parametrize("how", ["leaves", "hangs"])
def test_a_lost_member_is_noticed_within_the_deadline(how: str):
    opening = SetOpening(60.0)
    (said, after_s), _ = in_a_set(2, outlive, how, opening.meeting)
    assert "lost a member" in said
    assert after_s < 8.0, said


def grow(ranks: RankSet) -> float:
    """MB by which the most memory of this process grows when it takes a model of 200 MB and proves that it can run it."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=128,
    )
    with torch.device("meta"):
        whole = LlamaForCausalLM(config)

    def weights() -> Any:
        for name, weight in whole.named_parameters():
            yield name, torch.full(weight.shape, 0.01)

    before = memory_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    module = LlamaForCausalLM(config) if ranks.size == 1 else ShardedModel(whole, ranks, "cpu", torch.float32).module
    engine = NativeEngine(module, [], max_num_seqs=2, kv_cache_tokens=256)
    engine.update_weights(1, weights())
    return memory_mb("VmHWM") - before


def memory_mb(what: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(what))


def test_no_member_ever_holds_the_whole_model():
    """An engine on a CPU has its weights twice, the second time as its kernels want them. A member has half of both."""
    (alone_mb,) = in_a_set(1, grow)
    assert alone_mb > 200
    for member_mb in in_a_set(2, grow):
        assert member_mb < 0.7 * alone_mb, f"{member_mb:.0f} MB in a member, {alone_mb:.0f} MB in a process alone"


def test_sets_listen_on_loopback_alone():
    opening = SetOpening(5.0)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as other:
        other.bind(("127.0.0.2", opening.meeting.port))  # free there: not taken on every address
    assert opening.meeting.name != SetOpening(5.0).meeting.name


@pytest.mark.parametrize(
    ("family", "size", "why"),
    [
        ("llama", 3, "does not share out 4 attention heads and 2 key and value heads"),
        ("gpt2", 2, "no tensor parallel plan"),
        ("phi3", 2, "its plan says rowwise_split_input of"),
    ],
)
def test_models_that_cannot_be_shared_out_are_named(family: str, size: int, why: str):
    class Alone:
        rank, leads = 0, True

    ranks: Any = Alone()
    ranks.size = size
    with pytest.raises(ConfigError, match=why):
        ShardedModel(outline(tiny_model(family)), ranks, "cpu", torch.float32)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("halves", [False, True])
def test_parts_put_together_are_the_whole_weight(size: int, halves: bool):
    whole = torch.arange(2 * 12 * 3.0).view(2, 12, 3)
    each = -(-(6 if halves else 12) // size)
    cuts = [Cut(1, rank * each, each * (2 if halves else 1), halves) for rank in range(size)]
    parts = [cut.of(whole) for cut in cuts]
    assert {part.shape for part in parts} == {parts[0].shape}
    if halves:
        first, second = (torch.cat([part.chunk(2, 1)[i] for part in parts], 1)[:, :6] for i in (0, 1))
        assert torch.equal(torch.cat([first, second], 1), whole)
    else:
        assert torch.equal(torch.cat(parts, 1)[:, :12], whole)
    assert sum(checksum([("w", part)]) for part in parts) % (1 << 64) == checksum([("w", whole)])
