"""`quadriga export`: what comes out of a checkpoint loads, or nothing comes out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quadriga.checkpoint import CheckpointStore
from quadriga.commands.export import main
from quadriga.errors import CheckpointError

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from tiny_policy import write_task


def tiny_policy(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
    )


def write(store: CheckpointStore, step: int, spoil=lambda folder: None) -> None:
    with store.writing(step) as draft:
        folder = draft.folder("huggingface")
        tiny_policy(step).save_pretrained(folder)
        words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b").save_pretrained(folder)
        spoil(folder)
        draft.write_state({"step": step})


@pytest.fixture
def run(tmp_path) -> Path:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    write(store, 1)
    write(store, 2)
    return tmp_path / "run"


def weights(folder: Path, **options) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, **options).named_parameters())


def test_the_newest_policy_of_a_run_directory_is_exported(run, tmp_path, capsys):
    assert main([str(run), "--output", str(tmp_path / "out")]) == 0
    truth = dict(tiny_policy(2).named_parameters())
    assert all(torch.equal(weight, truth[name]) for name, weight in weights(tmp_path / "out").items())
    assert "step 2" in capsys.readouterr().out
    assert not list(tmp_path.glob(".*"))


def test_a_given_checkpoint_is_exported(run, tmp_path):
    main([str(run / "checkpoints" / "global_step_1"), "--output", str(tmp_path / "out")])
    truth = dict(tiny_policy(1).named_parameters())
    assert all(torch.equal(weight, truth[name]) for name, weight in weights(tmp_path / "out").items())


def test_weights_are_converted_on_request(run, tmp_path):
    main([str(run), "--output", str(tmp_path / "out"), "--dtype", "bfloat16"])
    truth = dict(tiny_policy(2).named_parameters())
    for name, weight in weights(tmp_path / "out", dtype="auto").items():
        assert torch.equal(weight, truth[name].bfloat16())
    plain = json.loads((tmp_path / "out" / "config.json").read_text())
    assert plain["dtype"] == "bfloat16"


def test_a_damaged_checkpoint_is_not_exported(run, tmp_path):
    path = run / "checkpoints" / "global_step_2" / "huggingface" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        main([str(run / "checkpoints" / "global_step_2"), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def lose_a_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    stored = load_file(folder / "model.safetensors")
    stored.pop("model.norm.weight")
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def make_a_weight_infinite(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    stored = load_file(folder / "model.safetensors")
    stored["model.norm.weight"][0] = float("inf")
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def offer_a_pickle_instead(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(tiny_policy(0).state_dict(), folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lose_a_weight, r"model\.norm\.weight"),
        (make_a_weight_infinite, "not finite"),
        (offer_a_pickle_instead, "cannot load"),
        (lambda folder: (folder / "config.json").write_text("{}"), "cannot load"),
    ],
    ids=["lost weight", "infinite weight", "pickle", "no architecture"],
)
def test_a_policy_that_does_not_load_is_not_exported(tmp_path, spoil, told):
    store = CheckpointStore(tmp_path / "checkpoints")
    write(store, 1, spoil)
    with pytest.raises(CheckpointError, match=told):
        main([str(store.folder), "--output", str(tmp_path / "out")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


def test_an_existing_folder_is_replaced_only_on_request(run, tmp_path):
    out = ["--output", str(tmp_path / "out")]
    main([str(run / "checkpoints" / "global_step_1"), *out])
    with pytest.raises(CheckpointError, match="--overwrite"):
        main([str(run), *out])
    main([str(run), *out, "--overwrite"])
    truth = dict(tiny_policy(2).named_parameters())
    assert all(torch.equal(weight, truth[name]) for name, weight in weights(tmp_path / "out").items())


def test_a_folder_of_other_things_is_never_replaced(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="not replaced"):
        main([str(run), "--output", str(tmp_path / "out"), "--overwrite"])
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_a_checkpoint_without_policy_says_so(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    with store.writing(1) as draft:
        draft.write_state({})
    with pytest.raises(CheckpointError, match="no part 'huggingface'"):
        main([str(store.folder), "--output", str(tmp_path / "out")])


def train_adapter(folder: Path, **trainer: object) -> dict[str, str]:
    """A short run that trains an adapter on a tiny model; where it wrote, and the model."""
    from quadriga.trainer.main_ppo import run_ppo

    task = write_task(folder)
    task["algorithm"] = {"adv_estimator": "grpo"}
    task["actor_rollout_ref"]["model"] |= {"lora_rank": 4, "lora_alpha": 12}
    task["trainer"] |= {"total_training_steps": 2, "logger": [], **trainer}
    run_ppo(task)
    return {"run": task["trainer"]["default_local_dir"], "model": task["actor_rollout_ref"]["model"]["path"]}


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory) -> dict[str, str]:
    return train_adapter(tmp_path_factory.mktemp("lora"))


def test_an_adapter_comes_out_merged_or_apart_and_both_are_the_same_policy(lora_run, tmp_path):
    assert_same_policy(lora_run, tmp_path)


@pytest.mark.slow
def test_an_adapter_that_two_ranks_hold_comes_out_whole(tmp_path):
    import ray

    ray.shutdown()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    run = train_adapter(tmp_path / "task", executor="ray", n_gpus_per_node=2)
    ray.shutdown()
    assert_same_policy(run, tmp_path)


def assert_same_policy(lora_run: dict[str, str], tmp_path: Path) -> None:
    from peft import PeftModel

    main([lora_run["run"], "--output", str(tmp_path / "merged")])
    main([lora_run["run"], "--output", str(tmp_path / "adapter"), "--lora", "apart"])
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    start = AutoModelForCausalLM.from_pretrained(lora_run["model"])
    adapted = PeftModel.from_pretrained(start, tmp_path / "adapter")
    assert adapted.peft_config["default"].base_model_name_or_path == lora_run["model"]
    ids = torch.arange(20)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    untrained = AutoModelForCausalLM.from_pretrained(lora_run["model"])
    with torch.no_grad():
        expected = merged(ids).logits
        assert torch.allclose(adapted(ids).logits, expected, atol=1e-5)
        assert not torch.allclose(untrained(ids).logits, expected, atol=1e-3), "the adapter has learnt something"


def test_an_adapter_is_converted_and_replaced_on_request(lora_run, tmp_path, capsys):
    from safetensors.torch import load_file

    apart = [lora_run["run"], "--output", str(tmp_path / "out"), "--lora", "apart"]
    main(apart)
    main([*apart, "--overwrite", "--dtype", "bfloat16"])
    assert {w.dtype for w in load_file(tmp_path / "out" / "adapter_model.safetensors").values()} == {torch.bfloat16}
    assert "parameters in bfloat16, step 2" in capsys.readouterr().out


def test_a_run_without_lora_has_no_adapter_to_export(run, tmp_path):
    with pytest.raises(CheckpointError, match="has no LoRA adapter"):
        main([str(run), "--output", str(tmp_path / "out"), "--lora", "apart"])
    assert not list(tmp_path.glob("*out*"))
