"""The dashboard in a real browser, as a reader uses it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

WAIT_S = 20


class Page:
    """What a reader does: open a view, look for something, click it."""

    def __init__(self, browser: Any, address: str) -> None:
        self.browser, self.address = browser, address

    def open(self, place: str) -> None:
        self.browser.get("about:blank")
        self.browser.get(self.address + place)

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        return self.browser.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map(node => node.textContent)", selector
        )

    def wait(self, what: Callable[[], Any], why: str, seconds: float = WAIT_S) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := what():
                return found
            time.sleep(0.1)
        raise AssertionError(f"{why}; the page says:\n{self.texts('body')[0][:1500]}\n{self.problems()}")

    def problems(self) -> list[str]:
        """What the browser complained about: errors of scripts, and whatever the policy had to stop."""
        told = [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]
        return [text for text in told if "status of 404" not in text]  # what a run lacks is said on the page

    def beats(self, count: int = 2) -> None:
        """Wait until the page has asked for news so many times more."""
        asked = "return performance.getEntriesByType('resource').filter(one => one.name.includes('api/runs?')).length"
        self.browser.execute_script("performance.setResourceTimingBufferSize(5000)")
        before = self.browser.execute_script(asked)
        self.wait(lambda: self.browser.execute_script(asked) >= before + count, "the page does not ask for news")
        time.sleep(0.3)  # what it was told is drawn
