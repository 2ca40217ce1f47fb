"""The cache of Triton's kernels: a folder for every kind of machine, a list that tells damage, nothing where there is no GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quadriga.config import Config, load_config
from quadriga.trainer import kernel_cache as module
from quadriga.trainer.kernel_cache import LIST, TRITON_CACHE, cache_folder, check, kernel_cache, write_list


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(TRITON_CACHE, raising=False)
    return load_config({"trainer": {"device": "cuda", "n_gpus_per_node": 1}})


def filled(folder: Path | None) -> tuple[Path, Path]:
    """The folder with a kernel in it, and the kernel."""
    assert folder is not None
    kernel = folder / "ab" / "kernel.cubin"
    kernel.parent.mkdir()
    kernel.write_bytes(b"machine code")
    return folder, kernel


def test_another_gpu_or_version_has_another_folder(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [cache_folder("NVIDIA H200"), cache_folder("NVIDIA B200")]
    assert cache_folder("NVIDIA H200") == folders[0]
    monkeypatch.setattr(module, "_version", lambda name: "99.0")
    assert len({*folders, cache_folder("NVIDIA H200")}) == 3


def test_a_damaged_cache_is_emptied_and_that_is_said_once(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    folder, kernel = filled(cache_folder())
    check(folder)  # a run that did not end by itself left no list: what it compiled stays
    assert kernel.exists()
    write_list(folder)
    check(folder)
    assert kernel.exists()
    kernel.write_bytes(b"machine c0de")
    check(folder)
    check(folder)
    assert not kernel.exists()
    assert caplog.text.count("is damaged") == 1


def test_a_list_that_is_no_list_is_damage(config: Config) -> None:
    folder, kernel = filled(cache_folder())
    (folder / LIST).write_text("{")
    check(folder)
    assert not kernel.exists()
    assert not (folder / LIST).exists()


def test_a_run_on_a_cpu_leaves_everything_as_it_is(config: Config, tmp_path: Path) -> None:
    config.trainer.device = "cpu"
    with kernel_cache(config):
        assert TRITON_CACHE not in os.environ
    assert not list(tmp_path.iterdir())


def test_a_run_on_a_gpu_uses_the_folder_and_lists_what_it_left(config: Config, tmp_path: Path) -> None:
    with kernel_cache(config):
        folder, kernel = filled(Path(os.environ[TRITON_CACHE]))
    assert TRITON_CACHE not in os.environ
    assert (folder / LIST).exists()
    assert [path.name for path in (tmp_path / "quadriga").iterdir()] == [folder.name]
    kernel.unlink()
    check(folder)
    assert not (folder / LIST).exists()
