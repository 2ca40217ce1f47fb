"""A run that goes on while somebody looks at it: what is new appears, and what is being read or dragged stays."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page import Page
from run_folders import sample, write_run, write_samples, write_step
from served import Served

from quadriga.dashboard import samples as reading

CARD = "[data-metric='critic/score/mean']"


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """A run at step 20 of 40, with long answers at some steps."""
    folder = write_run(tmp_path / "outputs" / "live", steps=20, state="running", total=40)
    for step in (10, 20):
        write_answers(folder, step)
    return folder


def write_answers(folder: Path, step: int) -> None:
    rows = [sample(k, k % 2 == 0, response=f"step {step} " + "word " * 600, extra={"note": "long"}) for k in range(12)]
    write_samples(folder, step, rows)


@pytest.fixture
def served(live: Path, serve: Callable[..., Served]) -> Served:
    return serve(live.parent)


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Page]:
    browser.get_log("browser")
    shown = Page(browser, served.address)
    yield shown
    assert shown.problems() == []


def test_what_is_being_read_stays_though_the_run_goes_on(page: Page, served: Served, live: Path) -> None:
    page.open(f"#samples?runs={served.row('live')['id']}")
    page.wait(lambda: len(page.all(".answer")) == 12, "no samples")
    page.browser.execute_script("document.querySelectorAll('.answer details').forEach(node => { node.open = true })")
    page.all(".answer button.plain")[0].click()
    shown = len(page.texts(".answer .text")[0])
    assert shown > 3000, "the whole text is shown"
    page.beats()
    assert len(page.all(".answer details[open]")) == 12
    assert len(page.texts(".answer .text")[0]) == shown
    write_answers(live, 21)
    write_step(live, 21)
    fresh = page.all("button.fresh")[0]
    page.wait(fresh.is_displayed, "the new step is not told")
    assert fresh.text == "step 21 is there"
    assert page.texts(".stepper output") == ["step 20"]
    assert len(page.all(".answer details[open]")) == 12
    page.all("button.fresh")[0].click()
    page.wait(lambda: page.texts(".stepper output") == ["step 21"], "it is not shown when asked for")
    page.wait(lambda: page.texts(".answer .text")[0].startswith("step 21"), "its samples are not shown")
    assert not page.all("button.fresh")[0].is_displayed()


def test_who_has_not_begun_to_read_sees_the_newest_step(page: Page, served: Served, live: Path) -> None:
    page.open(f"#samples?runs={served.row('live')['id']}")
    page.wait(lambda: page.texts(".stepper output") == ["step 20"], "no samples")
    write_answers(live, 22)
    write_step(live, 22)
    page.wait(lambda: page.texts(".stepper output") == ["step 22"], "the new step is not shown")


@pytest.mark.parametrize(("view", "chart"), [("curves", CARD), ("time", ".card.wide .plot")])
def test_a_chart_moves_on_without_being_made_anew(
    page: Page, served: Served, live: Path, view: str, chart: str
) -> None:
    from selenium.webdriver import ActionChains

    page.open(f"#{view}?runs={served.row('live')['id']}")
    page.wait(lambda: page.all(f"{chart} canvas"), "no curve was drawn")
    page.browser.execute_script(f"document.querySelector(\"{chart} canvas\").dataset.mark = 'same'")
    over = page.all(f"{chart} .u-over")[0]
    ActionChains(page.browser).move_to_element(over).perform()
    at = page.wait(lambda: page.texts(".card .at")[0], "no value at the cursor")
    assert at.startswith("step ")
    page.beats()
    assert page.all(f"{chart} canvas[data-mark='same']"), "nothing was new"
    for step in range(21, 25):
        write_step(live, step)
    last = page.browser.execute_script("return performance.now()")
    page.wait(lambda: asked_since(page, "api/series", last), "the new steps are not asked for")
    page.beats(1)
    assert page.all(f"{chart} canvas[data-mark='same']"), "its values were set, not its place"
    assert page.texts(".card .at")[0].startswith("step "), "the cursor has stayed"
    if view == "curves":
        assert page.all(CARD)[0].get_attribute("data-points") == "24"


def asked_since(page: Page, what: str, when: float) -> bool:
    find = "performance.getEntriesByType('resource').some(one => one.name.includes(arguments[0]) && one.startTime > arguments[1])"
    return page.browser.execute_script(f"return {find}", what, when)


def test_a_range_that_is_being_dragged_is_not_lost_to_a_new_step(page: Page, served: Served, live: Path) -> None:
    from selenium.webdriver import ActionChains

    page.open(f"#curves?runs={served.row('live')['id']}")
    over = page.wait(lambda: page.all(f"{CARD} .u-over"), "no curve was drawn")[0]
    ActionChains(page.browser).move_to_element_with_offset(over, -60, 0).click_and_hold().perform()
    ActionChains(page.browser).move_by_offset(40, 0).perform()
    write_step(live, 21)
    page.beats(3)
    assert page.all(CARD)[0].get_attribute("data-points") == "20", "it waits for the hand"
    ActionChains(page.browser).move_by_offset(40, 0).release().perform()
    page.wait(lambda: "from=" in page.browser.current_url and "to=" in page.browser.current_url, "it has not zoomed")
    page.wait(lambda: page.all(CARD)[0].get_attribute("data-points") not in ("20", "21"), "the range is not shown")


def test_an_answer_that_comes_late_does_not_replace_a_newer_one(
    page: Page, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for "a" is answered after the search for "answer 3", which was asked later."""
    answer, is_asked, is_late = reading.sample_page, threading.Event(), threading.Event()

    def slow(run: Any, query: Any, *rest: Any) -> Any:
        if query.text == "w":
            is_asked.set()
            is_late.wait(30)
        return answer(run, query, *rest)

    monkeypatch.setattr(reading, "sample_page", slow)
    page.open(f"#samples?runs={served.row('live')['id']}&step=20")
    page.wait(lambda: len(page.all(".answer")) == 12, "no samples")
    page.browser.execute_script("location.hash += '&find=w'")
    assert is_asked.wait(20)
    page.browser.execute_script("location.hash = location.hash.replace('find=w', 'find=2%2B1=')")
    page.wait(lambda: len(page.all(".answer")) == 4, "the newer search is not answered")
    is_late.set()
    page.wait(
        lambda: (
            page.browser.execute_script(
                "return performance.getEntriesByType('resource').filter(one => one.name.includes('api/samples?')).length"
            )
            >= 3
        ),
        "the older search was not answered at all",
    )
    page.beats(1)
    assert len(page.all(".answer")) == 4


def test_a_log_is_followed_while_it_grows(page: Page, served: Served, live: Path) -> None:
    (live / "logs").mkdir()
    log = live / "logs" / "actor_0.log"
    log.write_text("".join(f"line {k}\n" for k in range(20_000)) + "<img src=x onerror=\"document.title='owned'\">\n")
    page.open(f"#logs?runs={served.row('live')['id']}")
    page.wait(lambda: "line 19999" in page.texts(".log")[0], "the end of the log is not shown")
    assert "line 0\n" not in page.texts(".log")[0]
    assert page.all("main img") == []
    older = len(page.texts(".log")[0])
    page.all("main > button.plain")[0].click()
    page.wait(lambda: len(page.texts(".log")[0]) > 1.8 * older, "older lines are not shown")
    with log.open("a") as file:
        file.write("the newest line\n")
    page.wait(lambda: page.texts(".log")[0].endswith("the newest line\n"), "what is new does not appear")
    assert page.texts(".log")[0].count("line 19999\n") == 1
    assert page.browser.title != "owned"


def test_a_restart_of_workers_is_marked_and_the_run_goes_on(page: Page, served: Served, live: Path) -> None:
    told = {"kind": "restart", "time": 5.0, "step": 12, "number": 1, "at_most": 3, "text": "actor died\nrestart 1 of 3"}
    (live / "events.jsonl").write_text(json.dumps(told) + "\n")
    run = served.row("live")["id"]
    page.open(f"#time?runs={run}")
    page.wait(lambda: any("step 12 restart: actor died" in text for text in page.texts("main p")), "no restart is told")
    page.open(f"#alarms?runs={run}")
    page.wait(lambda: any("actor died" in text for text in page.texts(".said")), "it is not among what matters")
    page.wait(lambda: page.all(".links a[href*='logs']"), "no way from there to the logs")[0].click()
    page.wait(lambda: "No worker" in page.texts("main")[0], "the link leads nowhere")
