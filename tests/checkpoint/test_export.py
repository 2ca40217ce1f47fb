"""`quadriga export`: what comes out of a checkpoint loads, or nothing comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quadriga.checkpoint import CheckpointStore
from quadriga.checkpoint.command import main
from quadriga.errors import CheckpointError


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
