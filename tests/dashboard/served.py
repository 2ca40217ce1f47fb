"""A dashboard in a thread of this process, as a test talks to it."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Served:
    """A dashboard in a thread of this process."""

    root: Path
    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def get(self, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        request = urllib.request.Request(self.address + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            return error.code, error.read(), dict(error.headers)

    def json(self, path: str) -> Any:
        code, body, _ = self.get(f"api/{path}")
        assert code == 200, body
        return json.loads(body)

    def row(self, name: str) -> dict[str, Any]:
        """The table's row of a run, once the server has looked again."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for row in self.json("runs?limit=500")["rows"]:
                if row["name"] == name:
                    return row
            time.sleep(0.2)
        raise AssertionError(f"{name} has not appeared")
