"""The dashboard's web server: the page, and what it asks for. Read-only; every answer is made from files as they are now.

What protects it: it listens on loopback unless told otherwise, and then wants a token; it answers to known host names only, so
that no other site can reach it through the browser; a run is named by a number that the catalog gave out, never by a path;
the page may load and run nothing but its own files (Content-Security-Policy).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
import re
import threading
import time
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from quadriga.dashboard import configuration, events, logs, samples, timeline
from quadriga.dashboard.catalog import STATES, Catalog, Run
from quadriga.dashboard.files import Unreadable
from quadriga.dashboard.metrics import X_AXES, Metrics
from quadriga.tracking.metric_names import format_value
from quadriga.version import __version__

STATIC = Path(str(resources.files("quadriga.dashboard") / "static"))
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
COOKIE = "quadriga_token"
MOST_RUNS, MOST_POINTS = 500, 20_000
POLICY = (
    "default-src 'none'; script-src 'self' {scripts}; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Dashboard:
    """What the page can ask for. Each method makes one answer from a request's parameters."""

    def __init__(self, roots: list[Path]) -> None:
        self.catalog = Catalog(roots)
        self.metrics = Metrics()
        self.timelines = timeline.Timelines()
        self.happened = events.Events()

    def runs(self, request: Request) -> Any:
        """The table of runs: filtered, sorted, a page of it, with counts of all states."""
        ask = request.query_params
        now = time.time()
        found = self.catalog.look()
        by_metric = ask.get("sort") == "main"
        columns = [name for name in ask.getlist("column") if name][:20]
        rows = [(run, run.row(now, with_metric=by_metric)) for run in found]
        counts = {state: sum(row["state"] == state for _, row in rows) for state in STATES}
        words = ask.get("text", "").casefold().split()
        state, wanted = ask.get("state", ""), [w for w in ask.get("ids", "").split(",") if w]
        rows = [
            (run, row)
            for run, row in rows
            if (not state or row["state"] == state)
            and (not wanted or run.id in wanted)
            and all(word in _words(row) for word in words)
        ]
        rows = _sorted(rows, ask.get("sort", "updated"), ask.get("order", "down") == "down")
        start, limit = _integer(ask.get("start"), 0), min(_integer(ask.get("limit"), 100), MOST_RUNS)
        page = [
            run.row(now)
            | {"spark": run.spark_line(), "columns": [format_value(name, run.newest_of(name)) for name in columns]}
            for run, _ in rows[start : start + limit]
        ]
        return {
            "rows": page,
            "total": len(rows),
            "counts": counts,
            "all": len(found),
            "roots": [str(root) for root in self.catalog.roots],
            "problems": self.catalog.problems,
            "now": now,
            "version": __version__,
        }

    def metric_names(self, request: Request) -> Any:
        return self.metrics.names(self._run(request))

    def series(self, request: Request) -> Any:
        ask = request.query_params
        x = ask.get("x", "step")
        low, high = _number(ask.get("from"), -math.inf), _number(ask.get("to"), math.inf)
        points = min(max(_integer(ask.get("points"), 1000), 10), MOST_POINTS)
        return self.metrics.series(
            self._run(request), ask.getlist("metric")[:200], x if x in X_AXES else "step", low, high, points
        )

    def sample_steps(self, request: Request) -> Any:
        return samples.sample_steps(self._run(request))

    def sample_page(self, request: Request) -> Any:
        ask, run = request.query_params, self._run(request)
        query = samples.Query(
            kind=ask.get("kind", "train"),
            step=_integer(ask.get("step"), 0),
            offset=_integer(ask.get("offset"), 0),
            limit=min(max(_integer(ask.get("limit"), 50), 1), 200),
            text=ask.get("text", "")[:1000],
            flag=ask.get("flag", ""),
        )
        page = samples.sample_page(run, query, configuration.max_response_length(run))
        others = [self.catalog.get(name) for name in ask.get("beside", "").split(",")[:8] if name]
        page["beside"] = {
            other.id: samples.same_questions(
                other, query.kind, query.step, page["rows"], configuration.max_response_length(other)
            )
            for other in others
        }
        return page

    def sample_history(self, request: Request) -> Any:
        ask, run = request.query_params, self._run(request)
        step, offset, first = (_integer(ask.get(name), 0) for name in ("step", "offset", "first"))
        length = configuration.max_response_length(run)
        return samples.sample_history(run, ask.get("kind", "val"), step, offset, length, first)

    def timeline_steps(self, request: Request) -> Any:
        return self.timelines.steps(self._run(request))

    def timeline_events(self, request: Request) -> Any:
        ask = request.query_params
        first = _integer(ask.get("first"), 0)
        return self.timelines.events(self._run(request), first, _integer(ask.get("last"), first))

    def events(self, request: Request) -> Any:
        """What happened in the run, and the reports of its stalls."""
        run = self._run(request)
        return {"events": self.happened.of(run), "stalls": events.stall_reports(run)}

    def stall(self, request: Request) -> Any:
        return {"text": events.stall_text(self._run(request), request.query_params.get("file", ""))}

    def log_files(self, request: Request) -> Any:
        return logs.log_files(self._run(request))

    def log(self, request: Request) -> Any:
        ask = request.query_params
        before, after = (_integer(ask[name], 0) if name in ask else None for name in ("before", "after"))
        return logs.log_page(self._run(request), ask.get("file", ""), before, after)

    def config(self, request: Request) -> Any:
        ids = [w for w in request.query_params.get("ids", "").split(",") if w][:50]
        return configuration.config_table([self.catalog.get(run_id) for run_id in ids])

    def _run(self, request: Request) -> Run:
        return self.catalog.get(request.query_params.get("run", ""))


API: dict[str, Callable[[Dashboard, Request], Any]] = {
    "runs": Dashboard.runs,
    "metrics": Dashboard.metric_names,
    "series": Dashboard.series,
    "sample_steps": Dashboard.sample_steps,
    "samples": Dashboard.sample_page,
    "history": Dashboard.sample_history,
    "timeline_steps": Dashboard.timeline_steps,
    "timeline": Dashboard.timeline_events,
    "events": Dashboard.events,
    "stall": Dashboard.stall,
    "log_files": Dashboard.log_files,
    "log": Dashboard.log,
    "config": Dashboard.config,
}


def make_app(roots: list[Path], hosts: list[str] | None = None, token: str = "") -> Starlette:
    """The application.

    Args:
        roots: folders with runs.
        hosts: names under which it answers; None: any.
        token: what a visitor must know; empty: nothing.
    """
    dashboard = Dashboard(roots)
    threading.Thread(target=dashboard.catalog.look, name="first look", daemon=True).start()  # while the browser opens
    page, policy = page_and_policy()

    def api(function: Callable[[Dashboard, Request], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return _Answer(await run_in_threadpool(function, dashboard, request))
            except Unreadable as error:
                return _Answer({"problem": error.what}, 404)
            except OSError as error:  # a disk that fails, a folder that vanishes while it is read
                return _Answer({"problem": f"cannot be read: {error.strerror}"}, 404)

        return answer

    async def index(request: Request) -> Response:
        return Response(page, media_type="text/html")

    async def static(request: Request) -> Response:
        path = STATIC / request.path_params["path"]
        if not path.resolve().is_relative_to(STATIC.resolve()) or path.suffix not in TYPES or not path.is_file():
            return Response("not here", 404)
        return Response(path.read_bytes(), media_type=TYPES[path.suffix])

    routes = [Route(f"/api/{name}", api(function)) for name, function in API.items()]
    guard = Middleware(_Guard, hosts=hosts, token=token, policy=policy)
    return Starlette(routes=[Route("/", index), Route("/static/{path:path}", static), *routes], middleware=[guard])


def page_and_policy() -> tuple[str, str]:
    """The page, and the policy that allows it its own scripts and nothing else."""
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    scripts = [*sorted((STATIC / "js").glob("*.js")), STATIC / "vendor" / "uplot" / "uPlot.esm.js"]
    early = "".join(f'<link rel="modulepreload" href="static/{file.relative_to(STATIC)}">\n' for file in scripts)
    page = page.replace("</head>", f"{early}</head>")  # all at once, not one import after the other
    return page, POLICY.format(scripts=" ".join(script_hashes(page)))


def script_hashes(page: str) -> list[str]:
    """`'sha256-…'` of every script that stands in the page itself."""
    texts = re.findall(r"<script[^>]*>([^<]+)</script>", page)
    return [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts]


class _Answer(JSONResponse):
    """JSON of texts that a model wrote: half a surrogate pair in one of them must not cost the answer."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="replace")


class _Guard:
    """Lets through what comes under a known name, with the token, and asks to read; puts the policy on every answer."""

    def __init__(self, app: Any, hosts: list[str] | None, token: str, policy: str) -> None:
        self._app, self._hosts, self._token = app, hosts, token
        self._headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
            "cross-origin-opener-policy": "same-origin",
            "cache-control": "no-store",
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        refused = self._refused(request)
        if refused is not None:
            refused.headers.update(self._headers)
            await refused(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((name.encode(), value.encode()) for name, value in self._headers.items()),
                ]
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _refused(self, request: Request) -> Response | None:
        if self._hosts is not None and (request.url.hostname or "") not in self._hosts:
            return Response("unknown host name", 421)
        if request.method not in ("GET", "HEAD"):
            return Response("read-only", 405)
        if not self._token:
            return None
        given = request.query_params.get("token", "")
        if given and hmac.compare_digest(given.encode(), self._token.encode()):
            answer = RedirectResponse(request.url.path, 303)
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return answer
        known = request.cookies.get(COOKIE, "")
        if known and hmac.compare_digest(known.encode(), self._token.encode()):
            return None
        return Response("open the address with ?token=… that `quadriga dash` printed", 401)


def _words(row: dict[str, Any]) -> str:
    """What a search in the table of runs looks at."""
    changed = " ".join(f"{key}={value}" for key, value in row["changed"].items())
    return f"{row['name']} {row['kind']} {row['state']} {changed} {' '.join(row['alarms'])}".casefold()


def _sorted(rows: list[tuple[Run, dict[str, Any]]], by: str, down: bool) -> list[tuple[Run, dict[str, Any]]]:
    """In order of a column, or of the newest value of a metric (`metric <name>`); those without a value at the end."""
    values: list[Any]
    if by.startswith("metric "):
        values = [run.newest_of(by.removeprefix("metric ")) for run, _ in rows]
    else:
        key = _SORTS.get(by, _SORTS["updated"])
        values = [key(row) for _, row in rows]
    known = sorted((k for k, value in enumerate(values) if value is not None), key=lambda k: values[k], reverse=down)
    return [rows[k] for k in (*known, *(k for k, value in enumerate(values) if value is None))]


_SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "name": lambda row: row["name"].casefold(),
    "state": lambda row: -STATES.index(row["state"]),
    "step": lambda row: row["step"],
    "eta": lambda row: row["eta_s"],
    "main": lambda row: row["main"]["value"] if row["main"] else None,
    "validation": lambda row: max(
        (v["last"] for v in row["validations"].values() if v["last"] is not None), default=None
    ),
    "updated": lambda row: row["updated"],
}


def _integer(text: str | None, default: int) -> int:
    try:
        return max(min(int(text), 1 << 53), 0) if text else default
    except ValueError:
        return default


def _number(text: str | None, default: float) -> float:
    try:
        return float(text) if text else default
    except ValueError:
        return default
