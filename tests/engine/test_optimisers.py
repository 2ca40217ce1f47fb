"""`optim.name`: each optimiser learns, takes the memory that it promises, and goes on with the same bits after a resume."""

from __future__ import annotations

import pytest
import torch
from engine_cases import mini_batch, ppo_loss, tiny_policy

from quadriga.checkpoint.shards import load_engine, save_engine
from quadriga.config.names import OPTIMISERS
from quadriga.config.schema_models import OptimConfig
from quadriga.engine import TrainingEngine
from quadriga.engine.compact_adam import CompactAdamW, decode, encode, round_at_random
from quadriga.engine.optimizer import orthogonal
from quadriga.errors import CheckpointError

OTHERS = [name for name in OPTIMISERS if name != "adamw"]


def new_engine(name: str, seed: int = 0) -> TrainingEngine:
    torch.set_num_threads(1)
    return TrainingEngine(tiny_policy(seed), optim=OptimConfig(name=name, lr=1e-2), total_steps=6)


def train(engine: TrainingEngine, steps: range) -> list[float]:
    losses = []
    for number in steps:
        losses.append(engine.train_mini_batch(mini_batch(seed=number), ppo_loss(), 40, with_entropy=True)["loss"])
        engine.end_step()
    return losses


def weights(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in engine.full_weights()}


@pytest.mark.parametrize("name", OTHERS)
def test_a_resumed_run_goes_on_with_the_same_bits(name, tmp_path):
    straight, first = new_engine(name), new_engine(name)
    expected = train(straight, range(6))
    assert train(first, range(3)) == expected[:3]
    save_engine(first, tmp_path)
    resumed = new_engine(name, seed=7)
    load_engine(resumed, tmp_path)
    assert train(resumed, range(3, 6)) == expected[3:]
    ours, theirs = weights(resumed), weights(straight)
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_the_state_of_another_optimiser_is_refused(tmp_path):
    save_engine(new_engine("adamw_8bit"), tmp_path)
    with pytest.raises(CheckpointError, match="optimiser that the run was started with"):
        load_engine(new_engine("adamw_bf16"), tmp_path)


@pytest.mark.parametrize(("name", "bytes_a_weight"), [("adamw_8bit", 2), ("adamw_bf16", 4), ("muon", 4)])
def test_the_state_takes_as_many_bytes_as_promised(name, bytes_a_weight):
    weight = torch.nn.Parameter(torch.randn(512, 1024))
    groups = [{"params": [weight], "weight_decay": 0.0}]
    if name == "muon":
        from quadriga.engine.optimizer import Muon

        optimizer: torch.optim.Optimizer = Muon(groups, 1e-3, (0.9, 0.999), [weight])
    else:
        optimizer = CompactAdamW(groups, 1e-3, (0.9, 0.999), 8 if name == "adamw_8bit" else 16)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    size = sum(value.nbytes for value in optimizer.state[weight].values())
    assert bytes_a_weight * weight.numel() <= size <= 1.02 * bytes_a_weight * weight.numel() + 4


@pytest.mark.parametrize(("bits", "tolerance"), [(32, 1e-6), (16, 0.02), (8, 0.2)])
def test_steps_are_those_of_adamw_up_to_rounding(bits, tolerance):
    """Gradients of very different sizes within a block: none of their weights may run away."""
    torch.manual_seed(0)
    start = torch.randn(6, 300)
    sizes = 10 ** torch.linspace(-5, 0, 300)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    compact = CompactAdamW([{"params": [ours], "weight_decay": 0.1}], 1e-3, (0.9, 0.999), bits)
    exact = torch.optim.AdamW([theirs], lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1)
    for _ in range(300):
        gradient = (torch.randn(6, 300) + 0.5) * sizes
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        compact.step()
        exact.step()
    way, off = theirs.detach() - start, ours.detach() - theirs.detach()
    for columns in (slice(0, 100), slice(100, 200), slice(200, 300)):  # small, middle, large gradients
        assert off[:, columns].norm() <= tolerance * way[:, columns].norm()


def test_rounding_at_random_is_right_on_average():
    values = torch.full((200_000,), 1.0 + 0.3 / 128)
    generator = torch.Generator().manual_seed(0)
    noise = torch.empty(values.shape, dtype=torch.int32).random_(generator=generator)
    rounded = round_at_random(values, noise, 16)
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 1 / 128}
    assert rounded.mean().item() == pytest.approx(values[0].item(), abs=5e-5)
    assert torch.equal(rounded, rounded.bfloat16().float())


@pytest.mark.parametrize("signed", [True, False])
def test_codes_keep_zeros_signs_and_sizes(signed):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(7, 3, 200, generator=generator).exp()  # blocks end inside a row of the weight
    values[2] = 0
    values[3, 1, 5:9] = 0
    if signed:
        values[4:] *= -1
    noise = torch.empty(values.shape, dtype=torch.int32).random_(generator=generator)
    codes, base = encode(values, noise, signed)
    assert codes.dtype == torch.uint8
    assert base.shape == (7, 3)
    read = decode(codes, base, signed)
    assert torch.equal(read == 0, values == 0)
    assert torch.equal(read.sign(), values.sign())
    off = (read / values - 1)[values != 0]
    assert off.abs().max() <= 1 / 8
    assert abs(float(off.mean())) < 0.005
    again, same_base = encode(read, noise, signed)
    assert torch.equal(decode(again, same_base, signed), read), "what lies on the grid stays there"


def test_a_small_second_moment_beside_a_large_one_is_not_lost():
    values = torch.zeros(1, 256)
    values[0, 0], values[0, 1] = 1.0, 1e-30
    codes, base = encode(values, torch.zeros(1, 256, dtype=torch.int32), signed=False)
    read = decode(codes, base, signed=False)
    assert read[0, 0] == 1
    assert 0 < read[0, 1] < 1e-9, "it would be divided by, so it must not be 0"


def test_an_orthogonal_update_stretches_all_directions_alike():
    matrices = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(0))
    for shape in (matrices, matrices.mT):
        stretches = torch.linalg.svdvals(orthogonal(shape))
        assert stretches.min() > 0.5
        assert stretches.max() < 1.4


def test_muon_treats_matrices_of_the_layers_and_adamw_the_rest():
    engine = new_engine("muon")
    train(engine, range(1))
    names = {parameter: name for name, parameter in engine.model.named_parameters()}
    kinds = {names[p]: "muon" if "momentum" in state else "adamw" for p, state in engine.optimizer.state.items()}
    for name, kind in kinds.items():
        is_matrix = "layers." in name and "norm" not in name and not name.endswith("bias")
        assert kind == ("muon" if is_matrix else "adamw"), name
