from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from quadriga.models.logprobs import LogitTransform, token_log_probs

TRANSFORMS = {
    "plain": LogitTransform(),
    "temperature": LogitTransform(temperature=0.7),
    "scaled": LogitTransform(scale=0.25, temperature=1.3),
    "softcap": LogitTransform(scale=0.5, softcap=2.0, temperature=0.8),
}


def plain_reference(hidden, weight, bias, targets, transform):
    z = (hidden @ weight.t() + (0 if bias is None else bias)) * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    log_p = (z / transform.temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def random_case(dtype=torch.float32, rows=11, hidden=6, vocabulary=13):
    generator = torch.Generator().manual_seed(3)
    make = lambda *shape: torch.randn(*shape, dtype=dtype, generator=generator, requires_grad=True)  # noqa: E731
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    return make(rows, hidden), make(vocabulary, hidden), make(vocabulary), targets


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("chunk_rows", [1, 4, 11, 64])
def test_any_chunk_size_gives_the_plain_log_probs_and_entropy(name, chunk_rows):
    hidden, weight, bias, targets = random_case()
    expected = plain_reference(hidden, weight, bias, targets, TRANSFORMS[name])
    ours = token_log_probs(
        hidden, weight, targets, bias=bias, transform=TRANSFORMS[name], with_entropy=True, chunk_rows=chunk_rows
    )
    torch.testing.assert_close(ours, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_are_exact_in_float64(name, with_entropy):
    hidden, weight, bias, targets = random_case(torch.float64)

    def function(hidden, weight, bias):
        log_probs, entropy = token_log_probs(
            hidden, weight, targets, bias=bias, transform=TRANSFORMS[name], with_entropy=with_entropy, chunk_rows=4
        )
        return (log_probs, entropy) if with_entropy else log_probs

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_a_weight_tied_to_the_embedding_gets_both_gradients():
    _, weight, _, targets = random_case(torch.float64)
    hidden = torch.nn.functional.embedding(targets.flip(0), weight)
    log_probs, _ = token_log_probs(hidden, weight, targets, chunk_rows=4)
    (ours,) = torch.autograd.grad(log_probs.sum(), weight)
    hidden = torch.nn.functional.embedding(targets.flip(0), weight)
    (expected,) = torch.autograd.grad(plain_reference(hidden, weight, None, targets, LogitTransform())[0].sum(), weight)
    torch.testing.assert_close(ours, expected)


def test_a_frozen_head_costs_no_gradient_and_does_not_change_the_others():
    hidden, weight, _, targets = random_case()
    token_log_probs(hidden, weight, targets)[0].sum().backward()
    expected = hidden.grad.clone()
    hidden.grad = None
    frozen = weight.detach()
    token_log_probs(hidden, frozen, targets)[0].sum().backward()
    assert torch.equal(hidden.grad, expected)


def test_sixteen_bit_hidden_states_give_float32_log_probs():
    hidden, weight, _, targets = random_case(torch.bfloat16)
    log_probs, _ = token_log_probs(hidden, weight, targets)
    expected, _ = plain_reference(hidden.float(), weight.float(), None, targets, LogitTransform())
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, expected, atol=1e-6, rtol=1e-6)
    log_probs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_extreme_logits_stay_finite():
    weight = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    hidden = torch.ones(3, 1, requires_grad=True)
    log_probs, entropy = token_log_probs(hidden, weight, torch.tensor([0, 1, 2]), with_entropy=True)
    assert log_probs.tolist() == [0.0, -2e4, -1e4]
    assert entropy.tolist() == [0.0, 0.0, 0.0]
    (log_probs.sum() + entropy.sum()).backward()
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


_PEAK_MEMORY = textwrap.dedent("""
    import resource, torch
    from quadriga.models.logprobs import token_log_probs
    torch.set_num_threads(1)
    rows, vocabulary, width = 16384, 16384, 16          # the whole logits would take 1024 MiB
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(vocabulary, (rows,))
    token_log_probs(hidden[:8], weight, targets[:8], with_entropy=True)[0].sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    log_probs, entropy = token_log_probs(hidden, weight, targets, with_entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
""")


def test_peak_memory_is_a_few_chunks_and_never_the_whole_logits():
    run = subprocess.run(
        [sys.executable, "-c", _PEAK_MEMORY], capture_output=True, text=True, check=True, env=os.environ, timeout=170
    )
    assert int(run.stdout) < 100, f"{run.stdout.strip()} MiB more, of 1024 that the whole logits would take"
