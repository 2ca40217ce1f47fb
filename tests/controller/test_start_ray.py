"""Starting or joining Ray: what is looked at, what is refused, and how soon."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quadriga.controller.start_ray import start_ray
from quadriga.errors import ConfigError, ResourceError

OWN_CLUSTER = """
import os, stat, sys, pathlib, ray
from quadriga.controller.start_ray import start_ray
start_ray({"num_cpus": 1, "object_store_memory": 80 << 20})
assert ray.get(ray.remote(lambda: 7).remote()) == 7
print("token", "environment" if os.environ.get("RAY_AUTH_TOKEN") else "file")
"""


def run_python(code: str, **env: str | None) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_AUTH", "RAY_ADDRESS"))}
    merged = {k: v for k, v in {**kept, **env}.items() if v is not None}
    return subprocess.run([sys.executable, "-c", code], env=merged, capture_output=True, text=True, timeout=120)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Ray puts sockets there, and the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="q", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Somebody who accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def web_port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()


def refused_within(seconds: float, call: Callable[[], None], error: type[Exception]) -> str:
    began = time.monotonic()
    with pytest.raises(error) as raised:
        call()
    assert time.monotonic() - began < seconds
    return str(raised.value)


def test_a_port_that_accepts_and_stays_silent_is_no_cluster(silent_port: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{silent_port}")
    text = refused_within(15, lambda: start_ray({}), ResourceError)
    assert "does not answer like a Ray cluster" in text
    assert "leave both unset" in text


def test_a_web_server_is_no_cluster(web_port: int):
    text = refused_within(15, lambda: start_ray({"address": f"127.0.0.1:{web_port}"}), ResourceError)
    assert "does not answer like a Ray cluster" in text


def test_a_closed_port_is_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert "no Ray cluster answers" in refused_within(6, lambda: start_ray({}), ResourceError)


@pytest.mark.parametrize("address", ["nonsense", "host:port", "ray://127.0.0.1:10001"])
def test_an_address_that_cannot_be_one_is_refused_at_once(address: str):
    refused_within(2, lambda: start_ray({"address": address}), ConfigError)


def test_without_an_address_a_file_that_names_a_cluster_is_not_looked_at(silent_port: int, short_folder: Path):
    """The file lies in a folder that all users of the machine share, so its word is not taken."""
    (short_folder / "ray").mkdir()
    (short_folder / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{silent_port}")
    (home := short_folder / "home").mkdir()
    began = time.monotonic()
    result = run_python(OWN_CLUSTER, RAY_TMPDIR=str(short_folder), HOME=str(home))
    assert result.returncode == 0, result.stderr
    assert time.monotonic() - began < 60
    assert "token file" in result.stdout
    assert (home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    assert "uthentication" not in result.stderr, "Ray's warning that authentication is on"


def test_a_home_that_cannot_be_written_to_is_no_obstacle(short_folder: Path):
    (home := short_folder / "home").write_text("a file, in which no folder can be made")
    result = run_python(OWN_CLUSTER, RAY_TMPDIR=str(short_folder), HOME=str(home))
    assert result.returncode == 0, result.stderr
    assert "token environment" in result.stdout


def test_a_token_that_others_can_read_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from quadriga.controller.start_ray import _provide_token

    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".ray").mkdir()
    token = tmp_path / ".ray" / "auth_token"
    token.write_text("f" * 64)
    token.chmod(0o644)
    _provide_token()
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.read_text() == "f" * 64
