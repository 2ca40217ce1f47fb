"""Whatever would stop a save shows before step 1, and a generation config that transformers would not save is saved."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from quadriga.checkpoint.huggingface import load_exported, policy_export
from quadriga.config.schema_models import ModelConfig
from quadriga.engine.weights import host_state_dict
from quadriga.errors import CheckpointError
from quadriga.models.load import load_policy, load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from tiny_pairs import pair_job, write_pairs
from tiny_policy import write_model, write_task

GREEDY_WITH_SAMPLING_VALUES = {
    "do_sample": False,
    "temperature": 0.6,
    "top_p": 0.9,
    "eos_token_id": 0,
    "pad_token_id": 1,
}


def give_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps(GREEDY_WITH_SAMPLING_VALUES))
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        GenerationConfig.from_pretrained(folder).save_pretrained(folder / "refused")


def assert_saved(folder: Path) -> None:
    saved = json.loads((folder / "generation_config.json").read_text())
    assert {name: saved.get(name) for name in GREEDY_WITH_SAMPLING_VALUES if name != "do_sample"} == {
        name: value for name, value in GREEDY_WITH_SAMPLING_VALUES.items() if name != "do_sample"
    }
    assert not saved.get("do_sample"), "what it says is what it said"
    AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def model(tmp_path) -> Path:
    folder = write_model(tmp_path / "model")
    give_generation_config(folder)
    return folder


def test_a_reinforcement_learning_run_of_such_a_model_has_its_checkpoint(tmp_path):
    from quadriga.trainer.main_ppo import run_ppo

    config = write_task(tmp_path / "task")
    give_generation_config(tmp_path / "task" / "model")
    config["algorithm"] = {"adv_estimator": "grpo"}
    config["trainer"] |= {"total_training_steps": 1, "test_freq": -1}
    run_ppo(config)
    assert_saved(tmp_path / "task" / "run" / "checkpoints" / "global_step_1" / "huggingface")


@pytest.mark.parametrize("kind", ["dpo", "rm", "sft"])
def test_a_supervised_run_of_such_a_model_has_its_export(tmp_path, model, kind):
    from quadriga.trainer.supervised.entry import run_supervised

    job = pair_job(write_pairs(tmp_path / "pairs.jsonl"), model, tmp_path / "run", trainer={"total_training_steps": 1})
    if kind == "sft":
        rows = [{"question": "say a", "answer": "aa"}] * 16
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        job["data"] |= {"train_files": str(tmp_path / "rows.jsonl"), "val_files": None}
    run_supervised(job, kind)
    folder = tmp_path / "run" / "huggingface"
    if kind == "rm":
        assert load_exported(folder, folder).parameters > 0
    else:
        assert_saved(folder)


def test_what_cannot_be_saved_is_an_error_before_anything_is_trained(tmp_path, model):
    tokenizer = load_tokenizer(model)
    export = policy_export(load_policy(ModelConfig(path=str(model)), tokenizer), tokenizer)
    export.rehearse(tmp_path / "checkpoints")
    assert not list((tmp_path / "checkpoints").iterdir()), "it leaves no trace"

    (tmp_path / "occupied").write_text("a file")
    with pytest.raises(CheckpointError, match="Cannot write to"):
        export.rehearse(tmp_path / "occupied" / "checkpoints")

    tokenizer.init_kwargs["of_the_user"] = object()  # which no JSON file can hold
    with pytest.raises(CheckpointError, match=r"no checkpoint of this model could be written: TypeError") as caught:
        export.rehearse(tmp_path / "checkpoints")
    assert "nothing has been trained yet" in caught.value.fix
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_tokenizer_that_becomes_another_beside_the_model_is_told_of_before_anything_is_trained(tmp_path, caplog):
    """transformers reads any tokenizer beside a Qwen2 model as Qwen2's own."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=40, num_key_value_heads=1, **shape)).save_pretrained(tmp_path / "qwen2")
    policy = load_policy(ModelConfig(path=str(tmp_path / "qwen2")))
    own = load_tokenizer("builtin:arithmetic")
    policy_export(policy, own).rehearse(tmp_path / "checkpoints")
    assert "the tokenizer will read text differently" in caplog.text
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(9)}, unk_token="w0"))
    export = policy_export(policy, PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", unk_token="w0"))
    with pytest.raises(CheckpointError, match=r"with 9 tokens becomes a Qwen2Tokenizer with 10"):
        export.rehearse(tmp_path / "checkpoints")


def test_a_run_that_could_not_be_saved_ends_before_its_first_step(tmp_path, monkeypatch):
    """The state of a user's own sampler goes into the checkpoint as it is."""
    from quadriga.trainer.main_ppo import run_ppo

    config = write_task(tmp_path / "task")
    (tmp_path / "sampler.py").write_text(UNSAVABLE)
    config["algorithm"] = {"adv_estimator": "grpo"}
    config["data"]["sampler"] = {"class_path": str(tmp_path / "sampler.py"), "class_name": "Unsavable"}
    with pytest.raises(CheckpointError, match=r"state.loader.*is a set, which JSON cannot hold"):
        run_ppo(config)
    assert not (tmp_path / "task" / "run" / "metrics.jsonl").exists()


UNSAVABLE = """
from quadriga.data.sampler import ResumableSampler

class Unsavable(ResumableSampler):
    def __init__(self, data_source, data_config):
        super().__init__(len(data_source), data_config.train_batch_size, True, 0)

    def state_dict(self):
        return {**super().state_dict(), "seen": {1, 2}}
"""


def test_the_folder_has_the_weights_names_dtype_and_mode_that_others_expect(tmp_path, model):
    tokenizer = load_tokenizer(model)
    policy = load_policy(ModelConfig(path=str(model), lora_rank=2), tokenizer)
    export = policy_export(policy, tokenizer, torch.bfloat16)
    export.part(host_state_dict(policy, torch.bfloat16)).write(str(tmp_path / "out"))
    assert load_exported(tmp_path / "out", tmp_path / "out").dtype == "bfloat16"
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (described["dtype"], described["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(tokenizer)
    assert policy.huggingface.config.dtype == torch.float32, "the model that is trained is left as it is"
