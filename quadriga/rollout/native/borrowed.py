"""Generating with a module that somebody trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def borrowed(module: Any, attention: str) -> Iterator[None]:
    """`module` in evaluation mode, with the attention of that name; afterwards it is as it was."""
    config, was_training = module.config, module.training
    before = config._attn_implementation
    config._attn_implementation = attention
    if was_training:
        module.eval()
    try:
        yield
    finally:
        config._attn_implementation = before
        if was_training:
            module.train()
