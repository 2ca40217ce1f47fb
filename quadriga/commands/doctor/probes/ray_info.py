"""Probe: import ray; say its version and what it knows of token authentication."""

from __future__ import annotations

import importlib
import json
from types import ModuleType

import ray


def main() -> None:
    try:
        tokens: ModuleType | None = importlib.import_module("ray._private.authentication.authentication_token_setup")
    except ImportError:  # Rays before token authentication
        tokens = None
    # Ray offers no public question for this; a Ray that moves the name is merely reported as "not by default".
    by_default = hasattr(tokens, "enable_token_auth_by_default")
    facts = {"version": ray.__version__, "tokens": tokens is not None, "tokens_by_default": by_default}
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
