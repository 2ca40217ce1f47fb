"""Every kernel against plain PyTorch in float32 (or float64) on the same inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """‖ours − reference‖ / ‖reference‖; NaN never passes a comparison with it."""
    return ((ours.double() - reference.double()).norm() / reference.double().norm()).item()


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(14, 2, 64), (9, 3, 64), (4, 4, 24)])
def test_rotary_embedding_and_its_gradient(dtype, heads, kv_heads, dim):
    from quadriga.models.kernels.rotary import rotate

    query, key = (torch.randn(301, h, dim, device=DEVICE, dtype=dtype, requires_grad=True) for h in (heads, kv_heads))
    cos, sin = (torch.randn(301, dim, device=DEVICE, dtype=dtype) for _ in range(2))
    pulls = torch.randn_like(query), torch.randn_like(key)
    ours = rotate(query, key, cos, sin)
    wide = [x.detach().double().requires_grad_() for x in (query, key)]
    plain = [x * cos[:, None].double() + rotate_half(x) * sin[:, None].double() for x in wide]
    gradients = torch.autograd.grad(ours, (query, key), pulls)
    expected = torch.autograd.grad(plain, wide, [p.double() for p in pulls])
    for one, other in zip((*ours, *gradients), (*plain, *expected)):
        assert relative_error(one, other) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_the_middle_of_a_gated_mlp_and_its_gradient(dtype, act):
    from quadriga.models.kernels.gated import geglu, swiglu

    kernel = {"silu": swiglu, "gelu": geglu}[act]
    gate, up = (torch.randn(1, 333, 4864, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(2))
    pull = torch.randn_like(gate)
    wide = [x.detach().double().requires_grad_() for x in (gate, up)]
    activated = F.silu(wide[0]) if act == "silu" else F.gelu(wide[0], approximate="tanh")
    out, plain = kernel(gate, up), activated * wide[1]
    assert relative_error(out, plain) < TOLERANCE[dtype]
    for one, other in zip(torch.autograd.grad(out, (gate, up), pull), torch.autograd.grad(plain, wide, pull.double())):
        assert relative_error(one, other) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [64, 896, 2304])
def test_norm_with_an_offset_and_its_gradient(dtype, width):
    from quadriga.models.kernels.norm import rms_norm

    x = torch.randn(3, 333, width, device=DEVICE, dtype=dtype, requires_grad=True)
    weight = torch.randn(width, device=DEVICE, dtype=dtype, requires_grad=True)
    pull = torch.randn_like(x)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    plain = wide[0] * torch.rsqrt(wide[0].square().mean(-1, keepdim=True) + 1e-6) * (wide[1] + 1)
    out = rms_norm(x, weight, 1e-6, 1.0)
    gradients = torch.autograd.grad(out, (x, weight), pull)
    for one, other in zip((out, *gradients), (plain, *torch.autograd.grad(plain, wide, pull.double()))):
        assert relative_error(one, other) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "softcap"),
    [(14, 2, 64, None, None), (4, 4, 24, 70, None), (8, 4, 128, None, 3.0), (4, 1, 256, 70, 2.0)],
)
def test_attention_of_segments_and_its_gradient(heads, kv_heads, dim, window, softcap):
    """In bfloat16: nothing else calls it."""
    from quadriga.models.kernels.attention import Segments, segment_attention

    dtype = torch.bfloat16
    queries, keys = [130, 5, 70], [130, 75, 140]
    sizes = (sum(queries), heads), (sum(keys), kv_heads), (sum(keys), kv_heads)
    inputs = [torch.randn(*s, dim, device=DEVICE, dtype=dtype, requires_grad=True) for s in sizes]
    out = segment_attention(*inputs, Segments.of(queries, keys, DEVICE), dim**-0.5, window, softcap)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    parts = []
    for q, k, v in zip(wide[0].split(queries), wide[1].split(keys), wide[2].split(keys)):
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(len(q), device=DEVICE)[:, None] + len(k) - len(q)
        key = torch.arange(len(k), device=DEVICE)[None]
        visible = (key <= position) & (key > position - (window or len(k)))
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v))
    plain, pull = torch.cat(parts), torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, pull)
    for one, other in zip((out, *gradients), (plain, *torch.autograd.grad(plain, wide, pull.double()))):
        assert relative_error(one, other) < TOLERANCE[dtype]


def test_gathered_rows_add_their_gradients_in_order():
    from quadriga.models.kernels.gather import gather_rows, readers_of

    x = torch.randn(500, 2, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    index, pull = torch.randint(0, 400, (3000,), device=DEVICE), torch.randn(3000, 2, 64, device=DEVICE).bfloat16()
    out = gather_rows(x, index, readers_of(index, 500))
    assert torch.equal(out, x[index])
    first, again = (torch.autograd.grad(out, x, pull, retain_graph=True)[0] for _ in range(2))
    exact = torch.zeros(500, 2, 64, device=DEVICE, dtype=torch.float64).index_add_(0, index, pull.double())
    assert torch.equal(first, again)
    assert relative_error(first, exact) < 5e-3


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_log_probs_entropy_and_gradients_from_hidden_states(dtype, softcap, with_entropy):
    from quadriga.models.logprobs import LogitTransform, token_log_probs

    hidden = torch.randn(300, 64, device=DEVICE, dtype=dtype, requires_grad=True)
    weight = (0.3 * torch.randn(50_003, 64, device=DEVICE)).to(dtype).requires_grad_()
    targets = torch.randint(0, 50_003, (300,), device=DEVICE)
    transform = LogitTransform(scale=0.9, softcap=softcap, temperature=0.8)
    log_probs, entropy, *_ = token_log_probs(
        hidden, weight, targets, transform=transform, with_entropy=with_entropy, chunk_rows=128
    )
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    z = h @ w.t() * 0.9
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / 0.8
    expected = z.log_softmax(-1)
    expected_log_probs = expected.gather(1, targets[:, None]).squeeze(1)
    pull = torch.randn(300, device=DEVICE)
    loss, expected_loss = (log_probs * pull).sum(), (expected_log_probs * pull).sum()
    assert (log_probs.double() - expected_log_probs).abs().max() < 1e-3
    if entropy is not None:
        expected_entropy = -(expected.exp() * expected).sum(-1)
        assert (entropy.double() - expected_entropy).abs().max() < 1e-3
        loss, expected_loss = loss + (entropy * pull).sum(), expected_loss + (expected_entropy * pull).sum()
    for one, other in zip(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(expected_loss, (h, w))):
        assert relative_error(one, other) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "softcap", "splits"),
    [(14, 2, 64, None, None, 1), (14, 2, 64, None, None, 8), (9, 3, 64, 100, None, 2), (4, 4, 12, None, 3.0, 4),
     (16, 2, 128, 33, None, 64), (8, 1, 256, None, None, 2)],
)  # fmt: skip
def test_paged_decode_attention(dtype, heads, kv_heads, dim, window, softcap, splits):
    from quadriga.rollout.native.cuda.attention_kernels import decode_attention, write_cache
    from quadriga.rollout.native.kv_cache import CacheShape, CudaKVCache

    lengths = torch.tensor([0, 31, 32, 700, 1999, 64], device=DEVICE)
    cache = CudaKVCache(CacheShape(2, heads, kv_heads, dim, 32, dtype, DEVICE), 6 * 64)
    cache.memory.fill_(float("nan"))  # what was never written must not matter
    blocks = torch.randperm(6 * 64, device=DEVICE).view(6, 64).to(torch.int32)
    slots = torch.tensor([4, -1, 0, 3, 5, 1, 2, -1], device=DEVICE)
    query = torch.randn(len(slots), heads, dim, device=DEVICE, dtype=dtype)
    stored = {}
    for slot, length in enumerate(lengths.tolist()):
        at = torch.arange(length + 1, device=DEVICE)
        stored[slot] = [torch.randn(length + 1, kv_heads, dim, device=DEVICE, dtype=dtype) for _ in range(2)]
        write_cache(cache, 1, *stored[slot], blocks[slot, at // 32].long() * 32 + at % 32)
    out = decode_attention(cache, 1, query, slots, blocks, lengths, dim**-0.5, window, softcap, splits)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            assert (out[row] == 0).all()
            continue
        key, value = (x.double().repeat_interleave(heads // kv_heads, dim=1) for x in stored[slot])
        scores = torch.einsum("hd,nhd->hn", query[row].double(), key) * dim**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if window is not None:
            scores[:, : max(0, len(key) - window)] = -torch.inf
        expected = torch.einsum("hn,nhd->hd", scores.softmax(-1), value)
        assert relative_error(out[row], expected) < TOLERANCE[dtype]


def device_slots(slots: int, vocab: int):
    from quadriga.rollout.native.slots import DeviceSlots

    table = DeviceSlots(slots, vocab, (5, 9), DEVICE, 4)
    table.reserve(8, 0)
    table.key.random_()
    table.temperature.uniform_(0.5, 2)
    table.max_new.fill_(8)
    table.stop_ids.copy_(torch.tensor([5, 9], device=DEVICE))
    return table


@pytest.mark.parametrize("vocab", [1000, 49_152, 151_936])
def test_sampling_kernel_draws_the_tokens_of_the_plain_sampler(vocab):
    from quadriga.rollout.native.cuda.sampling_kernels import sample_rows
    from quadriga.rollout.native.sampler import Needs, sample

    table = device_slots(64, vocab)
    table.greedy[::5] = True
    table.count.random_(0, 8)
    logits = 3 * torch.randn(64, vocab, device=DEVICE)
    rows, slots = torch.randperm(64, device=DEVICE), torch.randperm(64, device=DEVICE)
    ours = sample_rows(logits, rows, slots, table)
    plain = sample(logits[rows].clone(), table, slots, Needs(temperature=True, greedy=True))
    differ = ours.tokens != plain.tokens
    assert differ.sum() <= 1  # a number on the very edge between two tokens may fall to either
    assert (ours.log_probs - plain.full_log_probs)[~differ].abs().max() < 1e-4
    nothing = sample_rows(logits, rows, torch.full_like(slots, -1), table)
    assert (nothing.tokens == 0).all()


def test_noting_tokens_freezes_samples_that_are_done():
    from quadriga.rollout.native.cuda.sampling_kernels import note_tokens
    from quadriga.rollout.native.slots import Sampled

    table = device_slots(5, 100)
    table.count[1], table.done[4] = 7, 1
    slots = torch.tensor([0, 1, -1, 2, 3, 4], device=DEVICE)
    tokens = torch.tensor([9, 30, 31, 32, 33, 34], device=DEVICE)
    log_probs = torch.tensor([-1, -2, -3, -4, float("nan"), -6], device=DEVICE)
    note_tokens(slots, Sampled(tokens, log_probs, log_probs), table, decoding=True)
    assert table.done.tolist() == [1, 2, 0, 3, 1]  # stop token, full length, goes on, not finite, was done
    assert table.count.tolist() == [1, 8, 1, 1, 0]
    assert table.length.tolist() == [1, 1, 1, 1, 0]
    assert table.last_token.tolist() == [9, 30, 32, 33, 0]
    assert [table.tokens[0, 0].item(), table.tokens[1, 7].item(), table.log_probs[2, 0].item()] == [9, 30, -4]
