"""The engine computes what each family of models computes itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from rollout_models import CONFIGS, VOCAB, own_log_probs, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from quadriga.errors import ConfigError
from quadriga.models.kernels.cpu.library import SWITCH, kernels
from quadriga.rollout import Request, SamplingParams, create_engine


@pytest.fixture(params=["kernels", "no kernels"])
def kernels_or_not(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With the kernels in C, and as on a machine without a compiler."""
    monkeypatch.setenv(SWITCH, str(int(request.param == "kernels")))
    kernels.cache_clear()
    yield
    kernels.cache_clear()


@pytest.mark.usefixtures("kernels_or_not")
@pytest.mark.parametrize("family", CONFIGS)
def test_log_probs_are_those_of_the_models_own_forward_pass(family: str) -> None:
    """Prompts shorter and longer than a block and a window, shared by three samples, cut into chunks, preempted."""
    model = tiny_model(family)
    engine = create_engine(
        "native", module=model, max_num_seqs=8, max_num_batched_tokens=40, kv_cache_tokens=288, block_size=16
    )
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (1, 16, 30, 67)]
    params = SamplingParams(max_new_tokens=40, temperature=0.9)
    requests = [Request(str(i), p, params, (0, i), (0, 1, 2)) for i, p in enumerate(prompts)]
    completions = list(engine.generate(requests))
    assert len(completions) == 12
    assert engine.statistics()["preemptions"] > 0
    for c in completions:
        own = own_log_probs(model, prompts[int(c.request_id)], c.token_ids, 0.9)
        torch.testing.assert_close(torch.tensor(c.full_log_probs), own, atol=1e-5, rtol=1e-5)
        assert c.log_probs == c.full_log_probs


@pytest.mark.usefixtures("kernels_or_not")
@pytest.mark.parametrize("family", ["gpt2", "gemma2_softcap_window", "qwen3"])
def test_slots_change_no_bit_in_other_families(family: str) -> None:
    model = tiny_model(family)
    params = SamplingParams(max_new_tokens=30)
    requests = [Request(str(i), list(range(5 + 9 * i)), params, (0, i), (0, 1, 2)) for i in range(4)]
    seen = []
    for slots in (3, 64):
        engine = create_engine("native", module=model, max_num_seqs=slots, max_model_len=96, block_size=16)
        seen.append({(c.request_id, c.sample_index): c for c in engine.generate(requests)})
    assert seen[0] == seen[1]


def test_the_module_can_be_trained_between_two_completions() -> None:
    """Dropout, attention and gradients of the trainer are untouched while a generation is under way."""
    model = tiny_model("gpt2").train()
    model.config._attn_implementation = "sdpa"
    engine = create_engine("native", module=model, max_num_seqs=2, max_model_len=64)
    requests = [Request(str(i), [1, 2, 3], SamplingParams(max_new_tokens=4 + i), (0, i)) for i in range(3)]
    for _ in engine.generate(requests):
        assert model.training
        assert model.config._attn_implementation == "sdpa"
        loss = model(input_ids=torch.tensor([[1, 2, 3, 4]]), labels=torch.tensor([[1, 2, 3, 4]])).loss
        loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_cache_is_written_in_the_models_dtype() -> None:
    model = tiny_model("qwen2").to(torch.bfloat16)
    engine = create_engine("native", module=model, max_model_len=64, max_num_seqs=4)
    (c,) = engine.generate([Request("a", [1, 2, 3, 4], SamplingParams(max_new_tokens=20))])
    own = own_log_probs(model.float(), [1, 2, 3, 4], c.token_ids)
    torch.testing.assert_close(torch.tensor(c.full_log_probs), own, atol=0.3, rtol=0)


def test_positions_that_depend_on_the_batch_are_refused() -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    )
    with pytest.raises(ConfigError, match="dynamic positions"):
        create_engine("native", module=AutoModelForCausalLM.from_config(config))


def test_layers_of_another_kind_are_refused_by_name() -> None:
    model = tiny_model("qwen2")
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(ConfigError, match="linear_attention"):
        create_engine("native", module=model)


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    class OwnAttention(type(tiny_model("qwen2"))):  # type: ignore[misc]
        _supports_attention_backend = False

    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(ConfigError, match="transformers' interface"):
        create_engine("native", module=OwnAttention(config))


def test_a_module_that_computes_something_else_is_found_out_at_start() -> None:
    """A layer that looks at its neighbours in the batch, as recurrent layers do, cannot hide from the probe."""
    model = tiny_model("qwen2")
    model.model.layers[0].register_forward_hook(lambda _, __, out: out + 0.1 * out.roll(1, dims=1))
    with pytest.raises(ConfigError, match="log-probs that differ"):
        create_engine("native", module=model)
