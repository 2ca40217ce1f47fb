"""The kernels for CPUs compute what PyTorch computes, and the same bits for a row whatever is beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quadriga.models.kernels.cpu import library, linear
from quadriga.models.kernels.cpu.library import Member, Weight, huge_zeros
from quadriga.models.kernels.cpu.operations import RMSNorm, Rotate, Swiglu, pointers

pytestmark = pytest.mark.skipif(library.kernels() is None, reason="no C compiler on this machine")


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos[:, None] + torch.cat([-x[..., half:], x[..., :half]], -1) * sin[:, None]


ANGLES = torch.cat([torch.linspace(0, 9, 33 * 20).view(33, 20)] * 2, -1)
CASES = {
    "norm": (
        lambda x, w: RMSNorm.apply(x, w, 1e-6),
        lambda x, w: F.rms_norm(x, (40,), w, 1e-6),
        lambda: (torch.randn(33, 3, 40), torch.randn(40)),
    ),
    "swiglu": (Swiglu.apply, lambda g, u: F.silu(g) * u, lambda: (5 * torch.randn(33, 40), torch.randn(33, 40))),
    "rotary": (
        lambda x: Rotate.apply(x, ANGLES.cos(), ANGLES.sin()),
        lambda x: turned(x, ANGLES.cos(), ANGLES.sin()),
        lambda: (torch.randn(33, 3, 40),),
    ),
    "linear": (
        linear.Linear.apply,
        F.linear,
        lambda: (torch.randn(3, 33, 40), torch.randn(70, 40), torch.randn(70)),
    ),
    "wide linear": (
        lambda x, w: linear.Linear.apply(x, w, None),
        F.linear,
        lambda: (torch.randn(33, 70), torch.randn(40, 70)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_pytorch(name: str) -> None:
    torch.manual_seed(0)
    ours, theirs, make = CASES[name]
    inputs = [x.requires_grad_() for x in make()]
    got, wanted = ours(*inputs), theirs(*inputs)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
    by = torch.randn_like(wanted)
    for mine, other in zip(torch.autograd.grad(got, inputs, by), torch.autograd.grad(wanted, inputs, by), strict=True):
        torch.testing.assert_close(mine, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(rows: int) -> None:
    """80,000 elements: enough for several threads."""
    torch.manual_seed(0)
    gate, up, weight = torch.randn(800, 100) * 4, torch.randn(800, 100), torch.randn(100)
    middle, norm = Swiglu.apply(gate, up), RMSNorm.apply(gate, weight, 1e-6)
    for start in range(0, 800 - rows, 37):
        part = slice(start, start + rows)
        assert torch.equal(Swiglu.apply(gate[part].clone(), up[part].clone()), middle[part])
        assert torch.equal(RMSNorm.apply(gate[part].clone(), weight, 1e-6), norm[part])


def test_the_number_of_threads_changes_no_bit() -> None:
    torch.manual_seed(0)
    x, weight, by = (
        torch.randn(700, 100, requires_grad=True),
        torch.randn(100, requires_grad=True),
        torch.randn(700, 100),
    )
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(torch.autograd.grad(RMSNorm.apply(x, weight, 1e-6), (x, weight), by))
    finally:
        torch.set_num_threads(before)
    for others in zip(*results, strict=True):
        assert all(torch.equal(others[0], other) for other in others[1:])


def test_not_a_number_is_passed_on() -> None:
    x = torch.randn(4, 64)
    x[2, 5] = float("nan")
    assert RMSNorm.apply(x, torch.ones(64), 1e-6).isnan().any(1).tolist() == [False, False, True, False]
    assert Swiglu.apply(x, torch.ones(4, 64)).isnan().sum() == 1
    outputs = [torch.empty(4) for _ in range(3)]
    targets = torch.zeros(4, dtype=torch.int64)
    library.kernels().softmax_statistics(*pointers(x, targets), 1.0, 4, 64, *pointers(*outputs))
    assert outputs[0].isnan().tolist() == [False, False, True, False]


def test_drawn_tokens_follow_the_uniform_numbers() -> None:
    """Each token is the first at which the distribution function passes the number; the greedy one is the likeliest."""
    torch.manual_seed(0)
    rows, vocab = 200, 1000
    logits, u = torch.randn(rows, vocab) * 3, torch.rand(rows)
    temperature, greedy = 0.5 + torch.rand(rows), torch.rand(rows) < 0.3
    sums, tokens, log_probs = torch.empty(rows, 16), torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    library.kernels().sample_tokens(
        *pointers(logits, temperature, u, greedy), rows, vocab, *pointers(sums, tokens, log_probs)
    )
    exact = (logits.double() / temperature.double()[:, None]).log_softmax(-1)
    drawn = torch.searchsorted(exact.exp().cumsum(-1), u.double()[:, None]).squeeze(1)
    wanted = torch.where(greedy, logits.argmax(-1), drawn)
    assert (tokens != wanted).sum() <= 1  # a number may fall on the border of two tokens
    torch.testing.assert_close(log_probs, exact.gather(1, tokens[:, None]).squeeze(1).float(), atol=1e-5, rtol=1e-6)


def test_large_memory_is_zero_and_begins_with_a_huge_page() -> None:
    large, small = huge_zeros(3, 1000, 1000), huge_zeros(7, 5)
    assert large.shape == (3, 1000, 1000)
    assert large.data_ptr() % (2 << 20) == 0
    assert not large.any()
    assert torch.equal(large.fill_(1).sum(), torch.tensor(3e6))
    assert torch.equal(small, torch.zeros(7, 5))


STORED, ADDED, GATED = range(3)


def packed(parts: list[tuple[Tensor, Tensor]], by_turns: bool = False) -> tuple[Weight, Tensor]:
    """Weights and biases side by side, and the memory they lie in."""
    width, inner = library.kernels().panel_width(), parts[0][0].shape[1]
    run, period = (width // 2, width) if by_turns else (1, 1)
    total = sum(len(w) for w, _ in parts)
    panels, start = torch.zeros(-(-total // width), inner + 1, width), 0
    for weight, bias in parts:
        library.kernels().pack_weight(*pointers(weight, bias), *weight.shape, start, run, period, panels.data_ptr())
        start += run if by_turns else len(weight)
    return Weight(panels.data_ptr(), inner, len(parts[0][0]) if by_turns else total), panels


def multiplied(x: Tensor, weight: Weight, kind: int, out: Tensor, members: int = 1) -> Tensor:
    out = out.clone()
    for rank in range(members):
        strides = x.stride(0), len(x), weight, Member(rank, members), kind
        library.kernels().packed_product(x.data_ptr(), *strides, out.data_ptr(), out.stride(0))
    return out


@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (7, 5), (40, 33), (256, 64), (301, 97), (33, 130)])
def test_products_with_packed_weights_are_exact(inner: int, outer: int) -> None:
    """1 to 300 rows, sizes that are no multiples of anything, rows that lie apart."""
    torch.manual_seed(0)
    x = torch.randn(300, inner + 3)[:, :inner]
    halves = [(torch.randn(n, inner), torch.randn(n)) for n in (outer, outer)]
    joined, _memory = packed(halves)
    gated, _more_memory = packed(halves, by_turns=True)
    before = torch.randn(300, 2 * outer)
    wanted = [F.linear(x.double(), w.double(), b.double()) for w, b in halves]
    for rows in (*range(1, 27), 299, 300):
        part = x[:rows]
        close = {"atol": 1e-4, "rtol": 1e-5}
        sums = torch.cat(wanted, 1)[:rows]
        torch.testing.assert_close(multiplied(part, joined, STORED, before[:rows]), sums.float(), **close)
        added = multiplied(part, joined, ADDED, before[:rows])
        torch.testing.assert_close(added, (before[:rows] + sums).float(), **close)
        middle = multiplied(part, gated, GATED, before[:rows])
        swiglu = F.silu(wanted[0]) * wanted[1]
        torch.testing.assert_close(middle[:, :outer], swiglu[:rows].float(), atol=1e-3, rtol=1e-5)
        assert torch.equal(middle[:, outer:], before[:rows, outer:])  # nothing is written beside the result


@pytest.mark.parametrize(("inner", "outer"), [(40, 33), (301, 97)])
def test_a_row_of_a_product_has_the_same_bits_whoever_computes_it(inner: int, outer: int) -> None:
    torch.manual_seed(0)
    x, halves = torch.randn(60, inner), [(torch.randn(n, inner), torch.randn(n)) for n in (outer, outer)]
    for kind, by_turns in ((STORED, False), (ADDED, False), (GATED, True)):
        weight, _memory = packed(halves, by_turns)
        before = torch.randn(60, 2 * outer)
        whole = multiplied(x, weight, kind, before)
        assert torch.equal(multiplied(x, weight, kind, before, members=3), whole)
        for rows in (1, 5, 13):
            for start in range(0, 60 - rows, 7):
                part = slice(start, start + rows)
                assert torch.equal(multiplied(x[part].clone(), weight, kind, before[part]), whole[part])


@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (7, 5), (40, 33), (256, 64), (33, 130), (64, 256)])
def test_gradients_of_weights_are_sums_over_all_rows_whatever_the_threads(inner: int, outer: int) -> None:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    for rows in (1, 2, 191, 192, 193, 500):
        grad, x, there = torch.randn(rows, outer), torch.randn(rows, inner), torch.randn(outer, inner)
        results = []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(there.clone())
                linear.add_weight_gradient(results[-1], grad, x)
        finally:
            torch.set_num_threads(before)
        wanted = there.double() + grad.double().t() @ x.double()
        torch.testing.assert_close(results[0], wanted.float(), atol=1e-4, rtol=1e-5)
        assert all(torch.equal(results[0], other) for other in results[1:])


_WITHOUT_A_COMPILER = textwrap.dedent("""
    import torch, transformers
    from quadriga.models.fused import fuse
    from quadriga.models.kernels.cpu.library import kernels
    from quadriga.rollout import Request, SamplingParams, create_engine
    torch.manual_seed(0)
    shape = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=64)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    engine = create_engine("native", module=model, max_num_seqs=4)
    (done,) = engine.generate([Request("a", [1, 2, 3], SamplingParams(max_new_tokens=8, ignore_eos=True, seed=1))])
    print(kernels() is None, done.token_ids)
""")


def test_a_compiled_file_that_others_could_have_written_is_not_loaded(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.load()
    (compiled,) = (tmp_path / "quadriga").glob("*.so")
    assert compiled.stat().st_mode & 0o777 == 0o700
    for mode, is_a_link in ((0o777, False), (0o720, False), (0o700, True)):
        planted = tmp_path / "planted.so"
        planted.write_text("not a library")
        planted.chmod(mode)
        compiled.unlink()
        compiled.symlink_to(planted) if is_a_link else planted.rename(compiled)
        library.load()  # made anew: what lies there would not load
        assert compiled.stat().st_size > 10_000
        assert not compiled.is_symlink()


def test_they_compile_where_the_locale_has_no_letters_but_those_of_english(tmp_path) -> None:
    """The sources and the compiler's words have others."""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "XDG_CACHE_HOME": str(tmp_path)}
    code = "from quadriga.models.kernels.cpu import library; library.load()"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **plain}, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "quadriga").glob("*.so"))) == 1


def test_a_cache_that_others_can_write_is_closed_to_them(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "quadriga").mkdir()
    (tmp_path / "quadriga").chmod(0o777)
    assert library._cache_folder() == tmp_path / "quadriga"
    assert (tmp_path / "quadriga").stat().st_mode & 0o777 == 0o755


def test_without_a_compiler_the_same_is_computed_by_pytorch(tmp_path) -> None:
    def run(**changes: str) -> subprocess.CompletedProcess:
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), **changes}
        return subprocess.run(
            [sys.executable, "-c", _WITHOUT_A_COMPILER],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )

    (tmp_path / "file").touch()
    assert run(XDG_CACHE_HOME=str(tmp_path / "file")).stdout.startswith("False")  # no cache: compiled for itself
    with_kernels, without = run(), run(CC="/nowhere", PATH="/nowhere")
    assert with_kernels.stdout.startswith("False")
    assert without.stdout == with_kernels.stdout.replace("False", "True")
    assert "no C compiler found: install gcc or clang" in without.stderr


_MANY_SHAPES = """
import sys
import torch
from quadriga.controller.call_record import host_gb
from quadriga.models.kernels.cpu.linear import Linear

torch.set_num_threads(1)
x, weight = torch.randn(700, 128), torch.randn(512, 128, requires_grad=True)

def train(tokens):
    rows = x[:tokens].clone().requires_grad_()
    Linear.apply(rows, weight, None).sum().backward()

for tokens in range(2, 200):
    train(tokens)
warm = host_gb()
for tokens in range(200, 700):
    train(tokens)
print(host_gb() / warm)
"""


def test_products_of_ever_new_shapes_do_not_fill_the_memory():
    """Each step of a run has micro-batches of another number of tokens. With the libraries' own caches it is 2.4 times."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    environment = {k: v for k, v in os.environ.items() if not k.endswith("CACHE_CAPACITY")}
    command = [sys.executable, "-c", _MANY_SHAPES]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    assert float(run.stdout) < 1.15
