"""The program for CPUs computes what the module computes, with the weights of now, or is not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rollout_models import VOCAB, own_log_probs, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from quadriga.models.kernels.cpu.library import kernels
from quadriga.rollout import Completion, Request, SamplingParams, create_engine
from quadriga.rollout.native.program import Program

pytestmark = pytest.mark.skipif(kernels() is None, reason="no C compiler on this machine")

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
}
MODELS = {
    "a head for each": LlamaConfig(**SHAPE, num_key_value_heads=6, head_dim=20),
    "one head for all, biases": LlamaConfig(**SHAPE, num_key_value_heads=1, attention_bias=True, mlp_bias=True),
    "stretched positions": LlamaConfig(
        **SHAPE, num_key_value_heads=2, head_dim=64, rope_parameters={"rope_type": "linear", "factor": 2.0}
    ),
    "tied, biases": Qwen2Config(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
    "normed heads": Qwen3Config(**SHAPE, num_key_value_heads=3, head_dim=80),
    "window": MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=21),
}


def made(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))  # norms and biases are not their trivial selves
    return model


def asked(samples: int = 3, new: int = 20) -> list[Request]:
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    return [Request(str(i), list(range(3 + 20 * i)), params, (0, i), tuple(range(samples))) for i in range(3)]


def generated(engine: Any, requests: list[Request]) -> dict[tuple[str, int], Completion]:
    return {(c.request_id, c.sample_index): c for c in engine.generate(requests)}


def make(model: Any, **options: Any) -> Any:
    return create_engine("native", module=model, max_model_len=128, block_size=16, **options)


def has_own_log_probs(model: Any, completions: dict[tuple[str, int], Completion]) -> bool:
    gaps = [
        own_log_probs(model, list(range(3 + 20 * int(name))), c.token_ids) - torch.tensor(c.full_log_probs)
        for (name, _), c in completions.items()
    ]
    return torch.cat(gaps).abs().max().item() < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_those_of_the_module(name: str) -> None:
    model = made(MODELS[name])
    engine = make(model)
    found = generated(engine, asked())
    assert engine.computes_by_program
    assert has_own_log_probs(model, found)


@pytest.mark.parametrize("name", ["tied, biases", "normed heads"])
def test_threads_and_rows_change_no_bit(name: str) -> None:
    """Many rows a thread, which takes them through all layers, and few, when threads share the products."""
    model, before, results = made(MODELS[name]), torch.get_num_threads(), []
    try:
        for threads, slots in ((1, 128), (1, 9), (2, 128), (2, 50), (3, 9)):
            torch.set_num_threads(threads)
            results.append(generated(make(model, max_num_seqs=slots, check=False), asked(samples=40, new=12)))
    finally:
        torch.set_num_threads(before)
    assert all(result == results[0] for result in results[1:])


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 7}, {"kv_cache_tokens": 160}])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_and_preemption_change_no_bit(name: str, options: dict[str, int]) -> None:
    """A token is computed in the same way in a prompt, in a piece of one, and as a new one."""
    model = made(MODELS[name])
    whole, engine = make(model), make(model, max_num_seqs=6, **options)
    assert generated(engine, asked()) == generated(whole, asked())
    assert (engine.statistics()["preemptions"] > 0) == ("kv_cache_tokens" in options)


def halve(model: Any) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5)


def replace(model: Any) -> None:
    for weight in model.parameters():
        weight.data = weight.data * 0.5


def tell(model: Any) -> None:
    for weight in model.parameters():
        weight.data.mul_(0.5)  # of this a tensor does not tell


@pytest.mark.parametrize(("change", "told"), [(halve, False), (replace, False), (tell, True)])
def test_new_weights_are_used_at_once(change: Callable[[Any], None], told: bool) -> None:
    model = tiny_model("qwen3")
    engine = make(model)
    before = generated(engine, asked())
    change(model)
    if told:
        engine.update_weights(0)
    after = generated(engine, asked())
    assert engine.computes_by_program
    assert has_own_log_probs(model, after)
    assert before != after


class Doubled(nn.Linear):
    """Somebody's own linear layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def with_another_linear(model: Any) -> None:
    old = model.model.layers[1].mlp.down_proj
    new = Doubled(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    model.model.layers[1].mlp.down_proj = new


def with_a_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: 2 * output)


def with_a_weight_more(model: Any) -> None:
    model.model.layers[0].self_attn.extra = nn.Linear(3, 3)


def with_a_wrapped_forward(model: Any) -> None:
    norm = model.model.norm
    plain = norm.forward
    norm.forward = lambda x: 2 * plain(x)


@pytest.mark.parametrize("when", ["before the start", "later"])
@pytest.mark.parametrize("change", [with_another_linear, with_a_hook, with_a_weight_more, with_a_wrapped_forward])
def test_what_the_program_does_not_know_is_left_to_the_module(change: Callable[[Any], None], when: str) -> None:
    model = tiny_model("llama")
    if when == "before the start":
        change(model)
    engine = make(model)
    assert engine.computes_by_program == (when == "later")
    if when == "later":
        change(model)
    found = generated(engine, asked())
    assert not engine.computes_by_program
    assert has_own_log_probs(model, found)


@pytest.mark.parametrize("family", ["gemma", "gpt2", "gemma3_window"])
def test_other_families_are_left_to_the_module(family: str) -> None:
    assert not make(tiny_model(family)).computes_by_program


@pytest.mark.parametrize("factor", [1.5, float("nan")])
def test_a_wrong_program_is_not_used(factor: float, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    right = Program._fill

    def wrong(self: Program, target: Any, layer: Any) -> None:
        right(self, target, layer)
        target.scale *= factor

    monkeypatch.setattr(Program, "_fill", wrong)
    model = tiny_model("qwen2")
    engine = make(model)
    assert [r.levelname for r in caplog.records if "program for CPUs differs" in r.message] == ["WARNING"]
    engine.sleep()
    engine.wake()
    found = generated(engine, asked())
    assert not engine.computes_by_program
    assert has_own_log_probs(model, found)
