"""`trainer.deterministic=exact`: the same bits alone and in any batch, while a token is generated and while it is trained."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
from rollout_models import VOCAB, tiny_model

from quadriga.engine import TrainingEngine
from quadriga.models.attention import register_packed_attention
from quadriga.models.exact import set_exact
from quadriga.models.outline import blank_copy
from quadriga.models.token_model import PolicyModel
from quadriga.protocol import DataProto
from quadriga.rollout import Completion, Request, SamplingParams, create_engine
from quadriga.rollout.weights import copy_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FAMILIES = ["llama", "qwen2", "qwen3", "mistral_window"]
TEMPERATURE, NEW = 0.7, 60


@pytest.fixture
def exact() -> Iterator[None]:
    set_exact(True)
    yield
    set_exact(False)


def make(family: str, **options: Any) -> Any:
    settings = {"max_num_seqs": 32, "max_model_len": 160, "block_size": 16} | options
    model = tiny_model(family)  # handed over as in a run: into a module that was made on the device
    module = blank_copy(model, "cuda")
    copy_weights(module, model.named_parameters())
    return create_engine("native", module=module, **settings)


def ask(lengths: tuple[int, ...], samples: int) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(max_new_tokens=NEW, temperature=TEMPERATURE)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [Request(str(i), p, params, (0, i), tuple(range(samples))) for i, p in enumerate(prompts)]


def run(engine: Any, requests: list[Request]) -> dict[tuple[str, int], Completion]:
    return {(c.request_id, c.sample_index): c for c in engine.generate(requests)}


# ---- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "depth"), [(896, 896), (128, 896), (896, 4864), (2000, 200), (19, 96)])
def test_a_row_of_a_product_is_the_same_in_every_tile_and_batch(columns: int, depth: int) -> None:
    from quadriga.models.kernels.linear import Tiles, product

    x = torch.randn(3000, depth, device="cuda", dtype=torch.bfloat16)
    weight, bias = (torch.randn(*size, device="cuda").to(torch.bfloat16) for size in ((columns, depth), (columns,)))
    expected = product(x, weight, bias, tiles=Tiles(16, 64, 128, 2, 4))
    wide = x.double() @ weight.double().t() + bias.double()
    assert ((expected.double() - wide).norm() / wide.norm()) < 5e-3
    for rows in (1, 5, 16, 17, 64, 65, 1000, 1024, 3000):
        assert torch.equal(product(x[:rows].contiguous(), weight, bias), expected[:rows]), rows
    plain = Tiles(64, 32, 128, 4, 4), Tiles(64, 64, 64, 4, 6), Tiles(64, 256, 64, 4, 4), Tiles(128, 128, 64, 8, 4)
    for tiles in (*plain, Tiles(64, 128, 64, 4, 4, bulk=True), Tiles(128, 128, 64, 8, 4, bulk=True)):
        assert torch.equal(product(x, weight, bias, tiles=tiles), expected), tiles


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(14, 2, 64, None), (16, 8, 128, None), (12, 2, 128, 100), (4, 4, 24, None), (8, 1, 256, None), (32, 4, 96, 65)],
)
def test_decoding_attends_as_training_does(heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    from quadriga.models.kernels.attention import Segments, segment_attention
    from quadriga.rollout.native.cuda.attention_kernels import decode_attention, write_cache
    from quadriga.rollout.native.kv_cache import CacheShape, CudaKVCache

    lengths, device = [1, 31, 63, 64, 65, 127, 128, 129, 500, 700], torch.device("cuda")
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, dim))
    query, key, value = (torch.randn(sum(lengths), *s, device=device, dtype=torch.bfloat16) for s in sizes)
    trained = segment_attention(query, key, value, Segments.of(lengths, lengths, device), dim**-0.5, window)
    cache = CudaKVCache(CacheShape(1, heads, kv_heads, dim, 32, torch.bfloat16, device), 32 * len(lengths))
    cache.memory.fill_(float("nan"))
    blocks = torch.randperm(32 * len(lengths), device=device).view(len(lengths), 32).to(torch.int32)
    for row, (k, v) in enumerate(zip(key.split(lengths), value.split(lengths), strict=True)):
        at = torch.arange(len(k), device=device)
        write_cache(cache, 0, k, v, blocks[row, at // 32].long() * 32 + at % 32)
    last = torch.tensor(lengths, device=device).cumsum(0) - 1
    before = torch.tensor(lengths, device=device) - 1
    slots = torch.arange(len(lengths), device=device)
    decoded = decode_attention(cache, 0, query[last], slots, blocks, before, dim**-0.5, window, None, 1)
    assert torch.equal(decoded, trained[last])


# ---- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_do_not_depend_on_their_neighbours(exact: None, family: str) -> None:
    requests = ask((1, 16, 30, 67), samples=6)
    together = run(make(family), requests)
    crowded = run(make(family, max_num_seqs=8, max_num_batched_tokens=40, kv_cache_tokens=320), requests)
    eager = run(make(family, enforce_eager=True), requests[::-1])
    alone = run(make(family), requests[2:3])
    assert together == crowded == eager
    assert alone == {key: together[key] for key in alone}


@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_and_trainer_give_the_same_log_probs(exact: None, family: str) -> None:
    requests = ask((30, 30, 30, 7), samples=5)
    samples = run(make(family), requests)
    model = tiny_model(
        family
    )  # not rounded as a whole: its rotary table stays in float32, as in the module that generates
    model.set_attn_implementation(register_packed_attention())
    engine = TrainingEngine(PolicyModel(model), device="cuda")
    keys = [(r, i) for r in requests for i in range(5)]
    rows = [[*r.prompt_ids, *samples[r.request_id, i].token_ids] for r, i in keys]
    ids = torch.tensor([[0] * (30 + NEW - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (30 + NEW - len(row)) + [1] * len(row) for row in rows])
    columns = {"input_ids": ids, "attention_mask": mask, "response_mask": torch.ones(len(rows), NEW, dtype=torch.int64)}
    data = DataProto.from_dict(columns)
    generated = torch.tensor([samples[r.request_id, i].full_log_probs for r, i in keys])
    for budget in (1, 200, 1_000_000):
        trained, _ = engine.log_probs(data, TEMPERATURE, budget)
        assert torch.equal(trained, generated), (trained - generated).abs().max()


# ---- whole runs ------------------------------------------------------------------------------------------------------

FIGURES = ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean", "response_length/mean")


STEPS = 30


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "quadriga.trainer.main_ppo", "--config-name=quickstart"]
    settings = ["trainer.deterministic=exact", "trainer.n_gpus_per_node=1", f"trainer.total_training_steps={STEPS}"]
    settings += ["trainer.save_freq=2", "trainer.test_freq=-1", "trainer.resume_mode=auto"]
    settings += [f"trainer.default_local_dir={folder}", "actor_rollout_ref.rollout.temperature=0.9"]
    with open(folder.with_suffix(".log"), "a") as log:
        return subprocess.Popen(
            [*command, *settings], stdout=log, stderr=subprocess.STDOUT, start_new_session=True, text=True
        )


def lines_of(folder: Path) -> dict[int, dict[str, Any]]:
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {line["step"]: line for line in lines if "timing_s/step" in line}


def finish(process: subprocess.Popen[str], folder: Path) -> dict[int, dict[str, Any]]:
    assert process.wait(timeout=240) == 0, folder.with_suffix(".log").read_text()[-3000:]
    return lines_of(folder)


@pytest.mark.timeout(500)
def test_runs_repeat_and_resume_bit_equal_after_sigkill_with_a_gap_of_zero(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("once", "again", "killed")]
    once, again, killed = (start(folder) for folder in folders)
    deadline = time.monotonic() + 200
    while len(lines_of(folders[2])) < 15 and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert killed.poll() is None, folders[2].with_suffix(".log").read_text()[-3000:]
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    expected, repeated = finish(once, folders[0]), finish(again, folders[1])
    time.sleep(2)
    resumed = finish(start(folders[2]), folders[2])
    assert set(expected) == set(repeated) == set(resumed) == set(range(1, STEPS + 1))
    for step, line in expected.items():
        assert line["rollout/logprob_diff_mean"] == 0.0
        for name in FIGURES:
            assert line[name] == repeated[step][name] == resumed[step][name], (step, name)
    for file in (last := folders[0] / "checkpoints" / f"global_step_{STEPS}").rglob("*.safetensors"):
        for other in folders[1:]:
            twin = load_file(other / "checkpoints" / last.name / file.relative_to(last))
            assert all(torch.equal(tensor, twin[name]) for name, tensor in load_file(file).items()), other
