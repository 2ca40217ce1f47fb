"""The state of every optimiser and layout can be read back by other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from quadriga.config.names import OPTIMISERS
from quadriga.config.schema_models import FSDPConfig, OptimConfig


def engine_of(name: str, fsdp_size: int = -1, grad_dtype: str = "float32", seed: int = 0):
    from tiny_engine import make_engine

    from quadriga.engine import TrainingEngine
    from quadriga.models.token_model import PolicyModel

    base = make_engine(seed, tied=False) if not torch.distributed.is_initialized() else None
    if base is None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=23, hidden_size=12, intermediate_size=18, num_hidden_layers=2, num_attention_heads=2
        )
        config.num_key_value_heads, config.max_position_embeddings = 1, 32
        from quadriga.models.attention import register_packed_attention

        register_packed_attention()
        model = LlamaForCausalLM(config)
    else:
        model = base.model.huggingface
    fsdp = FSDPConfig(fsdp_size=fsdp_size, grad_dtype=grad_dtype)
    return TrainingEngine(PolicyModel(model), optim=OptimConfig(name=name, lr=1e-2), fsdp=fsdp, total_steps=10)


def save(name: str, folder: str, fsdp_size: int, grad_dtype: str):
    from tiny_engine import train, whole_state

    from quadriga.checkpoint.shards import save_engine
    from quadriga.engine.sharding import rank, world_size

    engine = engine_of(name, fsdp_size, grad_dtype)
    share = 4 // world_size()
    losses = train(engine, 2, rows=slice(rank() * share, (rank() + 1) * share))
    save_engine(engine, folder)
    return losses, whole_state(engine)


def load(name: str, folder: str, fsdp_size: int):
    from tiny_engine import train, whole_state

    from quadriga.checkpoint.shards import load_engine
    from quadriga.engine.sharding import rank, world_size

    engine = engine_of(name, fsdp_size, seed=9)
    load_engine(engine, folder)
    state = {key: value.clone() for key, value in whole_state(engine).items()}
    share = 4 // world_size()
    return state, train(engine, 1, first_seed=2, rows=slice(rank() * share, (rank() + 1) * share))


@pytest.mark.parametrize("name", OPTIMISERS)
def test_what_four_ranks_with_two_copies_wrote_two_ranks_and_one_read(name, tmp_path: Path):
    (losses, written), *_ = run_ranks(4, save, name, str(tmp_path), 2, "float32")
    assert len(losses) == 2
    (two, loss_of_two), *_ = run_ranks(2, load, name, str(tmp_path), -1)
    (one, loss_of_one), *_ = run_ranks(1, load, name, str(tmp_path), -1)
    for read in (two, one):
        assert read.keys() == written.keys()
        assert all(torch.equal(read[key], written[key]) for key in written)
    assert loss_of_two == pytest.approx(loss_of_one, abs=1e-5)


def test_narrow_gradients_over_ranks_lead_the_way_of_wide_ones(tmp_path: Path):
    for folder in ("narrow", "wide"):
        (tmp_path / folder).mkdir()
    (narrow, state), *_ = run_ranks(2, save, "adamw", str(tmp_path / "narrow"), -1, "bfloat16")
    (wide, expected), *_ = run_ranks(2, save, "adamw", str(tmp_path / "wide"), -1, "float32")
    assert narrow == pytest.approx(wide, abs=2e-3)
    assert any(not torch.equal(state[key], expected[key]) for key in expected)


def own_weights_after(name: str, steps: int):
    """This rank's shard of every weight after some steps of four ranks with two copies."""
    from tiny_engine import train

    from quadriga.engine.sharding import local, rank

    engine = engine_of(name, fsdp_size=2)
    train(engine, steps, rows=slice(rank(), rank() + 1))
    return torch.cat([local(p.detach()).flatten() for p in engine.model.parameters()])


@pytest.mark.parametrize("name", OPTIMISERS)
def test_copies_of_the_weights_stay_equal(name):
    first, second, first_copy, second_copy = run_ranks(4, own_weights_after, name, 3)
    assert torch.equal(first, first_copy)
    assert torch.equal(second, second_copy)
    assert not torch.equal(first, second), "else each rank holds everything"
