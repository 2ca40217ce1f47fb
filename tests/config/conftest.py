"""Helpers: configurations from dotted keys, and the problems that loading them reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dotted import nest

from quadriga.config import Config, load_config
from quadriga.errors import ConfigError


@pytest.fixture(scope="session")
def load() -> Callable[[dict[str, Any]], Config]:
    """The typed configuration with these dotted keys set."""
    return lambda dotted: load_config(nest(dotted))


@pytest.fixture(scope="session")
def problem() -> Callable[[dict[str, Any]], str]:
    """What loading these dotted keys complains about; "" if it does not."""

    def find(dotted: dict[str, Any]) -> str:
        try:
            load_config(nest(dotted))
        except ConfigError as error:
            return str(error)
        return ""

    return find


@pytest.fixture(autouse=True)
def one_name_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of runs have the time in them; configurations that are compared here were not loaded in the same second."""
    monkeypatch.setattr("quadriga.config.run_name.new_name", lambda model: "new_run")
