"""`quadriga generate`: a text, standard input, a conversation or a file; for people, or as JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from quadriga.commands.generate import main
from quadriga.errors import ConfigError, DataError, ResourceError

MODEL = ["--model", "builtin:arithmetic"]


def own_log_probs(model, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Log-probs of `response` after `prompt` by the model's own forward pass over the whole sequence."""
    model.eval()
    model.config._attn_implementation = "eager"
    logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1)


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
        main([*common, "--json", *extra])
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
    with pytest.raises(ConfigError, match="max-num-seqs 0 decodes nothing"):
        main(["1+1=", *MODEL, "--max-num-seqs", "0"])
    with pytest.raises(DataError, match="cannot write"):
        main([str(prompts), *MODEL, "--prompt-key", "question", "--output", str(tmp_path / "no" / "out.jsonl")])
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match="no prompts in"):
        main([str(tmp_path / "empty.txt"), *MODEL])


@pytest.mark.parametrize("device", ["npu", "a b", "hpu:x"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    with pytest.raises(ResourceError, match=f"cannot use {device}: it was built without support for"):
        main(["1+1=", *MODEL, "--device", device])


GREEDY = [*MODEL, "--temperature", "0", "--max-new-tokens", "8"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_a_text_is_answered_as_text_and_as_json_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["12+7=", *GREEDY]) == 0
    answer = capsys.readouterr().out.strip()
    assert answer
    assert "{" not in answer
    assert main(["12+7=", *GREEDY, "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["prompt"], line["response"].strip()) == ("12+7=", answer.removesuffix(" …"))
    assert len(line["log_probs"]) == len(line["token_ids"])


def test_standard_input_is_one_prompt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("12+7="))
    assert main(["-", *GREEDY, "--json"]) == 0
    from_terminal = json.loads(capsys.readouterr().out)
    assert from_terminal["prompt"] == "12+7="
    monkeypatch.setattr("sys.stdin", io.StringIO("12+7=\n"))  # as `echo` writes it
    assert main(["-", *GREEDY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == from_terminal
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(DataError, match="standard input is empty"):
        main(["-", *GREEDY])


def test_chat_goes_through_a_template_which_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match=r"no chat template(?s:.)*--chat-template"):
        main(["12+7=", "--chat", *GREEDY])
    main(["12+7=", *GREEDY])
    plain = capsys.readouterr().out
    assert main(["12+7=", "--chat", "--chat-template", TEMPLATE, *GREEDY]) == 0
    assert capsys.readouterr().out == plain, "the template says the same"


def test_a_conversation_goes_on_until_the_input_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("12+7=\n\n3+4=\n"))
    assert main(["--chat", "--chat-template", TEMPLATE, *GREEDY]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    with pytest.raises(ConfigError, match="there is no prompt"):
        main(GREEDY)


def test_several_answers_are_shown_with_their_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "two.txt").write_text("3+4=\n12+7=\n")
    assert main([str(tmp_path / "two.txt"), *GREEDY]) == 0
    out = capsys.readouterr().out
    assert "[0.0] 3+4=" in out
    assert "[1.0] 12+7=" in out
