"""Training on episodes of many turns: what a row holds, and that timing, processes and interruptions change no bit of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from letter_model import TEMPLATE, write_model
from nasty_templates import CHATML, COUNTS_MESSAGES, STRIPS_THINKING, byte_tokenizer
from omegaconf import OmegaConf
from safetensors.torch import load_file

from quadriga.agents.recorder import Texts
from quadriga.errors import ConfigError
from quadriga.trainer.main_ppo import run_ppo
from quadriga.trainer.ppo.episodes import told_of_template

HERE = Path(__file__).parent
GAMES = HERE / "letter_games.py"
STEPS = 4
SPECIAL = ("<eos>", "<pad>", "<u>", "<a>", "<tool>")
MEASURED = (
    "timing_s/",
    "perf/",
    "memory/",
    "reward/seconds",
    "stream/",
    "rollout/prefix_reuse",
    "episode/agent_s",
    "time",
)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    task = tmp_path_factory.mktemp("task")
    model = write_model(task / "model")
    rows = [
        {"data_source": "letters", "prompt": f"say {chr(97 + i)}", "extra_info": {"index": i, "split": "train"}}
        for i in range(16)
    ]
    (task / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*changes: dict, folder: Path | None = None, steps: int = STEPS, agent: str = "Vowels") -> Path:
        torch.set_num_threads(1)
        folder = folder or tmp_path_factory.mktemp("run")
        short = {
            "data": {
                "train_files": str(task / "rows.jsonl"),
                "val_files": str(task / "rows.jsonl"),
                "train_batch_size": 4,
                "val_max_samples": 4,
                "max_prompt_length": 16,
                "max_response_length": 32,
            },
            "actor_rollout_ref": {
                "model": {"path": str(model)},
                "actor": {"optim": {"lr": 1e-2}},
                "rollout": {
                    "n": 4,
                    "multi_turn": {"max_tokens_per_turn": 5},
                    "agent": {"default_agent_loop": f"{GAMES}:{agent}"},
                },
            },
            "reward": {"num_workers": 1},
            "algorithm": {"adv_estimator": "grpo"},
            "trainer": {
                "executor": "local",
                "device": "cpu",
                "total_training_steps": steps,
                "test_freq": 2,
                "save_freq": 2,
                "default_local_dir": str(folder),
                "rollout_data_dir": str(folder / "rollouts"),
            },
        }
        run_ppo(OmegaConf.merge(short, *changes))
        return folder

    return run


def rollout(**changes: Any) -> dict:
    return {"actor_rollout_ref": {"rollout": changes}}


def ahead(staleness: int, mode: str = "ordered") -> dict:
    return {"async_training": {"staleness": staleness, "mode": mode}}


def metrics(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in lines]


def samples(run: Path) -> list[dict]:
    files = sorted((run / "samples").glob("train_*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def weights(run: Path, step: int = STEPS) -> dict:
    return load_file(run / "checkpoints" / f"global_step_{step}" / "huggingface" / "model.safetensors")


def assert_same(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    ours, theirs = weights(a), weights(b)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def ordered(train):
    return {k: train(ahead(k)) if k else train() for k in (0, 1)}


def test_a_row_is_the_conversation_token_by_token(ordered):
    by_turns = {sample["turns"] for sample in samples(ordered[0])}
    assert 3 in by_turns
    for sample in samples(ordered[0]):
        tokens, mask = "".join(sample["tokens"]["texts"]), sample["tokens"]["mask"]
        said = [m["content"] for m in sample["messages"] if m["role"] == "assistant"]
        read = [m["content"] for m in sample["messages"][1:] if m["role"] == "user"]
        assert len(said) == sample["turns"] == len(read) + 1
        assert mask[-1] == 1
        assert sample["finish_reason"] == "done"
        blocks = "".join(map(str, mask)).replace("01", "0 1").replace("10", "1 0").split()
        assert len(blocks) == 2 * sample["turns"] - 1
        assert all(text in tokens for text in read)
        written = [text for text, m in zip(sample["tokens"]["texts"], mask) if m and text not in SPECIAL]
        vowels = sum(letter in "aeiou" for text in written for letter in text) / 5
        assert sample["score"] == pytest.approx(vowels)
        read_at = [p for p, m in zip(sample["tokens"]["rollout_log_probs"], mask) if not m]
        assert all(p == 0 for p in read_at)


def test_generation_and_training_agree_on_the_log_probs_of_every_turn(train):
    run = train({"algorithm": {"use_kl_in_reward": True}}, steps=1)
    for sample in samples(run):
        told = sample["tokens"]
        for mine, theirs, written in zip(told["rollout_log_probs"], told["trainer_log_probs"], told["mask"]):
            assert not written or abs(mine - theirs) < 2e-4


def test_the_figures_tell_of_turns_and_tokens(ordered):
    rows = [s for s in samples(ordered[0]) if s["step"] == 1]
    told = metrics(ordered[0])[1]
    assert told["step"] == 1
    assert told["episode/turns/mean"] == pytest.approx(sum(s["turns"] for s in rows) / len(rows))
    written = sum(sum(s["tokens"]["mask"]) for s in rows) / len(rows)
    assert told["episode/written_tokens/mean"] == pytest.approx(written)
    assert told["response_length/mean"] == pytest.approx(sum(s["response_tokens"] for s in rows) / len(rows))
    assert told["response_length/mean"] == pytest.approx(written + told["episode/read_tokens/mean"])
    assert told["episode/finish/done"] == 1
    assert [line for line in metrics(ordered[0]) if any(k.startswith("val/") for k in line)]
    lines = [json.loads(line) for line in (ordered[0] / "metrics.jsonl").read_text().splitlines()]
    assert all(line["rollout/prefix_reuse"] >= 0.95 for line in lines if "actor/grad_norm" in line)


@pytest.mark.parametrize("k", [0, 1])
def test_neither_the_processes_nor_their_timing_change_a_bit(train, ordered, k):
    changes = [ahead(k)] if k else []
    other = train(rollout(agent={"num_workers": 3, "max_concurrent": 2}), *changes, agent="SlowVowels")
    assert_same(other, ordered[k])


@pytest.mark.parametrize(("k", "agent"), [(0, "Vowels"), (1, "Vowels"), (2, "rewrites")])
def test_a_killed_run_goes_on_bit_for_bit(train, ordered, tmp_path, k, agent):
    changes, folder = [ahead(k)] if k else [], tmp_path / "run"
    whole = ordered[k] if agent == "Vowels" else train(*changes, agent=agent)
    shutil.copytree(whole, folder, symlinks=True)
    shutil.rmtree(folder / "checkpoints" / "global_step_4")
    train(*changes, {"trainer": {"resume_mode": "auto"}}, folder=folder, agent=agent)
    assert_same(folder, whole)
    assert samples(folder) == samples(whole)


@pytest.mark.parametrize(
    ("agent", "changes"),
    [
        ("SlowVowels", {}),
        ("rewrites", {"async_training": {"partial_rollout": False}}),
        ("rewrites", {"async_training": {"partial_rollout_recompute": True}}),
    ],
)
def test_free_mode_loses_no_episode_and_uses_none_twice(train, agent, changes):
    rows = samples(train(ahead(2, "free"), changes, agent=agent))
    ends = [s["uid"] for s in rows]
    if agent == "rewrites":  # one row a context: every episode has as many as it has turns, but for its first two
        last = [s for s in rows if s.get("context", 0) == s["turns"] - 2]
        ends = [s["uid"] for s in last]
        assert len(rows) == sum(s["turns"] - 1 for s in last)
    assert len(ends) == STEPS * 4 * 4
    assert all(ends.count(uid) == 4 for uid in ends)


def test_kept_episodes_can_be_trained_on_again(train, ordered, tmp_path):
    kept = str(tmp_path / "kept")
    first = train({"episodes": {"write_to": kept}})
    again = train({"episodes": {"read_from": kept}})
    assert_same(first, ordered[0])
    read = [(s["uid"], s["tokens"]["ids"], s["tokens"]["mask"], s["score"]) for s in samples(again)]
    assert read == [(s["uid"], s["tokens"]["ids"], s["tokens"]["mask"], s["score"]) for s in samples(first)]
    assert all("actor/grad_norm" in line for line in metrics(again) if "actor/pg_loss" in line)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"adv_estimator": "gae"}},
        {"algorithm": {"adv_estimator": "remax"}},
        {"algorithm": {"filter_groups": {"enable": True}}},
        {"algorithm": {"overlong_filter": True, "length_reward": "kimi"}},
    ],
    ids=["gae", "remax", "filter_groups", "shaping"],
)
def test_everything_downstream_takes_rows_with_holes(train, changes):
    told = metrics(train(changes, steps=2))[-1]
    assert told["episode/turns/mean"] > 1
    assert told["actor/grad_norm"] > 0


MINI_BATCHES = {"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 2}}}


@pytest.fixture(scope="module")
def rewritten(train):
    return train(ahead(1), MINI_BATCHES, {"algorithm": {"use_kl_in_reward": True}}, agent="rewrites", steps=2)


def test_a_context_that_an_agent_rewrites_is_trained_on_too(rewritten):
    by_episode: dict[tuple, list[dict]] = {}
    for sample in samples(rewritten):
        by_episode.setdefault((sample["step"], sample["uid"], sample["sample_index"]), []).append(sample)
    assert len(by_episode) == 2 * 4 * 4
    for (_, uid, _), rows in by_episode.items():
        assert [row["context"] for row in rows] == list(range(1 + sum(map(ord, uid)) % 3))
        assert rows[0]["turns"] == 1 + len(rows)
        assert len({row["score"] for row in rows}) == 1
        for row in rows:
            told = row["tokens"]
            assert len(told["ids"]) == row["response_tokens"] > 0
            assert (0 in told["mask"]) == (row["context"] == 0)
            for mine, theirs, written in zip(told["rollout_log_probs"], told["trainer_log_probs"], told["mask"]):
                assert not written or abs(mine - theirs) < 2e-4 or row["step"] > 1  # the second step is a version ahead
    for step in (1, 2):
        told = next(line for line in metrics(rewritten) if line["step"] == step and "actor/grad_norm" in line)
        sizes = [len(rows) for name, rows in by_episode.items() if name[0] == step]
        assert told["episode/contexts/mean"] == pytest.approx(sum(sizes) / len(sizes))
        assert told["episode/contexts/max"] == max(sizes) > 1
        scores = [rows[0]["score"] for name, rows in by_episode.items() if name[0] == step]
        assert told["critic/score/mean"] == pytest.approx(sum(scores) / len(scores))
        assert told["actor/grad_norm"] > 0


def test_everything_downstream_takes_episodes_of_several_contexts(train):
    algorithm = {"adv_estimator": "gae", "use_pf_ppo": True, "filter_groups": {"enable": True}}
    critic = {"ppo_mini_batch_size": 1}
    told = metrics(train({"algorithm": algorithm, "critic": critic}, MINI_BATCHES, agent="rewrites", steps=1))[-1]
    assert told["episode/contexts/mean"] > 1
    assert told["actor/grad_norm"] > 0
    assert told["critic/grad_norm"] > 0


def test_a_row_names_its_agent(train, tmp_path):
    rows = [
        {
            "data_source": "letters",
            "prompt": f"say {chr(97 + i)}",
            "agent_name": name,
            "reward_model": {"ground_truth": ""},
        }
        for i, name in enumerate(["single_turn", f"{GAMES}:Vowels"] * 2)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 7.0\n")
    run = train(
        {
            "data": {"train_files": str(file), "val_files": str(file), "shuffle": False},
            "custom_reward_function": {"path": str(reward)},
        },
        rollout(agent={"default_agent_loop": "single_turn"}),
        steps=1,
    )
    single = {s["uid"]: s for s in samples(run)}
    assert [single[f"0:{i}"]["score"] == 7.0 for i in range(4)] == [True, False, True, False]
    assert [single[f"0:{i}"]["turns"] > 1 for i in range(4)] == [False, True, False, True]


def test_an_agent_that_is_none_is_refused_before_anything_starts(train):
    with pytest.raises(ConfigError, match="did you mean 'tools'"):
        train(rollout(agent={"default_agent_loop": "tool"}))
    with pytest.raises(ConfigError, match="neither `run` nor"):
        train(rollout(agent={"default_agent_loop": f"{HERE / 'letter_model.py'}:Path"}))


def test_what_a_template_cannot_do_is_told_before_anything_starts(train):
    numbered = "{{ messages | length }}" + TEMPLATE
    tools = rollout(agent={"default_agent_loop": "tools"}, multi_turn={"tools": ["calculator"]})
    with pytest.raises(ConfigError, match="cannot go on with a message of role 'tool': the chat template changes what"):
        train(tools, {"data": {"chat_template": numbered}})

    def told(template: str, has_tools: bool = False) -> list[str]:
        return told_of_template(Texts(byte_tokenizer("<|im_end|>"), template, {}, [], "hermes"), has_tools)

    assert told(CHATML) == []
    assert [line.partition(":")[0] for line in told(COUNTS_MESSAGES)] == [
        f"the chat template cannot go on with a message of role '{role}'"
        for role in ("user", "tool", "system", "assistant")
    ]
    (line,) = told(STRIPS_THINKING)
    assert "does not simply append a message of role user, tool, system, assistant" in line
    assert told(CHATML, has_tools=True) == [
        "the chat template does not show the policy its tools: tell of them in the prompts, or set data.chat_template"
    ]


def test_an_engine_apart_changes_no_bit(train, ordered):
    roles = {"actor_rollout": "training", "rollout": "generation"}
    pools = {"training": [1], "generation": [1]}
    other = train({"trainer": {"placement": {"pools": pools, "roles": roles}}}, ahead(1))
    assert_same(other, ordered[1])


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["SlowVowels", "rewrites"])
def test_on_ray_two_engines_and_columns_in_the_object_store_change_no_bit(train, ordered, agent):
    import ray

    here = ordered[1] if agent == "SlowVowels" else train(ahead(1), agent=agent)
    roles = {"actor_rollout": "training", "rollout": "generation"}
    pools = {"training": [1], "generation": [2]}
    ray.shutdown()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        other = train(
            {
                "trainer": {"executor": "ray", "placement": {"pools": pools, "roles": roles}, "logger": []},
                "transfer_queue": {"enable": True},
            },
            ahead(1),
            agent=agent,
        )
    finally:
        ray.shutdown()
    assert samples(other) == samples(here)
    ours, theirs = weights(other), weights(here)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
