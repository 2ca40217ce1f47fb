"""verl's FSDP shards become a Hugging Face folder, and nothing in them is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quadriga.checkpoint.store import CheckpointStore, locate
from quadriga.cli import run
from quadriga.compat.verl_checkpoint import convert
from quadriga.errors import CheckpointError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trainer"))
from tiny_policy import write_model

WRITER = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM
dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ddp", "fsdp"))
state = {k: distribute_tensor(v, mesh, [Replicate(), Shard(0)]) for k, v in model.state_dict().items()}
torch.save(state, f"{sys.argv[2]}/model_world_size_2_rank_{dist.get_rank()}.pt")
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step's folder as verl's FSDP engine leaves it, written by two processes."""
    folder = tmp_path_factory.mktemp("verl")
    write_model(folder / "model")
    actor = folder / "global_step_7" / "actor"
    actor.mkdir(parents=True)
    (folder / "writer.py").write_text(WRITER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run([*torchrun, str(folder / "writer.py"), str(folder / "model"), str(actor)], check=True, timeout=120)
    described = actor / "huggingface"
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(described)
    (described / "config.json").write_text((folder / "model" / "config.json").read_text())
    return folder / "global_step_7"


def test_export_writes_the_same_weights(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(checkpoint), "--output", str(tmp_path / "policy")]) == 0
    assert "from verl's shards" in capsys.readouterr().out
    wanted = AutoModelForCausalLM.from_pretrained(checkpoint.parent / "model").state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").state_dict()
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").eos_token == "<eos>"


def test_verls_merger_is_the_same_export(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from quadriga.compat.verl.__main__ import run_module

    os.environ.pop("QUADRIGA_COMPAT_VERL", None)  # other tests start processes too
    given = ["--local_dir", str(checkpoint / "actor"), "--target_dir", str(tmp_path / "policy")]
    assert run_module("verl.model_merger", ["merge", "--backend", "fsdp", *given]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert run_module("verl.model_merger", ["merge", "--backend", "megatron", *given]) == 1
    assert "no counterpart" in capsys.readouterr().err


def test_a_file_with_code_in_it_is_not_opened(checkpoint: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    actor = tmp_path / "actor"
    (actor / "huggingface").mkdir(parents=True)
    (actor / "huggingface" / "config.json").write_text((checkpoint.parent / "model" / "config.json").read_text())
    torch.save({"w": torch.ones(1), "trap": Trap()}, actor / "model_world_size_1_rank_0.pt")
    with pytest.raises(CheckpointError, match="holds more than weights and is not opened"):
        convert(actor, tmp_path / "out")
    assert not (tmp_path / "sprung").exists()


def test_missing_shards_and_weights_that_do_not_fit_are_named(checkpoint: Path, tmp_path: Path) -> None:
    actor = tmp_path / "actor"
    (actor / "huggingface").mkdir(parents=True)
    shape = json.loads((checkpoint.parent / "model" / "config.json").read_text())
    (actor / "huggingface" / "config.json").write_text(json.dumps(shape))
    torch.save({"w": torch.ones(1)}, actor / "model_world_size_4_rank_2.pt")
    with pytest.raises(CheckpointError, match="lacks the shards of 3 of 4 ranks, first rank 0"):
        convert(actor, tmp_path / "out")
    (actor / "model_world_size_4_rank_2.pt").unlink()
    torch.save({"w": torch.ones(1)}, actor / "model_world_size_1_rank_0.pt")
    with pytest.raises(CheckpointError, match=r"missing, such as .*; 1 unknown, such as w"):
        convert(actor, tmp_path / "out")
    (actor / "model_world_size_1_rank_0.pt").write_bytes(b"no such file")
    with pytest.raises(CheckpointError, match=r"damaged|not opened"):
        convert(actor, tmp_path / "out")


def test_an_adapter_is_added_to_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    source = checkpoint.parent / "model"
    policy = get_peft_model(
        AutoModelForCausalLM.from_pretrained(source), LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"])
    )
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    actor = tmp_path / "actor"
    (actor / "huggingface").mkdir(parents=True)
    (actor / "huggingface" / "config.json").write_text((source / "config.json").read_text())
    torch.save(policy.state_dict(), actor / "model_world_size_1_rank_0.pt")
    with pytest.raises(CheckpointError, match="nothing says its scale"):
        convert(actor, tmp_path / "out")
    (actor / "lora_train_meta.json").write_text('{"r": 2, "lora_alpha": 6}')
    convert(actor, tmp_path / "out")
    ids = torch.arange(5).unsqueeze(0)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
    torch.testing.assert_close(found, policy(ids).logits, atol=1e-5, rtol=1e-4)


def test_a_run_that_should_go_on_from_verls_checkpoint_is_told_the_way(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="checkpoint of verl's") as caught:
        locate(checkpoint)
    assert "quadriga export" in str(caught.value)


def test_a_run_in_a_directory_of_verls_does_not_begin_anew_unasked(checkpoint: Path) -> None:
    """verl puts global_step_N into trainer.default_local_dir itself."""
    store = CheckpointStore(checkpoint.parent / "checkpoints")
    with pytest.raises(CheckpointError, match=r"global_step_7 is a checkpoint of verl's") as caught:
        store.find("auto")
    assert "quadriga export" in caught.value.fix
    assert "resume_mode=disable" in caught.value.fix
    assert store.find("disable") is None
    assert CheckpointStore(checkpoint.parent / "elsewhere" / "checkpoints").find("auto") is None
