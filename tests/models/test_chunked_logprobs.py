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
    torch.testing.assert_close(tuple(ours[:2]), expected, atol=2e-6, rtol=2e-6)


def all_log_probs(hidden, weight, bias, transform):
    """`[N, V]`, by asking for the log-prob of each id in turn."""
    ids = torch.arange(weight.shape[0])
    columns = [plain_reference(hidden, weight, bias, ids[i].expand(len(hidden)), transform)[0] for i in ids]
    return torch.stack(columns, 1)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("chunk_rows", [4, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # with the kernel in C, and without
def test_sums_of_squares_and_the_likeliest_ids_by_any_chunk_size(name, chunk_rows, dtype):
    hidden, weight, bias, targets = random_case(dtype)
    log_p = all_log_probs(hidden, weight, bias, TRANSFORMS[name])
    told = token_log_probs(
        hidden,
        weight,
        targets,
        bias=bias,
        transform=TRANSFORMS[name],
        with_sum_pi_squared=True,
        top_k=3,
        chunk_rows=chunk_rows,
    )
    torch.testing.assert_close(told.sum_pi_squared, log_p.exp().square().sum(1), atol=2e-6, rtol=2e-6)
    best = log_p.topk(3)
    torch.testing.assert_close(told.top_log_probs, best.values, atol=2e-6, rtol=2e-6)
    assert torch.equal(told.top_ids, best.indices)
    assert not told.sum_pi_squared.requires_grad
    assert not told.top_log_probs.requires_grad
    assert told.entropy is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_likeliest_of_the_first_ids_alone(dtype):
    hidden, weight, bias, targets = random_case(dtype)
    log_p = all_log_probs(hidden, weight, bias, LogitTransform())
    told = token_log_probs(hidden, weight, targets, bias=bias, top_k=20, top_of=7)
    torch.testing.assert_close(told.top_log_probs, log_p[:, :7].sort(descending=True).values, atol=2e-6, rtol=2e-6)
    assert told.top_ids.max() < 7


def test_sums_of_squares_lie_between_one_over_the_vocabulary_and_one():
    hidden = torch.tensor([[0.0], [1.0], [1e4]])
    told = token_log_probs(
        hidden, torch.tensor([[2.0], [1.0], [0.0], [-1.0]]), torch.zeros(3).long(), with_sum_pi_squared=True
    )
    assert told.sum_pi_squared[0].item() == pytest.approx(0.25)
    assert 0.25 < told.sum_pi_squared[1] < 1
    assert told.sum_pi_squared[2] == 1


@pytest.mark.parametrize("name", TRANSFORMS)
def test_log_probs_of_other_ids_and_their_gradients_are_exact_in_float64(name):
    hidden, weight, bias, targets = random_case(torch.float64)
    ids = torch.randint(13, (11, 4), generator=torch.Generator().manual_seed(1))
    ids[:, 1] = ids[:, 0]  # twice the same
    ids[:, 2] = targets
    expected = all_log_probs(hidden, weight, bias, TRANSFORMS[name]).gather(1, ids)

    def function(hidden, weight, bias):
        told = token_log_probs(
            hidden,
            weight,
            targets,
            bias=bias,
            transform=TRANSFORMS[name],
            with_entropy=True,
            other_ids=ids,
            chunk_rows=4,
        )
        return told.log_probs, told.entropy, told.other_log_probs

    torch.testing.assert_close(function(hidden, weight, bias)[2], expected)
    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_are_exact_in_float64(name, with_entropy):
    hidden, weight, bias, targets = random_case(torch.float64)

    def function(hidden, weight, bias):
        log_probs, entropy, *_ = token_log_probs(
            hidden, weight, targets, bias=bias, transform=TRANSFORMS[name], with_entropy=with_entropy, chunk_rows=4
        )
        return (log_probs, entropy) if with_entropy else log_probs

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_a_weight_tied_to_the_embedding_gets_both_gradients():
    _, weight, _, targets = random_case(torch.float64)
    hidden = torch.nn.functional.embedding(targets.flip(0), weight)
    log_probs, *_ = token_log_probs(hidden, weight, targets, chunk_rows=4)
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
    log_probs, *_ = token_log_probs(hidden, weight, targets)
    expected, _ = plain_reference(hidden.float(), weight.float(), None, targets, LogitTransform())
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, expected, atol=1e-6, rtol=1e-6)
    log_probs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_extreme_logits_stay_finite():
    weight = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    hidden = torch.ones(3, 1, requires_grad=True)
    log_probs, entropy, *_ = token_log_probs(hidden, weight, torch.tensor([0, 1, 2]), with_entropy=True)
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
    log_probs, entropy, *_ = token_log_probs(hidden, weight, targets, with_entropy=True)
    (log_probs.sum() + entropy.sum()).backward()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
""")


def test_peak_memory_is_a_few_chunks_and_never_the_whole_logits():
    run = subprocess.run(
        [sys.executable, "-c", _PEAK_MEMORY], capture_output=True, text=True, check=True, env=os.environ, timeout=170
    )
    assert int(run.stdout) < 100, f"{run.stdout.strip()} MiB more, of 1024 that the whole logits would take"
