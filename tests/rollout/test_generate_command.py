"""`quadriga generate` turns a file of prompts into lines of samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rollout_models import own_log_probs

from quadriga.errors import ConfigError, DataError
from quadriga.rollout.command import main

MODEL = ["--model", "builtin:arithmetic"]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_sample_is_written_with_its_log_probs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from quadriga.config.schema_models import ModelConfig
    from quadriga.models.load import load_policy, load_tokenizer

    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("3+4=\n\n12+7=\n", encoding="utf-8")
    assert main([str(prompts), *MODEL, "--output", str(output), "--n", "3", "--max-new-tokens", "6"]) == 0
    assert "6 samples of 2 prompts" in capsys.readouterr().out
    samples = lines(output)
    assert sorted((s["row"], s["sample"]) for s in samples) == [(r, s) for r in range(2) for s in range(3)]
    tokenizer, model = load_tokenizer("builtin:arithmetic"), load_policy(ModelConfig("builtin:arithmetic")).huggingface
    for s in samples:
        prompt = tokenizer(s["prompt"], add_special_tokens=False)["input_ids"]
        own = own_log_probs(model, prompt, s["token_ids"])
        torch.testing.assert_close(torch.tensor(s["log_probs"]), own, atol=1e-4, rtol=1e-4)
        assert s["response"] == tokenizer.decode(s["token_ids"], skip_special_tokens=True)


def test_the_same_seed_writes_the_same_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"question": f"{i}+{i}="}) + "\n" for i in range(5)), encoding="utf-8")
    common = [str(prompts), *MODEL, "--prompt-key", "question", "--max-new-tokens", "12", "--temperature", "2"]
    written = []
    for extra in (["--max-num-seqs", "1"], ["--max-num-seqs", "64"], ["--seed", "1"]):
        main([*common, *extra])
        out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        written.append(sorted(out, key=lambda s: s["row"]))
    assert written[0] == written[1]
    assert written[1] != written[2]


def test_bad_input_is_named(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "1+1="}\n', encoding="utf-8")
    with pytest.raises(DataError, match="no column 'prompt', only question"):
        main([str(prompts), *MODEL])
    with pytest.raises(DataError, match="does not exist"):
        main([str(tmp_path / "nothing.jsonl"), *MODEL])
    with pytest.raises(ConfigError, match="temperature=-1"):
        main([str(prompts), *MODEL, "--temperature", "-1"])
    with pytest.raises(DataError, match="cannot write"):
        main([str(prompts), *MODEL, "--prompt-key", "question", "--output", str(tmp_path / "no" / "out.jsonl")])
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match="no prompts in"):
        main([str(tmp_path / "empty.txt"), *MODEL])
