"""One optimiser step against a plain reference: one padded row at a time, whole logits, torch's own AdamW."""

from __future__ import annotations

import pytest
import torch
from engine_cases import (
    BUDGET,
    critic_loss,
    gradients,
    mini_batch,
    ppo_loss,
    sgd_like,
    tiny_causal_lm,
    tiny_critic,
    tiny_policy,
)

from quadriga.engine import BatchCounts, TrainingEngine
from quadriga.errors import DataError, WorkerError


def plain_outputs(model, data, temperature):
    """Log-probs and entropies `[B, R]` of the Hugging Face model alone, row by row."""
    model.set_attn_implementation("eager")
    batch, width = data.batch, data.batch["response_mask"].shape[1]
    log_probs, entropies = [], []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"]):
        first = int(mask.argmax())
        logits = model(input_ids=ids[None, first:], use_cache=False).logits[0, -width - 1 : -1] / temperature
        log_p = logits.log_softmax(-1)
        log_probs.append(log_p.gather(1, ids[-width:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return {"log_probs": torch.stack(log_probs), "entropy": torch.stack(entropies)}


def plain_counts(data):
    mask = data.batch["response_mask"]
    return BatchCounts(int(mask.sum()), int(mask.any(-1).sum()), mask.shape[1])


def plain_ppo_step(data, mode, temperature=1.0):
    model = tiny_causal_lm()
    loss, metrics = ppo_loss(mode)(
        plain_outputs(model, data, temperature), dict(data.batch.items()), plain_counts(data)
    )
    loss.backward()
    grads = {f"causal_lm.{name}": p.grad.clone() for name, p in model.named_parameters()}
    return loss.item(), {k: float(v) for k, v in metrics.items()}, grads, model


def assert_same_gradients(ours, expected, tolerance=1e-6):
    assert ours.keys() == expected.keys()
    for name in expected:
        assert (ours[name] - expected[name]).abs().max() <= tolerance, name


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_policy_step_equals_the_plain_reference(mode, temperature):
    data = mini_batch()
    expected_loss, expected_metrics, expected_grads, _ = plain_ppo_step(data, mode, temperature)
    engine = TrainingEngine(tiny_policy(), optim=sgd_like(), grad_clip=None)
    metrics = engine.train_mini_batch(data, ppo_loss(mode), 30, temperature=temperature, with_entropy=True)
    assert metrics["loss"] == pytest.approx(expected_loss, abs=1e-5)
    for name, value in expected_metrics.items():
        assert metrics[name] == pytest.approx(value, abs=1e-5), name
    assert_same_gradients(gradients(engine), expected_grads, 1e-5 if mode == "seq-mean-token-sum" else 2e-6)


def test_critic_step_equals_the_plain_reference():
    data = mini_batch()
    critic = tiny_critic()
    critic.trunk.set_attn_implementation("eager")
    batch, width = data.batch, data.batch["response_mask"].shape[1]
    values = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"]):
        hidden = critic.trunk(input_ids=ids[None, int(mask.argmax()) :]).last_hidden_state[0, -width - 1 : -1]
        values.append(critic.head(hidden)[:, 0])
    loss, _ = critic_loss({"values": torch.stack(values)}, dict(batch.items()), plain_counts(data))
    loss.backward()
    expected = {name: p.grad for name, p in critic.named_parameters()}

    engine = TrainingEngine(tiny_critic(), optim=sgd_like(), grad_clip=None)
    metrics = engine.train_mini_batch(data, critic_loss, 30)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert_same_gradients(gradients(engine), expected, 2e-6)
    mask = batch["response_mask"].bool()
    ours = TrainingEngine(tiny_critic()).values(data, 30)
    torch.testing.assert_close(ours[mask], torch.stack(values).detach()[mask], atol=1e-5, rtol=1e-5)


def test_log_probs_and_entropy_equal_the_plain_reference():
    data = mini_batch()
    expected = plain_outputs(tiny_causal_lm(), data, 0.7)
    log_probs, entropy = TrainingEngine(tiny_policy()).log_probs(data, 0.7, 25, with_entropy=True)
    mask = data.batch["response_mask"].bool()
    torch.testing.assert_close(log_probs[mask], expected["log_probs"].detach()[mask], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy[mask], expected["entropy"].detach()[mask], atol=1e-5, rtol=1e-5)
    assert not log_probs[~mask].any()


@pytest.mark.parametrize("limits", [{"max_tokens": 1}, {"max_tokens": 25}, {"max_tokens": BUDGET, "max_rows": 5}])
def test_any_cut_into_micro_batches_gives_the_same_gradient(limits):
    data = mini_batch()
    whole = TrainingEngine(tiny_policy(), optim=sgd_like(), grad_clip=None)
    whole_metrics = whole.train_mini_batch(data, ppo_loss(), BUDGET, with_entropy=True)
    cut = TrainingEngine(tiny_policy(), optim=sgd_like(), grad_clip=None)
    cut_metrics = cut.train_mini_batch(data, ppo_loss(), with_entropy=True, **limits)
    assert whole_metrics["micro_batches"] == 1 < cut_metrics["micro_batches"]
    assert cut_metrics["loss"] == pytest.approx(whole_metrics["loss"], abs=1e-6)
    assert_same_gradients(gradients(cut), gradients(whole))


@pytest.mark.parametrize("max_tokens", [20, 60, BUDGET])
def test_rows_that_share_their_prompt_give_the_gradient_of_whole_rows(max_tokens):
    data = mini_batch(group=4)
    expected_loss, _, expected_grads, _ = plain_ppo_step(data, "token-mean")
    engine = TrainingEngine(tiny_policy(), optim=sgd_like(), grad_clip=None)
    tokens = []
    engine.model.huggingface.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    metrics = engine.train_mini_batch(data, ppo_loss(), max_tokens, with_entropy=True)
    assert sum(tokens) < data.batch["attention_mask"].sum(), "prompts are computed once, not for every row"
    assert metrics["loss"] == pytest.approx(expected_loss, abs=1e-5)
    assert_same_gradients(gradients(engine), expected_grads, 2e-6)


def test_gradient_checkpointing_gives_the_same_gradient():
    data = mini_batch()
    plain = TrainingEngine(tiny_policy(), optim=sgd_like(), grad_clip=None)
    plain.train_mini_batch(data, ppo_loss(), BUDGET, with_entropy=True)
    saved = TrainingEngine(tiny_policy(), optim=sgd_like(), grad_clip=None, gradient_checkpointing=True)
    calls = []
    layer = saved.model.huggingface.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    saved.train_mini_batch(data, ppo_loss(), BUDGET, with_entropy=True)
    assert len(calls) == 2, "the layer runs once in the forward pass and once again in the backward pass"
    assert_same_gradients(gradients(saved), gradients(plain))


def test_the_step_is_adamw_on_the_clipped_gradient():
    data = mini_batch()
    _, _, _, model = plain_ppo_step(data, "token-mean")
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, eps=1e-4).step()
    engine = TrainingEngine(tiny_policy(), optim=sgd_like(1e-3), grad_clip=0.05)
    for group in engine.optimizer.param_groups:
        group["eps"] = 1e-4  # AdamW's first step is the sign of the gradient; a large eps makes it smooth in it
    metrics = engine.train_mini_batch(data, ppo_loss(), BUDGET, with_entropy=True)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for name, parameter in model.named_parameters():
        ours = dict(engine.model.named_parameters())[f"causal_lm.{name}"]
        assert (ours - parameter).abs().max() <= 1e-6, name


def test_on_policy_the_ratio_is_exactly_one_whatever_the_micro_batches():
    data = mini_batch()
    engine = TrainingEngine(tiny_policy(), optim=sgd_like(), grad_clip=None)
    seen = []

    def loss_fn(outputs, micro, counts):
        old = outputs["log_probs"].detach()
        seen.append((outputs["log_probs"] - old).abs().max().item())
        return ppo_loss()(outputs, micro | {"old_log_probs": old}, counts)

    metrics = engine.train_mini_batch(data, loss_fn, 20, with_entropy=True)
    assert max(seen) == 0
    assert metrics["actor/ppo_kl"] == 0
    assert metrics["actor/pg_clipfrac"] == 0


def test_an_engine_without_an_optimiser_does_not_train():
    with pytest.raises(WorkerError, match="no optimiser"):
        TrainingEngine(tiny_policy()).train_mini_batch(mini_batch(), ppo_loss(), BUDGET)


def test_a_loss_function_that_forgets_the_metrics_is_named():
    engine = TrainingEngine(tiny_policy(), optim=sgd_like())
    with pytest.raises(DataError, match="return"):
        engine.train_mini_batch(mini_batch(), lambda outputs, micro, counts: outputs["log_probs"].sum(), BUDGET)


def test_a_batch_without_masks_is_refused():
    data = mini_batch()
    data.pop(["attention_mask"])
    with pytest.raises(DataError, match="attention_mask"):
        TrainingEngine(tiny_policy()).log_probs(data, 1.0, BUDGET)
