"""The state of an engine on disk: exact, for any number of ranks, and unable to run code."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny_engine import make_engine, train, whole_state

from quadriga.checkpoint import shards
from quadriga.checkpoint.shards import copy_engine, expected_bytes, load_engine, save_engine
from quadriga.errors import CheckpointError


def saved(folder: Path, steps: int = 2, **shape) -> Path:
    engine = make_engine(**shape)
    train(engine, steps)
    folder.mkdir()
    save_engine(engine, folder)
    return folder


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- one process ----


def test_a_loaded_engine_goes_on_bit_for_bit(tmp_path):
    engine = make_engine()
    train(engine, 3)
    save_engine(engine, tmp_path)
    draws_then = torch.rand(3)
    loaded = make_engine(seed=7)
    load_engine(loaded, tmp_path)
    assert torch.equal(torch.rand(3), draws_then)
    assert equal(whole_state(engine), whole_state(loaded))
    assert loaded.schedule is not None
    assert (loaded.optimizer_steps, loaded.schedule.step) == (3, 3)
    assert train(engine, 2, first_seed=3) == train(loaded, 2, first_seed=3)
    assert equal(whole_state(engine), whole_state(loaded))


def test_counters_come_back(tmp_path):
    engine = make_engine()
    engine.nonfinite.total, engine.nonfinite.in_a_row, engine.budget.limit = 3, 1, 4096
    save_engine(engine, tmp_path)
    loaded = make_engine()
    load_engine(loaded, tmp_path)
    assert (loaded.nonfinite.total, loaded.nonfinite.in_a_row, loaded.budget.limit) == (3, 1, 4096)


def test_saving_does_not_disturb_an_optimiser_that_has_not_stepped(tmp_path):
    """An actor in the critic's warm-up is saved before its first step."""
    disturbed, undisturbed, resumed = make_engine(), make_engine(), make_engine()
    save_engine(disturbed, tmp_path)
    load_engine(resumed, tmp_path)
    for engine in (disturbed, undisturbed, resumed):
        train(engine, 2)
    assert equal(whole_state(disturbed), whole_state(undisturbed))
    assert equal(whole_state(resumed), whole_state(undisturbed))


@pytest.mark.parametrize("tied", [True, False])
def test_what_it_will_take_on_disk_is_known_before_the_first_step(tied):
    engine = make_engine(tied=tied, hidden=96)
    expected = expected_bytes(engine, "adamw")
    assert not engine.optimizer.state, "without making any"
    train(engine, 1)
    taken = copy_engine(engine).bytes
    assert 0.9 * taken < expected <= taken


def test_a_tied_weight_is_written_once(tmp_path):
    tied, untied = saved(tmp_path / "tied"), saved(tmp_path / "untied", tied=False)
    names = load_file(tied / "rank_00000_0000.safetensors").keys()
    assert "model.causal_lm.model.embed_tokens.weight" in names
    assert "model.causal_lm.lm_head.weight" not in names
    assert "model.causal_lm.lm_head.weight" in load_file(untied / "rank_00000_0000.safetensors")


def test_hyper_parameters_come_from_the_configuration_of_the_resumed_run(tmp_path):
    engine = make_engine(lr=1e-2)
    train(engine)
    save_engine(engine, tmp_path)
    resumed = make_engine(lr=5e-4)
    load_engine(resumed, tmp_path)
    assert resumed.optimizer is not None
    assert resumed.learning_rate == resumed.optimizer.param_groups[0]["lr"] == 5e-4


def test_an_engine_without_optimiser_takes_the_weights_alone(tmp_path):
    from quadriga.engine import TrainingEngine

    folder = saved(tmp_path / "actor")
    frozen = TrainingEngine(make_engine(seed=3).model)
    load_engine(frozen, folder)
    stored = load_file(folder / "rank_00000_0000.safetensors")
    for name, parameter in frozen.model.named_parameters():
        assert torch.equal(parameter, stored[f"model.{name}"])


def test_large_states_are_cut_into_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", 4096)
    folder = saved(tmp_path / "actor")
    sizes = [path.stat().st_size for path in folder.glob("rank_00000_*.safetensors")]
    assert len(sizes) > 5
    assert max(sizes) < 4 * 4096
    loaded, whole = make_engine(seed=1), make_engine()
    load_engine(loaded, folder)
    train(whole, 2)
    assert equal(whole_state(loaded), whole_state(whole))


def test_torch_distributed_checkpoint_can_read_it(tmp_path):
    import torch.distributed.checkpoint as dcp

    folder = saved(tmp_path / "actor")
    name = "model.causal_lm.model.layers.0.self_attn.q_proj.weight"
    target = {name: torch.zeros(12, 12)}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert torch.equal(target[name], load_file(folder / "rank_00000_0000.safetensors")[name])


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    folder = saved(tmp_path / "actor")
    modes = {path.stat().st_mode for path in folder.iterdir()}
    assert len(modes) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_state_on_a_gpu_comes_back_bit_for_bit(tmp_path):
    engine = make_engine(device="cuda")
    train(engine, 3)
    save_engine(engine, tmp_path)
    draws_then = torch.rand(3, device="cuda")
    loaded = make_engine(seed=7, device="cuda")
    load_engine(loaded, tmp_path)
    assert torch.equal(torch.rand(3, device="cuda"), draws_then)
    assert equal(whole_state(engine), whole_state(loaded))


# ---- refused ----


@pytest.mark.parametrize(
    ("shape", "named"),
    [({"layers": 3}, "layers.2"), ({"hidden": 16}, "12"), ({"layers": 1}, "layers.1")],
    ids=["more layers", "wider", "fewer layers"],
)
def test_the_state_of_another_model_is_refused_and_changes_nothing(tmp_path, shape, named):
    folder = saved(tmp_path / "actor")
    engine = make_engine(**shape)
    train(engine)
    before = whole_state(engine)
    with pytest.raises(CheckpointError, match=named):
        load_engine(engine, folder)
    assert equal(whole_state(engine), before)


def test_a_missing_shard_is_refused_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", 4096)
    folder = saved(tmp_path / "actor")
    (folder / "rank_00000_0003.safetensors").unlink()
    engine = make_engine(seed=2)
    train(engine)
    before = whole_state(engine)
    with pytest.raises(CheckpointError, match="holds 0 of the"):
        load_engine(engine, folder)
    assert equal(whole_state(engine), before)


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("victim", ["engine.json", "rank_00000_0000.safetensors", ".metadata", "extra.pt"])
def test_a_hostile_file_runs_no_code(tmp_path, victim):
    folder = saved(tmp_path / "actor")
    exploded = tmp_path / "exploded"
    (folder / victim).write_bytes(pickle.dumps({"model": Bomb(exploded)}))
    if victim in (".metadata", "extra.pt"):
        load_engine(make_engine(), folder)
    else:
        with pytest.raises(CheckpointError, match=victim):
            load_engine(make_engine(), folder)
    assert not exploded.exists()
    pickle.loads((folder / victim).read_bytes())
    assert exploded.exists(), "the file is not hostile enough to prove anything"


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"DCP_SHARDING_INFO": "[]"},
        {"DCP_SHARDING_INFO": "no json"},
        {"DCP_SHARDING_INFO": '{"a": {"saved_offsets": [1]}}'},
    ],
    ids=["none", "list", "text", "dimensions"],
)
def test_a_shard_with_a_strange_header_is_refused(tmp_path, header):
    folder = saved(tmp_path / "actor")
    save_file({"a": torch.zeros(2, 2)}, folder / "rank_00000_0001.safetensors", header)
    with pytest.raises(CheckpointError, match="rank_00000_0001"):
        load_engine(make_engine(), folder)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 99},
        {"format": None},
        {"values": []},
        {"values": {"schedule.step": [1]}},
        {"aliases": None},
        {"tensors": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_strange_index_is_refused(tmp_path, change):
    folder = saved(tmp_path / "actor")
    index = json.loads((folder / "engine.json").read_text())
    (folder / "engine.json").write_text(json.dumps(index | change))
    with pytest.raises(CheckpointError, match=r"engine\.json|format 99"):
        load_engine(make_engine(), folder)


def test_a_folder_that_this_node_does_not_see_is_named_with_the_host(tmp_path):
    with pytest.raises(CheckpointError, match="all nodes share"):
        save_engine(make_engine(), tmp_path / "elsewhere")


# ---- several ranks ----


def train_and_save(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    from quadriga.engine.sharding import rank, world_size

    engine = make_engine()
    torch.manual_seed(100 + rank())
    train(engine, steps, rows=slice(rank(), None, world_size()))
    save_engine(engine, folder)
    return whole_state(engine) | {"draw": torch.rand(2)}


def load_and_save_again(folder: Path, copy: Path) -> dict[str, torch.Tensor]:
    engine = make_engine(seed=11)
    load_engine(engine, folder)
    state = whole_state(engine)
    save_engine(engine, copy)
    return state | {"draw": torch.rand(2)}


def test_two_ranks_then_one_then_four_hold_the_same_state(tmp_path):
    folders = [tmp_path / name for name in ("two", "one", "four", "two_again")]
    for folder in folders:
        folder.mkdir()
    two = run_ranks(2, train_and_save, folders[0], 3)
    one = run_ranks(1, load_and_save_again, folders[0], folders[1])
    four = run_ranks(4, load_and_save_again, folders[1], folders[2])
    two_again = run_ranks(2, load_and_save_again, folders[2], folders[3])
    truth = {name: value for name, value in two[0].items() if name != "draw"}
    for state in two + one + four + two_again:
        assert equal(truth, {name: value for name, value in state.items() if name != "draw"})
    assert torch.equal(one[0]["draw"], two[0]["draw"])
    assert len({tuple(state["draw"].tolist()) for state in four}) == 4


def load_and_draw(folder: Path) -> torch.Tensor:
    engine = make_engine(seed=5)
    load_engine(engine, folder)
    return torch.rand(2)


def test_as_many_ranks_as_wrote_it_get_their_own_random_states_back(tmp_path):
    written = run_ranks(2, train_and_save, tmp_path, 1)
    drawn = run_ranks(2, load_and_draw, tmp_path)
    assert [state["draw"].tolist() for state in written] == [draw.tolist() for draw in drawn]


def load_expecting_an_error(folder: Path) -> str:
    try:
        load_engine(make_engine(), folder)
    except CheckpointError as error:
        return str(error)
    return ""


def test_the_missing_shard_of_a_rank_is_noticed_by_whoever_needs_it(tmp_path):
    run_ranks(2, train_and_save, tmp_path, 1)
    (tmp_path / "rank_00001_0000.safetensors").unlink()
    (message,) = run_ranks(1, load_expecting_an_error, tmp_path)
    assert "that this rank needs" in message


def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    (example,) = (block.partition("```")[0] for block in page.split("```python\n")[1:])
    monkeypatch.chdir(tmp_path)
    engine = make_engine()
    names: dict[str, Any] = {"engine": engine, "step": 4}
    exec(example, names)
    assert names["found"].step == names["step"] == 4
