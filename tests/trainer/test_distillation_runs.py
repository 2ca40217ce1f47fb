"""On-policy distillation in whole runs on tiny models: a student comes nearer to its teacher, in every way there is."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tiny_policy import write_model, write_task

from quadriga.config import load_config
from quadriga.config.distillation import Teacher
from quadriga.errors import ConfigError, DataError, WorkerError
from quadriga.trainer.main_ppo import run_ppo
from quadriga.trainer.ppo import teacher_endpoint
from quadriga.trainer.ppo.teacher_endpoint import TeacherEndpoint
from quadriga.trainer.ppo.teachers import Teachers

STEPS = 6


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    write_model(folder / "teacher", seed=7)
    write_model(folder / "other", seed=8)
    return {**write_task(folder), "folder": folder}


@pytest.fixture
def train(task, tmp_path):
    def run(distillation, **changes) -> list[dict]:
        trainer = {"default_local_dir": str(tmp_path / "run"), "total_training_steps": STEPS, "resume_mode": "disable"}
        base = {k: v for k, v in task.items() if k != "folder"}
        given = {"trainer": trainer, "distillation": {"enabled": True, **distillation}}
        run_ppo(OmegaConf.to_container(OmegaConf.merge(base, given, changes)))
        lines = (Path(trainer["default_local_dir"]) / "metrics.jsonl").read_text().splitlines()
        return [m for m in map(json.loads, lines) if "actor/loss" in m]

    return run


def teacher(task, name="teacher", **more):
    return {"model_path": str(task["folder"] / name), **more}


def came_nearer(metrics, name="teacher_model", by=0.5):
    kl = [m[f"distillation/{name}/reverse_kl"] for m in metrics]
    return kl[-1] < by * kl[0]


ALONE = {"use_task_rewards": False}


@pytest.mark.parametrize(
    "loss",
    [
        {**ALONE, "loss_mode": "k3+"},
        {**ALONE, "loss_mode": "k1", "use_policy_gradient": True},
        {**ALONE, "loss_mode": "forward_kl_topk", "topk": 8},
        {**ALONE, "loss_mode": "jsd_topk", "topk": 8, "jsd_beta": 0.5},
    ],
    ids=lambda loss: loss["loss_mode"],
)
def test_the_student_comes_nearer_to_its_teacher(train, task, loss):
    metrics = train({"teacher_models": {"teacher_model": teacher(task)}, "distillation_loss": loss})
    assert came_nearer(metrics)
    assert "timing_s/teacher" in metrics[0]
    assert "critic/vf_loss" not in metrics[0], "without task rewards there is no critic"
    if "topk" in loss:
        assert 0 < metrics[0]["distillation/student_mass"] < 1
        assert (
            metrics[0]["distillation/loss_min"]
            <= metrics[0]["distillation/loss"]
            <= metrics[0]["distillation/loss_max"]
        )
        assert metrics[-1]["distillation/overlap_ratio"] > metrics[0]["distillation/overlap_ratio"]


def test_task_rewards_and_a_teacher_together_over_several_mini_batches(train, task):
    metrics = train(
        {"teacher_models": {"teacher_model": teacher(task)}, "distillation_loss": {"distillation_loss_coef": 0.1}},
        algorithm={"adv_estimator": "grpo"},
        actor_rollout_ref={"actor": {"ppo_mini_batch_size": 4, "ppo_epochs": 2}},
    )
    assert metrics[-1]["critic/score/mean"] > metrics[0]["critic/score/mean"]
    assert metrics[0]["distillation/loss"] > 0
    assert metrics[0]["actor/pg_loss"] != metrics[0]["actor/loss"]


def test_each_row_goes_to_the_teacher_of_its_key(train, task, tmp_path):
    rows = [json.loads(line) for line in Path(task["data"]["train_files"]).read_text().splitlines()]
    for i, row in enumerate(rows):
        row["data_source"] = ("sums", "letters")[i % 2]
    prompts = tmp_path / "two_sources.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = train(
        {
            "teacher_models": {"first": teacher(task, key="sums"), "rest": teacher(task, "other")},
            "distillation_loss": ALONE,
        },
        data={"train_files": str(prompts)},
    )
    assert came_nearer(metrics, "first", by=0.9)
    assert came_nearer(metrics, "rest", by=0.9)
    assert metrics[0]["distillation/first/tokens"] + metrics[0]["distillation/rest/tokens"] == pytest.approx(1)


def test_the_policy_teaches_itself_with_the_hint_of_a_successful_sibling(train):
    metrics = train(
        {
            "teacher_models": {"me": {"model_path": "self"}},
            "hint": "sibling",
            "hint_template": "{hint}",
            "hint_min_score": 0.3,
            "distillation_loss": {**ALONE, "loss_mode": "forward_kl_topk", "topk": 4},
        },
        data={"max_prompt_length": 16},
    )
    assert 0 < metrics[0]["distillation/me/tokens"] < 1, "rows without a successful sibling are not judged"
    assert metrics[0]["distillation/loss"] > 0


# ---------------------------------------------------------------------------------------------------------------- endpoint


class Scorer(BaseHTTPRequestHandler):
    """The completions of a server that gives prompt_logprobs, by a real model."""

    model = None
    broken: str | None = None
    faults: list = []
    """What goes wrong with the next requests: a status, `cut` or `closed`."""
    seen: list[dict] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Scorer.seen.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
        if Scorer.faults:
            self.fail(Scorer.faults.pop())
            return
        if Scorer.broken == "status":
            self.send_error(400, "no such model")
            return
        with torch.no_grad():
            logits = Scorer.model(torch.tensor([body["prompt"]])).logits[0].log_softmax(-1)
        told: list = [None]
        for position, token in enumerate(body["prompt"][1:]):
            best = logits[position].topk(body["prompt_logprobs"]).indices.tolist()
            told.append({str(t): {"logprob": float(logits[position, t])} for t in {*best, token}})
        answer = {"choices": [{"text": "", "prompt_logprobs": None if Scorer.broken == "silent" else told}]}
        reply = json.dumps(answer).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(reply)

    def fail(self, fault):
        if fault == "cut":  # half a reply
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"{")
        elif fault == "closed":
            self.close_connection = True
        else:
            self.send_error(fault)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def server(task):
    from transformers import AutoModelForCausalLM

    Scorer.model = AutoModelForCausalLM.from_pretrained(task["folder"] / "teacher").eval()
    listening = ThreadingHTTPServer(("127.0.0.1", 0), Scorer)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_address[1]}/v1"
    listening.shutdown()


@pytest.mark.parametrize("loss", [{**ALONE, "loss_mode": "k3+"}, {**ALONE, "loss_mode": "forward_kl_topk", "topk": 8}])
def test_a_server_teaches_like_the_same_model_here(train, task, server, loss, monkeypatch):
    monkeypatch.setenv("MY_TEACHER_KEY", "secret")
    Scorer.broken = None
    remote = {"endpoint": server, "model": "tiny", "api_key_env": "MY_TEACHER_KEY"}
    there = train({"teacher_models": {"teacher_model": remote}, "distillation_loss": loss})
    here = train({"teacher_models": {"teacher_model": teacher(task)}, "distillation_loss": loss})
    assert Scorer.seen[-1]["path"] == "/v1/completions"
    assert Scorer.seen[-1]["key"] == "Bearer secret"
    for a, b in zip(there, here):
        assert a["distillation/teacher_model/reverse_kl"] == pytest.approx(
            b["distillation/teacher_model/reverse_kl"], rel=1e-2
        )
        assert a["distillation/loss"] == pytest.approx(b["distillation/loss"], rel=1e-2)


@pytest.mark.parametrize(("fault", "message"), [("status", "400"), ("silent", "prompt_logprobs")])
def test_a_server_that_cannot_teach_ends_the_run_before_anything_is_generated(train, server, tmp_path, fault, message):
    Scorer.broken, Scorer.seen = fault, []
    with pytest.raises(WorkerError, match=message):
        train({"teacher_models": {"one": {"endpoint": server, "model": "tiny"}}, "distillation_loss": ALONE})
    assert [len(asked["prompt"]) for asked in Scorer.seen] == [2]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def asks(endpoint, model="tiny", timeout_s=20.0):
    return TeacherEndpoint(Teacher("one", None, "", endpoint, model), timeout_s, 2)


@pytest.mark.parametrize("fault", ["cut", 503, "closed"])
def test_a_server_that_comes_back_goes_on_teaching(server, fault, monkeypatch):
    monkeypatch.setattr(teacher_endpoint, "PAUSES_S", (0.0,) * 7)
    Scorer.broken, Scorer.seen, Scorer.faults = None, [], [fault] * 5
    told = asks(server).score([([1, 2, 3], 2)], 0)
    assert len(Scorer.seen) == 6
    assert len(told[0].log_probs) == 2


def test_a_server_that_stays_away_is_given_up_with_a_reason(server, monkeypatch):
    monkeypatch.setattr(teacher_endpoint, "PAUSES_S", (0.0, 0.0))
    Scorer.broken, Scorer.seen, Scorer.faults = None, [], [503] * 9
    with pytest.raises(WorkerError, match="3 tries"):
        asks(server).score([([1, 2], 1)], 0)
    Scorer.faults = []
    nobody = socket.socket()
    nobody.bind(("127.0.0.1", 0))  # a port that is taken and at which nobody listens
    with pytest.raises(WorkerError, match="did not answer"):
        asks(f"http://127.0.0.1:{nobody.getsockname()[1]}/v1").score([([1, 2], 1)], 0)
    nobody.close()


# ----------------------------------------------------------------------------------------------------------------- refusals


def checked(section, **more):
    return load_config(OmegaConf.to_container(OmegaConf.merge({"distillation": {"enabled": True, **section}}, more)))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "there is no teacher"),
        ({"teacher_models": {"a": {}}}, "either model_path or endpoint"),
        ({"teacher_models": {"a": {"model_path": "m", "endpoint": "http://x"}}}, "has both"),
        ({"teacher_models": {"a": {"modelpath": "m"}}}, "unknown keys: modelpath"),
        ({"teacher_models": {"a": {"endpoint": "http://x"}}}, "the model's name there"),
        ({"teacher_models": {"a": {"model_path": "m"}, "b": {"model_path": "n"}}}, "several teachers have the key"),
        ({"teacher_models": {"a": {"model_path": "m"}}, "distillation_loss": {"loss_mode": "k1"}}, "gradient of 0"),
        (
            {
                "teacher_models": {"a": {"model_path": "m"}},
                "distillation_loss": {"loss_mode": "jsd_topk", "use_policy_gradient": True},
            },
            "not an advantage",
        ),
        ({"teacher_models": {"a": {"endpoint": "localhost/v1", "model": "m"}}}, "no address of a server"),
        ({"teacher_models": {"a": {"endpoint": "ftp://host/v1", "model": "m"}}}, "no address of a server"),
        ({"teacher_models": {"a": {"endpoint": "http://:8000", "model": "m"}}}, "no address of a server"),
        (
            {
                "teacher_models": {"a": {"model_path": "m"}},
                "distillation_loss": {"loss_mode": "k3+", "use_policy_gradient": True},
            },
            "not an advantage",
        ),
        (
            {"teacher_models": {"a": {"model_path": "m"}}, "hint": "solution", "hint_template": "look"},
            "no place for the hint",
        ),
        (
            {"teacher_models": {"a": {"model_path": "self", "key": "x"}, "b": {"model_path": "m"}}, "hint": "solution"},
            "the only teacher",
        ),
        ({"teacher_models": {"a": {"model_path": "self"}}}, "needs a hint"),
        ({"teacher_models": {"a": {"model_path": "self"}}, "hint": "sibling"}, "there is one a prompt"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(section, message):
    with pytest.raises(ConfigError, match=message):
        checked(section)


def test_a_server_cannot_teach_at_another_temperature():
    with pytest.raises(ConfigError, match="temperature 1"):
        checked(
            {"teacher_models": {"a": {"endpoint": "http://x", "model": "m"}}},
            actor_rollout_ref={"rollout": {"temperature": 0.7}},
        )


def test_a_teacher_with_another_vocabulary_is_refused(train, task):
    write_model(task["folder"] / "foreign", letters="xyz ")
    with pytest.raises((DataError, WorkerError), match="another vocabulary"):
        train({"teacher_models": {"one": teacher(task, "foreign")}, "distillation_loss": ALONE})


def test_hints_leave_the_response_as_it_is_and_prompts_may_differ_in_length(task):
    from quadriga.models.load import load_tokenizer
    from quadriga.protocol import DataProto

    tokenizer = load_tokenizer(str(task["folder"] / "model"))
    config = checked({"teacher_models": {"a": {"model_path": "m"}}, "hint": "help", "hint_template": "{hint}"})
    teachers = Teachers(config, tokenizer)
    ids = torch.tensor([[1, 5, 6, 7, 8, 0], [4, 5, 6, 9, 1, 1]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    rows = DataProto.from_dict(
        {"input_ids": ids, "attention_mask": mask, "response_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
    )
    got = teachers.with_hints(rows, ["ab", "cde"], ["zz", None])
    asked = got.batch["input_ids"][0][got.batch["attention_mask"][0].bool()].tolist()
    assert tokenizer.decode(asked[:-3]) == "zz\nab".replace("\n", tokenizer.decode(tokenizer.encode("\n")))
    assert asked[-3:] == [7, 8, 0]
    as_it_was = got.batch["input_ids"][1][got.batch["attention_mask"][1].bool()].tolist()
    assert as_it_was == [4, 5, 6, 9]
    assert torch.equal(got.batch["response_mask"], rows.batch["response_mask"])
