"""Where a model is looked for: a folder, the local cache, and the hub only where it must, and answers."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from quadriga.errors import DataError
from quadriga.models.source import resolve_model_path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one model, `org/cached`, whose weights are in two files."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    folder = tmp_path / "hub" / "models--org--cached"
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    for name in ("config.json", "tokenizer.json", "a.safetensors", "b.safetensors"):
        (snapshot / name).write_text("{}")
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})
    )
    return snapshot


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch):
    """A hub that accepts connections and never answers: the slowest way to be away."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield


def test_a_model_in_the_cache_is_taken_without_asking_the_hub(cache: Path, no_hub):
    began = time.monotonic()
    assert resolve_model_path("org/cached") == cache
    assert resolve_model_path("org/cached", tokenizer_only=True) == cache
    assert time.monotonic() - began < 1


def test_half_a_download_does_not_count(cache: Path, monkeypatch: pytest.MonkeyPatch):
    (cache / "b.safetensors").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="not in the local cache, and HF_HUB_OFFLINE forbids"):
        resolve_model_path("org/cached")


def test_a_hub_that_does_not_answer_is_told_within_ten_seconds(cache: Path, no_hub):
    began = time.monotonic()
    with pytest.raises(DataError, match=r"org/other is not in the local cache, and the hub .* cannot be reached"):
        resolve_model_path("org/other")
    with pytest.raises(DataError, match=r"org/another is not in the local cache"):
        resolve_model_path("org/another")  # the hub is not asked again
    assert time.monotonic() - began < 10
