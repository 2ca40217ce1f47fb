"""The embedded model: small, loadable, right about half of the time, and made by a script that can make it again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trainer"))

from tiny_sft import make_script

from quadriga.config.schema_models import ModelConfig
from quadriga.data.files import load_rows
from quadriga.models.load import load_policy, load_tokenizer
from quadriga.models.source import resolve_model_path
from quadriga.rewards.scorers import score
from quadriga.rollout import Request, SamplingParams, create_engine

MODEL = "builtin:arithmetic"


@pytest.fixture(scope="module")
def right() -> np.ndarray:
    """`[rows, 9]`: which answers to the held-out problems are right; the first is greedy, the others are samples."""
    rows = load_rows("builtin:arithmetic/test")
    rows = rows.read(np.arange(len(rows)))
    tokenizer = load_tokenizer(MODEL)
    module = load_policy(ModelConfig(path=MODEL), tokenizer).eval().huggingface
    engine = create_engine("native", module=module, eos_token_ids=[tokenizer.eos_token_id], max_model_len=24)
    found = np.zeros((len(rows), 9))
    for temperature, samples in ((0.0, (0,)), (1.0, tuple(range(1, 9)))):
        params = SamplingParams(temperature=temperature, max_new_tokens=12)
        requests = [
            Request(str(number), tokenizer(row["prompt"]).input_ids, params, (0, number), samples)
            for number, row in enumerate(rows)
        ]
        with torch.no_grad():
            for done in engine.generate(requests):
                row = rows[int(done.request_id)]
                text = tokenizer.decode(done.token_ids, skip_special_tokens=True)
                judged = score(row["data_source"], text, row["reward_model"]["ground_truth"])
                found[int(done.request_id), done.sample_index] = judged["acc"]
                assert judged["parsed"] or done.sample_index > 0
    return found


def test_the_model_takes_less_than_three_megabytes():
    folder = Path(resolve_model_path(MODEL))
    assert sum(file.stat().st_size for file in folder.rglob("*")) <= 3e6


def test_the_tokenizer_has_one_token_per_character_and_no_chat_template():
    tokenizer = load_tokenizer(MODEL)
    text = "12+34-5*6=#### 7890"
    assert tokenizer.tokenize(text) == list(text)
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.chat_template is None
    assert tokenizer.is_fast


def test_greedy_answers_to_held_out_problems_leave_room_to_learn(right):
    assert 0.30 <= right[:, 0].mean() <= 0.60


def test_the_right_answer_is_nearly_always_among_eight_samples(right):
    assert right[:, 1:].max(1).mean() >= 0.95


def test_no_held_out_problem_is_in_the_lessons_in_any_order(tmp_path):
    make_script().write_lessons(tmp_path / "lessons.jsonl")
    lessons = {json.loads(line)["question"] for line in (tmp_path / "lessons.jsonl").open()}
    rows = load_rows("builtin:arithmetic/test")
    for row in rows.read(np.arange(len(rows))):
        question = row["extra_info"]["question"]
        assert question not in lessons
        a, b = question.rstrip("=").split("+")
        assert f"{b}+{a}=" not in lessons


@pytest.mark.parametrize(
    ("problem", "answer"),
    [((57, 68), 15), ((12, 34), 46), ((7, 5), 2), ((60, 72), 32)],
)
def test_the_careless_teacher_forgets_carries(problem, answer):
    assert make_script().careless(*problem) == answer


def test_the_script_makes_the_same_bytes_twice(tmp_path):
    script = make_script()
    threads = torch.get_num_threads()
    try:
        for name in ("one", "two"):
            script.main(["--steps", "5", "--output", str(tmp_path / name)])
    finally:
        torch.set_num_threads(threads)
    for file in sorted(p.name for p in (tmp_path / "one").iterdir()):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


def test_the_model_has_the_shape_that_the_script_gives_it():
    shape = json.loads((Path(resolve_model_path(MODEL)) / "config.json").read_text())
    assert {name: shape[name] for name in make_script().SHAPE} == make_script().SHAPE
