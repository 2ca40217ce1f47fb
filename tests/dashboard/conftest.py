"""A dashboard that serves a folder, and a browser that looks at it."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from served import Served

from quadriga.dashboard.server import make_app


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., Served]]:
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(root: Path, **options: Any) -> Served:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        app = make_app([root], **{"hosts": ["127.0.0.1"], **options})
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        servers.append((server, thread))
        deadline = time.monotonic() + 20
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.started
        return Served(root, listener.getsockname()[1])

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window; the tests that need it skip where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install -e '.[dev]'")
    from selenium.webdriver.chrome.service import Service

    program, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1300,900"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    started.set_page_load_timeout(30)
    yield started
    started.quit()
