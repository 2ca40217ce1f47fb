"""The entry point as its users call it: Ray started or found, pools and workers made, errors surfacing, timeline written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from omegaconf import OmegaConf

import quadriga
from quadriga.config.load import CONFIG_DIR
from quadriga.errors import ConfigError, ResourceError, WorkerError
from quadriga.trainer import main_ppo
from quadriga.trainer.before_start import auto_set_device
from quadriga.trainer.constants_ppo import DEFAULT_ENV_VARS, get_ppo_ray_runtime_env
from quadriga.trainer.main_ppo import TaskRunner, run_ppo
from quadriga.trainer.ppo.crew import Crew
from quadriga.trainer.ppo.ray_trainer import ResourcePoolManager, Role

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ray_8():
    ray.shutdown()
    env_vars = {"PYTHONPATH": str(HERE)}
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": env_vars},
    )
    yield
    ray.shutdown()


def complete_config(**trainer):
    config = OmegaConf.load(CONFIG_DIR / "ppo_trainer.yaml")
    config.trainer.update(trainer)
    return config


class RecordingRunner(TaskRunner):
    """Starts everything as usual and writes down what came up."""

    def run(self, config):
        from quadriga.config import load_config

        checked = load_config(config)
        actor_class, group_class = self.add_actor_rollout_worker(checked)
        self.add_critic_worker(checked)
        self.add_reward_model_worker(checked)
        self.add_ref_policy_worker(checked, actor_class)
        crew = Crew(checked, self.role_worker_mapping, self.init_resource_pool_mgr(checked), group_class)
        try:
            reports = crew.start()
        finally:
            crew.shutdown()
        lines = [
            {"role": r.role, "rank": r.rank, "world": r.world_size, "pid": r.pid, "backend": r.collectives}
            for r in reports
        ]
        Path(config.trainer.rollout_data_dir).write_text(json.dumps({"workers": lines, "env": dict(os.environ)}))


class FailingRunner(TaskRunner):
    def run(self, config):
        raise ZeroDivisionError("one over none")


class OurFailure(TaskRunner):
    def run(self, config):
        raise WorkerError("a worker fell over", "pick it up")


def test_every_role_the_config_needs_is_alive(ray_8, tmp_path):
    config = complete_config(n_gpus_per_node=2, rollout_data_dir=str(tmp_path / "seen"))
    config.actor_rollout_ref.actor.use_kl_loss = True
    config.reward_model.enable = True
    config.reward_model.model.path = str(Path(quadriga.__file__).parent / "assets" / "arithmetic")
    config.reward_model.enable_resource_pool = True
    config.reward_model.n_gpus_per_node = 1
    run_ppo(config, task_runner_class=RecordingRunner)
    seen = json.loads((tmp_path / "seen").read_text())["workers"]
    places = {(w["role"], w["rank"], w["world"]) for w in seen}
    shared = {(role, rank, 2) for role in ("actor_rollout", "critic", "ref") for rank in (0, 1)}
    assert places == shared | {("rm", 0, 1)}
    assert len({w["pid"] for w in seen if w["role"] != "rm"}) == 2, "roles of one pool share its processes"
    assert {w["backend"] for w in seen} == {"gloo"}


def test_env_defaults_reach_a_runner_on_a_ray_started_by_others(ray_8, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    config = complete_config(n_gpus_per_node=1, rollout_data_dir=str(tmp_path / "seen"))
    config.algorithm.adv_estimator = "grpo"
    config.actor_rollout_ref.rollout.n = 2
    config.transfer_queue.enable = True
    config.ray_kwargs.ray_init = {"runtime_env": {"env_vars": {"NCCL_DEBUG": "INFO"}}}
    run_ppo(config, task_runner_class=ray.remote(num_cpus=1)(RecordingRunner))
    seen = json.loads((tmp_path / "seen").read_text())
    assert [w["role"] for w in seen["workers"]] == ["actor_rollout"]
    assert seen["env"]["NCCL_CUMEM_ENABLE"] == "0"
    assert seen["env"]["NCCL_DEBUG"] == "INFO", "the user's runtime_env wins over the defaults"
    assert seen["env"]["TRANSFER_QUEUE_ENABLE"] == "1"


def test_an_exception_in_the_runner_surfaces_and_the_timeline_is_written(ray_8, tmp_path):
    config = complete_config()
    config.ray_kwargs.timeline_json_file = str(tmp_path / "timeline.json")
    with pytest.raises(ZeroDivisionError, match="one over none"):
        run_ppo(config, task_runner_class=FailingRunner)
    assert isinstance(json.loads((tmp_path / "timeline.json").read_text()), list)
    with pytest.raises(WorkerError, match="a worker fell over") as error:
        run_ppo(config, task_runner_class=OurFailure)
    assert error.value.fix == "pick it up"


def test_too_few_slots_end_in_seconds(ray_8):
    start = time.monotonic()
    with pytest.raises(ResourceError, match="Total available CPUs 8 is less than total desired CPUs 16"):
        run_ppo(complete_config(n_gpus_per_node=16))
    with pytest.raises(ResourceError, match="2 nodes are wanted"):
        run_ppo(complete_config(nnodes=2))
    with pytest.raises(ResourceError, match="Total available GPUs 0"):
        run_ppo(complete_config(device="cuda"))
    assert time.monotonic() - start < 30


def test_bad_configuration_stops_before_any_process_starts(monkeypatch):
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    with pytest.raises(ConfigError, match=r"trainer\.n_gpu_per_node") as error:
        run_ppo({"trainer": {"n_gpu_per_node": 1}})
    assert "trainer.n_gpus_per_node" in error.value.fix


def test_first_example_of_seed_000_runs_as_written(ray_8, shared_dir, monkeypatch, tmp_path):
    """The snippet itself, on eight workers; only the length of the run and its folder are cut down on the way."""
    text = next((shared_dir / "seeds").glob("000_*")).read_text().replace("verl", "quadriga")
    start = text.index("from quadriga.trainer.main_ppo import run_ppo\nfrom omegaconf")
    snippet = text[start : text.index("run_ppo(config)", start) + len("run_ppo(config)")]
    assert "config.trainer.n_gpus_per_node = 8" in snippet
    whole_run = main_ppo.run_ppo

    def one_step(config):
        config.trainer.update(total_training_steps=1, val_before_train=False, default_local_dir=str(tmp_path / "run"))
        config.data.update(val_max_samples=8, max_prompt_length=16, max_response_length=12)
        whole_run(config)

    monkeypatch.setattr(main_ppo, "run_ppo", one_step)
    monkeypatch.chdir(CONFIG_DIR.parent)
    exec(compile(snippet, "seed 000, example 1", "exec"), {})
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_resource_pool_spec_of_seed_000():
    runner = TaskRunner()
    config = complete_config(n_gpus_per_node=8, nnodes=2)
    manager = runner.init_resource_pool_mgr(config)
    assert isinstance(manager, ResourcePoolManager)
    assert manager.resource_pool_spec == {"global_pool": [8, 8]}


def test_roles_have_their_names():
    assert {r.name: str(r) for r in Role} == {
        "Actor": "actor",
        "Rollout": "rollout",
        "ActorRollout": "actor_rollout",
        "Critic": "critic",
        "RefPolicy": "ref",
        "RewardModel": "rm",
        "ActorRolloutRef": "actor_rollout_ref",
        "Env": "env",
        "Teacher": "teacher",
    }


def test_runtime_env_defaults_yield_to_the_users_environment(monkeypatch):
    for name in DEFAULT_ENV_VARS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "TRACE")
    runtime_env = get_ppo_ray_runtime_env()
    assert runtime_env["working_dir"] is None
    assert runtime_env["env_vars"]["TOKENIZERS_PARALLELISM"] == "true"
    assert runtime_env["env_vars"]["NCCL_CUMEM_ENABLE"] == "0"
    assert "NCCL_DEBUG" not in runtime_env["env_vars"]
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {"working_dir": "/somewhere"}}')
    assert "working_dir" not in get_ppo_ray_runtime_env()


def test_device_is_chosen_only_where_it_is_open(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = complete_config(device="cuda")
    auto_set_device(config)
    assert config.trainer.device == "cuda"
    config = complete_config(device=None)
    auto_set_device(config)
    assert config.trainer.device in ("cuda", "npu", "cpu")
    config = complete_config(device=None)
    config.ray_kwargs.ray_init = {"address": "10.0.0.1:6379"}
    auto_set_device(config)
    assert config.trainer.device is None, "the cluster decides, not the driver's machine"


def python(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=150
    )


def test_command_line_starts_ray_and_leaves_no_litter(tmp_path):
    arguments = ["--config-name=quickstart", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=1"]
    arguments += ["++ray_kwargs.ray_init.num_cpus=2", "data.val_max_samples=8"]
    run = python("-m", "quadriga.trainer.main_ppo", *arguments, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "actor_rollout in 2 processes" in run.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["outputs"]
    (run_directory,) = (tmp_path / "outputs/quadriga").glob("arithmetic-20*")
    assert (run_directory / "checkpoints/global_step_1/huggingface/model.safetensors").exists()


def test_command_line_names_the_nearest_key(tmp_path):
    run = python("-m", "quadriga.trainer.main_ppo", "trainer.n_gpu_per_node=2", cwd=tmp_path)
    assert run.returncode == 1
    assert "unknown key trainer.n_gpu_per_node" in run.stderr
    assert "did you mean trainer.n_gpus_per_node" in run.stderr
    assert "Traceback" not in run.stderr


def test_unreachable_cluster_is_told_in_seconds(tmp_path):
    start = time.monotonic()
    run = python("-m", "quadriga", "train", "ray_kwargs.ray_init.address=127.0.0.1:1", cwd=tmp_path)
    assert run.returncode == 1
    assert "ResourceError: no Ray cluster answers at 127.0.0.1:1" in run.stderr
    assert "Traceback" not in run.stderr
    assert time.monotonic() - start < 60


def test_local_executor_runs_without_ray(tmp_path):
    code = (
        "from quadriga.trainer.main_ppo import run_ppo\n"
        "run_ppo({'trainer': {'executor': 'local', 'device': 'cpu', 'total_training_steps': 1, 'val_before_train': False},\n"
        "         'data': {'val_max_samples': 8, 'train_max_samples': 64}})\n"
        "import ray; print('ray running:', ray.is_initialized())"
    )
    run = python("-c", code, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "ray running: False" in run.stdout
    assert "actor_rollout" in run.stdout


def test_importing_the_package_is_light(tmp_path):
    code = "import sys, quadriga; print([m for m in ('torch', 'ray', 'transformers', 'hydra') if m in sys.modules])"
    assert python("-c", code, cwd=tmp_path).stdout.strip() == "[]"


def test_the_driver_does_not_load_torch(tmp_path):
    """It only starts Ray and watches: seconds of imports would come before everything else."""
    code = (
        "import sys; from quadriga.trainer import main_ppo; from quadriga.trainer.before_start import detect_local_device; "
        "detect_local_device(); print([m for m in ('torch', 'transformers', 'tensordict') if m in sys.modules])"
    )
    done = python("-c", code, cwd=tmp_path)
    assert done.stdout.strip() == "[]", done.stderr
