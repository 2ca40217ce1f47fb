"""The command line: what Hydra gets to see, and what a user sees who mistypes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.config import CONFIG_DIR, compose, load_config, screen_overrides
from quadriga.config.command_line import compose_from_arguments
from quadriga.errors import ConfigError

APPLICATION = """
import sys, hydra
from quadriga.config import load_config, screen_overrides
from quadriga.errors import ConfigError

@hydra.main(config_path={folder!r}, config_name="ppo_trainer", version_base=None)
def main(config):
    config = load_config(config)
    print(config.trainer.nnodes, config.ray_kwargs.ray_init, config.data.train_files)

try:
    sys.argv[1:] = screen_overrides(sys.argv[1:])
    main()
except ConfigError as error:
    sys.exit(str(error))
"""


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("application")
    (folder / "tiny_app.py").write_text(APPLICATION.format(folder=str(CONFIG_DIR)))
    return folder


def run(application: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tiny_app", *arguments]
    return subprocess.run(command, cwd=application, capture_output=True, text=True, timeout=60, check=False)


def test_application_gets_the_keys_of_the_command_line(application: Path) -> None:
    done = run(
        application, "trainer.nnodes=2", "ray_kwargs.ray_init.num_cpus=4", "data.train_files=~/data/train.parquet"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "2 {'num_cpus': 4} ~/data/train.parquet"
    assert {path.name for path in application.iterdir()} <= {"tiny_app.py", "__pycache__"}


def test_application_refuses_unknown_keys_all_at_once(application: Path) -> None:
    done = run(application, "trainer.nodes=2", "data.trainfiles=x", "actor_rollout_ref.rollout.mode=async")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "2 problems" in done.stderr
    assert "unknown key trainer.nodes" in done.stderr
    assert "did you mean trainer.nnodes?" in done.stderr
    assert "did you mean data.train_files?" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_values_are_told_together_with_unknown_keys() -> None:
    with pytest.raises(
        ConfigError, match=r"3 problems[\s\S]*nnodes='two'[\s\S]*must be one of native, vllm[\s\S]*unknown key data\.x"
    ):
        screen_overrides(["trainer.nnodes=two", "actor_rollout_ref.rollout.name=sglang", "data.x=1"])
    screen_overrides(["trainer.nnodes=${trainer.n_gpus_per_node}", "trainer.n_gpus_per_node=1,2"])


def test_plus_before_a_key_that_exists_is_no_error() -> None:
    assert compose(["+trainer.nnodes=2", "++trainer.n_gpus_per_node=3"]).trainer.n_gpus_per_node == 3


def test_flags_and_keys_of_hydra_pass_untouched() -> None:
    arguments = ["--config-name", "ppo_trainer", "-m", "hydra.verbose=true", "hydra/launcher=basic", "~trainer.device"]
    assert screen_overrides(arguments) == arguments


def test_with_a_folder_of_the_users_own_keys_are_not_judged() -> None:
    arguments = ["--config-path=config", "--config-name=mine", "model=big", "x.y=1"]
    assert screen_overrides(arguments) == arguments


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("trainer.project_name=~/x y", "~/x y"),
        ("trainer.project_name=a=b", "a=b"),
        ("trainer.project_name=it's", "it's"),
        ("trainer.project_name=a\\'b", "a\\'b"),
        ("trainer.project_name=!\\", "!\\"),
        ("trainer.project_name='quoted'", "quoted"),
        ("trainer.project_name=", ""),
        ("trainer.project_name=x#y", "x#y"),
    ],
)
def test_plain_text_is_taken_as_it_is(argument: str, value: str) -> None:
    assert compose([argument]).trainer.project_name == value


def test_home_folder_is_accepted_inside_lists() -> None:
    assert list(compose(["data.train_files=[~/a.parquet, ~/b.parquet]"]).data.train_files) == [
        "~/a.parquet",
        "~/b.parquet",
    ]


@settings(max_examples=15, deadline=None)
@given(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1).filter(lambda t: t.strip() == t))
def test_any_path_reaches_the_configuration_or_is_refused(text: str) -> None:
    path = f"~/{text}"
    if "${" in path or "," in path:
        return
    try:
        config = compose([f"trainer.project_name={path}"])
    except ConfigError:
        return
    assert config.trainer.project_name == path


@pytest.mark.parametrize("argument", ["trainer", "trainer.nnodes", "=3", "data.train_files=[a", "a b=1"])
def test_argument_that_cannot_be_read_is_shown(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"argument|unknown key"):
        compose([argument])


def test_configuration_of_another_folder_can_be_composed(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("trainer:\n  nnodes: 3\n  n_gpus_per_node: 2\ndata:\n  train_batch_size: 12\n")
    arguments = ["--config-path", str(tmp_path), "--config-name=mine", "trainer.nnodes=2"]
    config = load_config(compose_from_arguments(arguments))
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.data.train_batch_size) == (2, 2, 12)


def test_missing_configuration_and_unknown_flag_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_file"):
        compose_from_arguments(["--config-name", "no_such_file"])
    with pytest.raises(ConfigError, match="--frobnicate"):
        compose_from_arguments(["--frobnicate"])
