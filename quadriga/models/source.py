"""Where a model comes from: the package itself, a folder, or the Hugging Face hub."""

from __future__ import annotations

import json
import math
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from quadriga.config.model_shape import find_model_folder
from quadriga.errors import DataError

BUILTIN = "builtin:"
HUB_TIMEOUT_S = 5.0
REMEMBERED_S = 30.0
_asked: dict[str, tuple[float, str]] = {}
"""Hubs that were asked, when, and what was wrong: a run may name several models, and its user waits for one answer only."""
ASSETS = Path(__file__).resolve().parents[1] / "assets"


def resolve_model_path(path: str | os.PathLike, tokenizer_only: bool = False) -> Path | str:
    """`builtin:NAME` → the embedded model's folder; `~` and `$VARIABLE` expanded; a folder; else a hub name as it is.

    Args:
        tokenizer_only: the folder need not hold a model, just its tokenizer.

    Raises:
        DataError: no such embedded model, a path that does not exist, or a folder without a model in it.
    """
    text = os.path.expandvars(os.path.expanduser(str(path)))
    if text.startswith(BUILTIN):
        return _builtin(text.removeprefix(BUILTIN))
    folder = Path(text)
    if folder.is_dir():
        _check_folder(folder, ("tokenizer_config.json", "config.json") if tokenizer_only else ("config.json",))
        return folder
    if folder.exists():
        raise DataError(f"the model path {text} is a file", "give the folder that contains config.json")
    if _looks_like_a_path(text):
        raise DataError(
            f"the model folder {text} does not exist (looked from {Path.cwd()})",
            "give an existing folder with config.json, weights and tokenizer, or a hub name such as org/model",
        )
    cached = _in_cache(text, tokenizer_only)
    if cached is None:
        _require_hub(text)
    return cached or text


def _in_cache(name: str, tokenizer_only: bool) -> Path | None:
    """The folder of a model that was downloaded before, if it is whole: asking the hub for a newer one takes a minute where
    there is no network, and could change a run from one day to the next."""
    folder = find_model_folder(name)
    if folder is None:
        return None
    if tokenizer_only:
        return (
            folder
            if any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json"))
            else None
        )
    index = folder / "model.safetensors.index.json"
    try:
        needed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else set()
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    has_weights = all((folder / file).is_file() for file in needed) if needed else any(folder.glob("*.safetensors"))
    return folder if has_weights else None


def fetch_model(source: Path | str) -> Path:
    """The folder of a model that is given by folder or hub name; downloads what is not here."""
    if isinstance(source, Path):
        return source
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))


def _require_hub(name: str) -> None:
    """DataError, within seconds, where a model would have to be downloaded and cannot be."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        raise DataError(
            f"the model {name} is not in the local cache, and HF_HUB_OFFLINE forbids downloads",
            f"unset HF_HUB_OFFLINE, or download it elsewhere (hf download {name}) and give the folder",
        )
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    asked, why = _asked.get(endpoint, (-math.inf, ""))
    if time.monotonic() - asked > REMEMBERED_S:
        why = _why_no_answer(endpoint)
        _asked[endpoint] = time.monotonic(), why
    if why:
        raise DataError(
            f"the model {name} is not in the local cache, and the hub {endpoint} cannot be reached: {why}",
            f"check the name (a folder begins with ./ or /) and the network, or download it elsewhere (hf download {name}) "
            "and give the folder",
        )


def _why_no_answer(endpoint: str) -> str:
    """Nothing where it answers."""
    answer: list[str] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
            answer.append("")
        except urllib.error.HTTPError:
            answer.append("")  # it answers; whether it has the model, transformers will say
        except (OSError, ValueError) as error:
            answer.append(str(getattr(error, "reason", error)))

    # In a thread, because the time that the look-up of a host name takes has no limit of its own.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_TIMEOUT_S + 1)
    return answer[0] if answer else f"no answer within {HUB_TIMEOUT_S:g} s"


@contextmanager
def readable_load_errors(path: Path | str, what: str) -> Iterator[None]:
    """Turn what transformers raises while loading `what` from `path` into a DataError that says what to do."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{what} could not be loaded from {path}: {_first_line(error)}", _fix(path, error)) from error


def _builtin(name: str) -> Path:
    folder = ASSETS / name
    known = sorted(p.name for p in ASSETS.iterdir() if (p / "config.json").is_file()) if ASSETS.is_dir() else []
    if name not in known:
        raise DataError(
            f"there is no embedded model {name!r}; this package has: {', '.join(known) or 'none'}",
            "choose one of them, or give a folder or hub name",
        )
    return folder


def _check_folder(folder: Path, any_of: tuple[str, ...]) -> None:
    if not any((folder / name).is_file() for name in any_of):
        inside = sorted(p.name for p in folder.iterdir())[:8]
        raise DataError(
            f"the model folder {folder} has no {' or '.join(any_of)} (it holds: {', '.join(inside) or 'nothing'})",
            "give the folder that save_pretrained wrote; for a checkpoint that is its huggingface/ folder",
        )


def _looks_like_a_path(text: str) -> bool:
    return text.startswith((".", "/", "~", "$")) or text.count("/") > 1 or text.endswith("/") or not text.strip()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _fix(path: Path | str, error: BaseException) -> str:
    message = str(error).lower()
    if "trust_remote_code" in message or "custom code" in message:
        return "it brings Python code of its own; read that code, then set model.trust_remote_code=True"
    if "unrecognized configuration class" in message or "unrecognized model" in message:
        return "the model must be a causal language model (or, for a reward model, a sequence classifier)"
    if isinstance(path, Path):
        return "check that the folder holds complete weights (*.safetensors) and tokenizer files"
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return "HF_HUB_OFFLINE=1 forbids downloads: unset it, or download the model and give its folder"
    return (
        f"check the name, the network, and access to a gated model (HF_TOKEN); or download it elsewhere "
        f"(hf download {path}) and give the folder"
    )
