"""The page at /: a chat with the served model, or for one without a chat template, a text that it goes on with."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page_routes() -> list[Route]:
    """/ alone: the page is one file, and may load and run nothing else."""
    page = (resources.files("quadriga.agents.endpoint") / "chat.html").read_text(encoding="utf-8")
    headers = {
        "content-security-policy": _POLICY.format(script=_hash_of(page, "script"), style=_hash_of(page, "style")),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }

    async def index(request: Request) -> Response:
        return Response(page, media_type="text/html", headers=headers)

    return [Route("/", index)]


def _hash_of(page: str, tag: str) -> str:
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
