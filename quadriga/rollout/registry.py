"""Engines by the name in `actor_rollout_ref.rollout.name`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from quadriga.errors import ConfigError
from quadriga.rollout.interface import RolloutEngine

_ENGINES: dict[str, str | Callable[..., RolloutEngine]] = {
    "native": "quadriga.rollout.native.engine:NativeEngine",
    "vllm": "quadriga.rollout.vllm.engine:VllmEngine",
}


def register_engine(name: str, factory: Callable[..., RolloutEngine]) -> None:
    """Make `create_engine(name, **arguments)` call `factory(**arguments)`."""
    _ENGINES[name] = factory


def create_engine(name: str, **arguments: Any) -> RolloutEngine:
    """The engine called `name`; ConfigError with the known names if there is none."""
    if name not in _ENGINES:
        near = difflib.get_close_matches(name, _ENGINES, n=1)
        raise ConfigError(
            f"unknown rollout engine {name!r}; known: {', '.join(sorted(_ENGINES))}",
            f"set actor_rollout_ref.rollout.name={near[0] if near else 'native'}",
        )
    factory = _ENGINES[name]
    if isinstance(factory, str):
        module, attribute = factory.split(":")
        factory = getattr(importlib.import_module(module), attribute)
    return factory(**arguments)
