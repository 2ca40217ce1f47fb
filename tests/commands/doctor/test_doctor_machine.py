"""Cores, memory, files, shared memory, disks and environment variables: too little of anything is said with a fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from quadriga.commands.doctor.machine import (
    GIB,
    free_bytes,
    judge_allocator,
    judge_cpus,
    judge_disk,
    judge_environment,
    judge_memory,
    judge_open_files,
    judge_shared_memory,
)
from quadriga.host import Limits

NO_LIMITS = Limits(None, None)


def test_cpu_quota_below_the_cores_asks_for_fewer_threads_until_they_are_set() -> None:
    tight = Limits(2.5, None)
    assert "OMP_NUM_THREADS=2" in judge_cpus(16, tight, {}).fix
    assert judge_cpus(16, tight, {"OMP_NUM_THREADS": "2"}).status == "ok"
    assert judge_cpus(16, NO_LIMITS, {}).status == "ok"


def test_machine_that_others_keep_busy_is_warned_about() -> None:
    assert judge_cpus(4, NO_LIMITS, {}, load=7.0).status == "ok"
    assert judge_cpus(4, NO_LIMITS, {}, load=20.0).status == "warn"


@pytest.mark.parametrize(("limit_gib", "status"), [(None, "ok"), (16, "ok"), (3, "warn"), (0.5, "fail")])
def test_memory_limit_of_the_container_counts_more_than_the_machine(limit_gib: float | None, status: str) -> None:
    limit = None if limit_gib is None else int(limit_gib * GIB)
    assert judge_memory(256 * GIB, 200 * GIB, Limits(None, limit)).status == status


@pytest.mark.parametrize(("limit", "status"), [(256, "fail"), (1024, "warn"), (65536, "ok"), (-1, "ok")])
def test_open_file_limit(limit: int, status: str) -> None:
    assert judge_open_files(limit).status == status


def test_allocator_is_only_ever_a_hint() -> None:
    library = Path("/usr/lib/libtcmalloc.so.4")
    assert judge_allocator({}, None).status == "ok"
    assert judge_allocator({}, library).fix == f"export LD_PRELOAD={library}"
    assert judge_allocator({"LD_PRELOAD": str(library)}, library).fix == ""


def test_small_shared_memory_warns_as_ray_would_fall_to_disk() -> None:
    assert judge_shared_memory(free=64 * 2**20, memory=16 * GIB).status == "warn"  # the usual container
    assert judge_shared_memory(free=8 * GIB, memory=16 * GIB).status == "ok"
    assert judge_shared_memory(free=20 * GIB, memory=512 * GIB).status == "ok"  # Ray takes the smaller store
    here = free_bytes(Path("/dev/shm"))
    assert judge_shared_memory(free=here, memory=10 * here, roomy=10 * here + 1).status == "warn"
    assert free_bytes(Path("/no/such/tmpfs")) == 0


def test_disk_bounds_and_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    assert judge_disk("output dir", folder, "fix", little=1, too_little=1).status == "ok"
    assert judge_disk("output dir", folder, "fix", little=2**60, too_little=1).status == "warn"
    assert judge_disk("output dir", folder, "fix", little=2**61, too_little=2**60).status == "fail"
    assert not folder.exists()
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_written_fails() -> None:
    finding = judge_disk("output dir", Path("/proc/quadriga/outputs"), "choose another")
    assert finding.status == "fail"
    assert "cannot write to /proc" in finding.what


def test_output_path_that_is_a_file_fails(tmp_path: Path) -> None:
    file = tmp_path / "outputs"
    file.write_text("")
    assert judge_disk("output dir", file, "choose another").status == "fail"


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"),
        ({"ROCR_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}, "ROCR_VISIBLE_DEVICES"),
        ({"OMP_NUM_THREADS": "64"}, "4 cores"),
        ({"OMP_NUM_THREADS": "many"}, "not a number"),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "eth0, lo"),
        ({"NCCL_P2P_DISABLE": "1"}, "host memory"),
        ({"RAY_IGNORE_VERSION_MISMATCH": "1"}, "versions"),
        ({"WORLD_SIZE": "8", "RANK": "0"}, "RANK, WORLD_SIZE"),
    ],
)
def test_hurtful_variables_are_warned_about(env: dict[str, str], said: str) -> None:
    (finding,) = judge_environment(env, cores=4, interfaces={"lo", "eth0"})
    assert finding.status == "warn"
    assert said in finding.what
    assert "unset" in finding.fix


def test_harmless_values_stay_silent_and_offline_is_only_information() -> None:
    harmless = {
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",
        "ROCR_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "4",
        "NCCL_SOCKET_IFNAME": "eth,bond",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "0",
    }
    (finding,) = judge_environment(harmless, cores=4, interfaces={"lo", "eth0"})
    assert finding.what == "no variable that is known to hurt"
    (offline,) = judge_environment({"HF_HUB_OFFLINE": "1"}, cores=4, interfaces=set())
    assert offline.status == "ok"
    assert "HF_HUB_OFFLINE" in offline.what
