"""State that a checkpoint needs, and weights as others see them."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from engine_cases import BUDGET, mini_batch, ppo_loss, sgd_like, tiny_causal_lm, tiny_critic, tiny_policy
from peft import LoraConfig, get_peft_model

from quadriga.config.schema_models import OptimConfig
from quadriga.engine import TrainingEngine
from quadriga.errors import CheckpointError, WorkerError
from quadriga.models.token_model import PolicyModel


def new_engine(seed=0):
    optim = OptimConfig(lr=1e-2, lr_scheduler_type="cosine", lr_warmup_steps=2, betas=[0.9, 0.999])
    return TrainingEngine(tiny_policy(seed), optim=optim, total_steps=6)


def train(engine, steps):
    losses = []
    for number in steps:
        data = mini_batch(seed=number)
        losses.append(engine.train_mini_batch(data, ppo_loss(), 40, with_entropy=True)["loss"])
        engine.end_step()
    return losses


def assert_equal_weights(one, other):
    other = dict(other.full_weights())
    for name, weight in one.full_weights():
        assert torch.equal(weight, other[name]), name


def test_saved_and_resumed_is_bit_equal_to_never_stopped():
    straight = new_engine()
    expected = train(straight, range(6))
    first = new_engine()
    train(first, range(3))
    state = copy.deepcopy(first.state_dict())
    draw = torch.rand(3)
    resumed = new_engine(seed=7)
    resumed.load_state_dict(state)
    assert torch.equal(torch.rand(3), draw), "the random state is part of it"
    assert train(resumed, range(3, 6)) == expected[3:]
    assert_equal_weights(resumed, straight)
    assert resumed.learning_rate == straight.learning_rate
    assert resumed.optimizer_steps == 6


def test_a_state_without_an_optimiser_cannot_continue_a_training():
    state = TrainingEngine(tiny_policy()).state_dict()
    with pytest.raises(CheckpointError, match="no optimiser"):
        new_engine().load_state_dict(state)


def test_a_state_of_another_model_is_refused():
    critic = TrainingEngine(tiny_critic(), optim=sgd_like())
    with pytest.raises(CheckpointError, match="does not fit"):
        new_engine().load_state_dict(critic.state_dict())


def test_whole_weights_load_into_the_hugging_face_model():
    engine = new_engine()
    train(engine, range(1))
    model = tiny_causal_lm(seed=5)
    model.load_state_dict(dict(engine.full_weights()), strict=False)
    model.tie_weights()
    ours, _ = engine.log_probs(mini_batch(), 1.0, BUDGET)
    theirs, _ = TrainingEngine(PolicyModel(model)).log_probs(mini_batch(), 1.0, BUDGET)
    assert torch.equal(ours, theirs)


def test_whole_weights_can_be_cast_on_the_way():
    assert {weight.dtype for _, weight in new_engine().full_weights(torch.bfloat16)} == {torch.bfloat16}


def lora_engine(base):
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear"))
    return TrainingEngine(PolicyModel(adapted), optim=sgd_like())


def test_a_lora_adapter_learns_and_its_reference_stays_the_start():
    start, _ = TrainingEngine(tiny_policy()).log_probs(mini_batch(), 1.0, BUDGET)
    engine = lora_engine(tiny_causal_lm())
    for number in range(2):
        engine.train_mini_batch(mini_batch(seed=number), ppo_loss(), BUDGET, with_entropy=True)
    moved, _ = engine.log_probs(mini_batch(), 1.0, BUDGET)
    assert (moved - start).abs().max() > 1e-3
    with engine.adapter_off():
        reference, _ = engine.log_probs(mini_batch(), 1.0, BUDGET)
    torch.testing.assert_close(reference, start, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_whole_weights_of_a_lora_policy_are_merged_and_plainly_named(family):
    def base():
        if family == "qwen2":
            return tiny_causal_lm()
        torch.manual_seed(0)
        small = {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 64}
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(**small, **no_dropout, bos_token_id=None, eos_token_id=1)
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="quadriga_packed")

    engine = lora_engine(base())
    engine.train_mini_batch(mini_batch(), ppo_loss(), BUDGET, with_entropy=True)
    plain = base()
    missing, unexpected = plain.load_state_dict(dict(engine.full_weights()), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    ours, _ = engine.log_probs(mini_batch(), 1.0, BUDGET)
    merged, _ = TrainingEngine(PolicyModel(plain)).log_probs(mini_batch(), 1.0, BUDGET)
    torch.testing.assert_close(ours, merged, atol=1e-5, rtol=1e-5)


def test_a_policy_without_an_adapter_has_nothing_to_switch_off():
    with pytest.raises(WorkerError, match="adapter"):
        TrainingEngine(tiny_critic()).adapter_off()
