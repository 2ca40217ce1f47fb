"""What a resumed run's configuration has that the one before it had not."""

from __future__ import annotations

from typing import Any


def changed_keys(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """`key: old → new` for every key that differs."""
    changed = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changed += changed_keys(old, new, f"{prefix}{name}.")
        elif old != new:
            changed.append(f"{prefix}{name}: {old} → {new}")
    return changed
