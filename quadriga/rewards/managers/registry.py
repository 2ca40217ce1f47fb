"""Reward managers by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from quadriga.errors import ConfigError
from quadriga.registry import allow_name, import_named

_MANAGERS: dict[str, type] = {}
_Class = TypeVar("_Class", bound=type)


def register_manager(name: str) -> Callable[[_Class], _Class]:
    """Class decorator: make a manager known as `reward_model.reward_manager=<name>`."""

    def keep(cls: _Class) -> _Class:
        if _MANAGERS.get(name, cls) is not cls:
            raise ConfigError(f"there is a reward manager {name!r} already", "choose another name")
        _MANAGERS[name] = cls
        allow_name("reward_model.reward_manager", name)
        return cls

    return keep


def manager_class(name: str) -> type[Any]:
    """By registered name, by `"package.module:Class"` or by `"folder/file.py:Class"`."""
    for built_in in ("kinds", "limited"):
        importlib.import_module(f"quadriga.rewards.managers.{built_in}")
    if name in _MANAGERS:
        return _MANAGERS[name]
    place, colon, class_name = name.rpartition(":")
    if not colon:
        raise ConfigError(
            f"unknown reward manager {name!r}. Known: {', '.join(sorted(_MANAGERS))}",
            "use one of these, or name your own class as package.module:Class or folder/file.py:Class",
        )
    found = import_named(place, class_name, "reward_model.reward_manager")
    if not isinstance(found, type):
        raise ConfigError(f"there is no class {class_name!r} in {place}", "check reward_model.reward_manager")
    return found
