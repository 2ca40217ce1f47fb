"""Whatever an agent does costs its own episode only: the step completes, the rest is right, nothing is left running."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import psutil
import pytest
from letter_model import write_model
from omegaconf import OmegaConf

from quadriga.errors import RewardError
from quadriga.trainer.main_ppo import run_ppo

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(400)
ENDS = {
    "good": "done",
    "raises": "error",
    "hangs": "time",
    "does not heed": "time",
    "blocks": "stuck",
    "segfaults": "crashed",
    "exits": "crashed",
    "leaves": "error",
    "is killed": "crashed",
    "leaks": "done",
    "cancels all": "error",
    "never ends": "turns",
    "starts a process": "done",
    "bad ids": "error",
    "begins anew": "done",
    "begins anew for ever": "contexts",
    "bad reward": "error",
    "gives up": "done",
    "odd words": "done",
}
KINDS = list(ENDS) + ["good"] * 2


def write_rows(file: Path, kinds: list[str]) -> str:
    rows = [
        {
            "data_source": "letters",
            "prompt": "say a",
            "extra_info": {"index": i, "split": "train", "kind": kind, "text": f"say {chr(97 + i)}"},
        }
        for i, kind in enumerate(kinds)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def train(folder: Path, kinds: list[str], **changes: dict) -> tuple[dict, dict[tuple, dict]]:
    """One step; its metrics, and its samples by row and number."""
    folder.mkdir(parents=True)
    rows = write_rows(folder / "rows.jsonl", kinds)
    config = {
        "data": {
            "train_files": rows,
            "val_files": write_rows(folder / "val.jsonl", ["good"] * 2),
            "train_batch_size": len(kinds),
            "max_prompt_length": 16,
            "max_response_length": 24,
            "shuffle": False,
        },
        "actor_rollout_ref": {
            "model": {"path": str(write_model(folder / "model"))},
            "rollout": {
                "n": 2,
                "agent": {
                    "default_agent_loop": f"{HERE / 'hostile_agents.py'}:run",
                    "num_workers": 2,
                    "episode_timeout_s": 4.0,
                    "stall_s": 3.0,
                    "max_contexts": 3,
                },
                "multi_turn": {"max_assistant_turns": 6},
            },
        },
        "algorithm": {"adv_estimator": "grpo"},
        "reward": {"num_workers": 1, "max_error_rate": 1.0},
        "trainer": {
            "executor": "local",
            "device": "cpu",
            "total_training_steps": 1,
            "val_before_train": False,
            "default_local_dir": str(folder / "run"),
            "rollout_data_dir": str(folder / "rollouts"),
        },
    }
    run_ppo(OmegaConf.merge(config, changes))
    (line,) = (folder / "run/metrics.jsonl").read_text().splitlines()
    samples = [json.loads(s) for s in (folder / "run/samples/train_00000001.jsonl").read_text().splitlines()]
    return json.loads(line), {(s["uid"], s["sample_index"]): s for s in samples}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    peaceful = train(folder / "peaceful", ["good"] * len(KINDS))
    return train(folder / "hostile", KINDS), peaceful


def test_every_kind_of_failure_ends_as_what_it_is_and_is_counted(runs):
    (figures, samples), _ = runs
    for (uid, _), sample in samples.items():
        kind = KINDS[int(uid.partition(":")[2])]
        assert sample["finish_reason"] == ENDS[kind], (kind, sample.get("episode_error"))
        if ENDS[kind] in ("error", "crashed", "stuck"):
            assert sample["episode_error"]
    shares = Counter(ENDS[kind] for kind in KINDS)
    for reason, count in shares.items():
        assert figures[f"episode/finish/{reason}"] == pytest.approx(count / len(KINDS)), reason
    assert figures["episode/leaked_tasks"] == 6
    assert figures["episode/given_up"] == 2
    assert figures["episode/again"] >= 8  # each of 4 kinds that end or stop a process, in 2 samples, was tried twice


def test_the_others_wrote_what_they_would_have_written_alone(runs):
    (_, samples), (_, peaceful) = runs
    for key, sample in samples.items():
        if KINDS[int(key[0].partition(":")[2])] in ("good", "leaks", "starts a process", "odd words"):
            assert sample["tokens"] == peaceful[key]["tokens"]
            assert sample["score"] == peaceful[key]["score"] == 1.0


def test_an_answer_that_nobody_waited_for_is_no_part_of_the_episode(runs):
    (_, samples), _ = runs
    given_up = [s for (uid, _), s in samples.items() if KINDS[int(uid.partition(":")[2])] == "gives up"]
    assert [(s["turns"], s.get("context", 0)) for s in given_up] == [(2, 0)] * 2
    assert all(sum(s["tokens"]["mask"]) <= 8 for s in given_up)


def test_a_failed_episode_has_the_score_for_errors_and_keeps_what_was_written(runs):
    (_, samples), (_, peaceful) = runs
    for key, sample in samples.items():
        if ENDS[KINDS[int(key[0].partition(":")[2])]] in ("error", "time"):
            assert sample["score"] == 0
            assert sample["tokens"]["ids"][:4] == peaceful[key]["tokens"]["ids"][:4]


def test_nothing_is_left_running(runs):
    left = [p.cmdline() for p in psutil.Process(os.getpid()).children(recursive=True)]
    assert not [line for line in left if "keeper_main" in " ".join(line) or line[:1] == ["sleep"]]
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "1000"]]


def test_a_step_in_which_nobody_wrote_anything_completes(tmp_path):
    figures, samples = train(tmp_path / "silent", ["raises at once"] * 4)
    assert figures["episode/finish/error"] == 1
    assert {sample["response_tokens"] for sample in samples.values()} == {0}
    assert figures["stream/staleness/max"] == figures["actor/grad_norm"] == 0


def test_a_failed_episode_has_the_score_for_errors_where_a_manager_scores_whole_batches_too(tmp_path):
    (tmp_path / "reward.py").write_text(
        "def f(data_sources, solution_strs, ground_truths, extra_infos):\n    return [7.0] * 4\n"
    )
    batches = {
        "custom_reward_function": {"path": str(tmp_path / "reward.py"), "name": "f"},
        "reward_model": {"reward_manager": "batch"},
    }
    scores = {"on_error": -0.5, "num_workers": 1, "max_error_rate": 1.0}
    _, samples = train(tmp_path / "run", ["raises", "good"], **batches, reward=scores)
    assert [samples[f"0:{i}", k]["score"] for i in range(2) for k in range(2)] == [-0.5, -0.5, 1.0, 1.0]
    with pytest.raises(RewardError, match=r"an agent failed[\s\S]*this agent raises"):
        train(tmp_path / "stops", ["raises", "good"], **batches, reward={"on_error": "stop", "max_error_rate": 0.5})
