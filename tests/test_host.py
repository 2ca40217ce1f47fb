"""What a container leaves of its machine: limits of control groups, and the memory that may still be taken."""

from __future__ import annotations

from pathlib import Path

from quadriga import host
from quadriga.host import Limits, read_limits, usable_memory

GIB = 1 << 30


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_cgroup_v2_takes_the_tightest_limit_on_the_way_up(tmp_path: Path) -> None:
    files = {
        "cg/job/cpu.max": "max 100000\n",
        "cg/job/memory.max": f"{8 * GIB}\n",
        "cg/job/memory.current": f"{3 * GIB}\n",
        "cg/job/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        "cg/job/step/cpu.max": "150000 100000\n",
        "cg/job/step/memory.max": "max\n",
        "self": "0::/job/step\n",
    }
    write_tree(tmp_path, files)
    assert read_limits(tmp_path / "cg", tmp_path / "self") == Limits(1.5, 8 * GIB, 6 * GIB)


def test_cgroup_v1_in_a_container_whose_listed_path_is_the_hosts(tmp_path: Path) -> None:
    files = {
        "cg/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "cg/memory/memory.usage_in_bytes": f"{GIB}\n",
        "cg/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
        "cg/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "self": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
    }
    write_tree(tmp_path, files)
    assert read_limits(tmp_path / "cg", tmp_path / "self") == Limits(0.5, 2 * GIB, GIB)


def test_cgroup_without_limits_or_without_cgroups_is_unlimited(tmp_path: Path) -> None:
    files = {
        "cg/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "cg/cpu/cpu.cfs_quota_us": "-1\n",
        "cg/cpu/cpu.cfs_period_us": "100000\n",
        "self": "4:memory:/\n1:cpu:/\n",
    }
    write_tree(tmp_path, files)
    assert read_limits(tmp_path / "cg", tmp_path / "self") == Limits(None, None)
    assert read_limits(tmp_path / "nowhere", tmp_path / "nothing") == Limits(None, None)


def test_memory_is_what_the_tighter_of_machine_and_container_leaves(tmp_path: Path, monkeypatch) -> None:
    write_tree(tmp_path, {"meminfo": "MemTotal: 9 kB\nMemAvailable: 1048576 kB\n"})
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")
    total = host.memory_of_machine()[0]
    for limits, expected in (
        (Limits(None, None), (total, GIB)),
        (Limits(None, GIB // 2, GIB // 4), (GIB // 2, GIB // 4)),
        (Limits(None, total * 2, total), (total, GIB)),
    ):
        monkeypatch.setattr(host, "read_limits", lambda limits=limits: limits)
        assert usable_memory() == expected
