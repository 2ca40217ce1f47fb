"""Ray: versions, tokens, a cluster that is there, one that is not, one that is something else. All are real."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quadriga.commands.doctor import Finding, Options
from quadriga.commands.doctor.probe import ProbeResult
from quadriga.commands.doctor.ray_checks import check_cluster, judge_authentication, judge_cluster, judge_version

HEAD = """
import ray, sys
ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


def clean_env(home: Path, **extra: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_AUTH", "RAY_ADDRESS"))}
    return {**env, "HOME": str(home), **extra}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ray keeps its token in the home folder; the tests' Ray gets a home of its own."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def head_address(home: Path) -> Iterator[str]:
    """A real one-node Ray that demands a token and lives in another process."""
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=clean_env(home, RAY_AUTH_MODE="token"),
    )
    assert head.stdout is not None
    assert head.stdin is not None
    yield head.stdout.readline().strip()
    head.stdin.close()
    head.wait(30)


def cluster_finding(address: str, env: dict[str, str], deep: bool = False) -> Finding:
    (finding,) = check_cluster(Options(address=address, env=env, deep=deep, cluster_deadline_s=30 if deep else 9))
    return finding


def test_reachable_cluster_is_listed_with_its_resources(head_address: str, home: Path) -> None:
    finding = cluster_finding(head_address, clean_env(home, RAY_AUTH_MODE="token"))
    assert finding.status == "ok", finding
    assert "1 node(s), 3 CPU, 0 GPU" in finding.what


def test_deep_look_asks_every_node_and_finds_one_node_in_agreement(head_address: str, home: Path) -> None:
    assert cluster_finding(head_address, clean_env(home, RAY_AUTH_MODE="token"), deep=True).status == "ok"


def test_address_in_the_environment_is_used(head_address: str, home: Path) -> None:
    (finding,) = check_cluster(Options(env=clean_env(home, RAY_AUTH_MODE="token", RAY_ADDRESS=head_address)))
    assert head_address in finding.what


def test_cluster_that_wants_the_token_ray_did_not_send_names_the_variable(head_address: str, home: Path) -> None:
    finding = cluster_finding(head_address, clean_env(home))
    assert finding.status == "fail"
    assert "RAY_AUTH_MODE=token (tried" in finding.fix


def test_wrong_token_is_refused_at_once_not_after_a_minute(head_address: str, home: Path) -> None:
    started = time.monotonic()
    finding = cluster_finding(head_address, clean_env(home, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="ab" * 32))
    assert time.monotonic() - started < 9
    assert finding.status == "fail"
    assert "bring the cluster's token" in finding.fix


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_unreachable_address_is_a_finding_within_seconds(address: str) -> None:
    started = time.monotonic()
    finding = cluster_finding(address, dict(os.environ))
    assert time.monotonic() - started < 10
    assert finding.status == "fail"
    assert "Connection refused" in finding.what
    assert "unset RAY_ADDRESS" in finding.fix


def test_port_that_accepts_and_then_stays_silent_does_not_hang() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        started = time.monotonic()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (finding,) = check_cluster(Options(address=address, cluster_deadline_s=4))
    assert time.monotonic() - started < 6
    assert finding.status == "fail"
    assert "no answer within 4 s" in finding.what
    assert finding.fix


def test_dashboard_address_and_no_address() -> None:
    assert "dashboard" in cluster_finding("http://127.0.0.1:8265", {}).what
    (nothing,) = check_cluster(Options(env={}))
    assert nothing.status == "ok"


def probe_said(*lines: str) -> ProbeResult:
    return ProbeResult("\n".join(lines), "", 0)


def test_version_mismatch_is_explained() -> None:
    result = ProbeResult('{"stage": "ray", "error": "Version mismatch: The cluster was started with Ray: 2.41"}', "", 1)
    (finding,) = judge_cluster("head:6379", result)
    assert finding.status == "fail"
    assert "same Ray and Python" in finding.fix


def test_nodes_that_disagree_are_named_and_dead_ones_not_counted() -> None:
    nodes = (
        '{"nodes": [{"name": "a", "alive": true, "CPU": 8, "GPU": 2}, {"name": "b", "alive": true, "CPU": 4, "GPU": 0},'
        ' {"name": "c", "alive": false, "CPU": 9, "GPU": 9}], "ray": "2.60.0", "python": "3.11.7"}'
    )
    software = '{"software": {"a": {"torch": "2.13"}, "a2": {"torch": "2.13"}, "b": {"torch": null}}}'
    listed, differing = judge_cluster("head:6379", probe_said(nodes, software))
    assert "2 node(s), 12 CPU, 2 GPU" in listed.what
    assert "1 dead" in listed.what
    assert differing.status == "warn"
    assert "b has None" in differing.what


@pytest.mark.parametrize(("version", "status"), [("2.40.9", "fail"), ("2.41.0", "ok"), ("3.0.0.dev0", "ok")])
def test_ray_version(version: str, status: str) -> None:
    assert judge_version(version).status == status


def token_finding(env: dict[str, str], home: Path, supported: bool = True, by_default: bool = True) -> Finding:
    return judge_authentication(env, home, supported=supported, by_default=by_default)


def test_ray_without_token_authentication_is_warned_about(tmp_path: Path) -> None:
    assert token_finding({}, tmp_path, supported=False).status == "warn"
    assert token_finding({"RAY_AUTH_MODE": "disabled"}, tmp_path).status == "warn"
    assert token_finding({}, tmp_path, by_default=False).status == "warn"


def test_ray_with_token_authentication_is_fine(tmp_path: Path) -> None:
    assert token_finding({}, tmp_path).status == "ok"
    assert "RAY_AUTH_TOKEN" in token_finding({"RAY_AUTH_TOKEN": "ab"}, tmp_path, by_default=False).what
    assert token_finding({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "missing")}, tmp_path).status == "fail"


def test_token_everyone_can_read_is_warned_about() -> None:
    open_home = Path("/dev/shm") / f"doctor-{os.getpid()}"  # every folder above is open to all, unlike pytest's own
    token = open_home / ".ray" / "auth_token"
    token.parent.mkdir(parents=True)
    try:
        token.write_text("ab")
        token.chmod(0o644)
        assert token_finding({}, open_home).fix == f"chmod 600 {token}"
        token.chmod(0o600)
        assert token_finding({}, open_home).status == "ok"
    finally:
        token.unlink()
        token.parent.rmdir()
        open_home.rmdir()
