"""The page in a real browser: one server and one Chromium for all of these."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page import Page
from run_folders import sample, token_sample, write_run, write_samples
from served import Served

from quadriga.config.schema import Config
from quadriga.dashboard.export import export_page
from quadriga.tracking import RunDirectory, Tracking

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
TOKENS = (["the", " answer", " is", "<b>42</b>"], [-0.1, -3.0, -6.0, -9.0], [-0.1, -3.1, -6.0, -8.0], [1, 1, 0, 1])


CONVERSATION = [
    {"role": "user", "content": "What is 3*4?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "calculator", "arguments": {"expression": "3*4"}}}],
    },
    {"role": "tool", "content": "12 <img src=x onerror=document.title='owned'>"},
    {"role": "assistant", "content": "It is 12."},
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Served]) -> Served:
    root = tmp_path_factory.mktemp("outputs")
    write_run(root / "demo" / "a", steps=30, level=0.9)
    write_run(root / "demo" / "b", steps=30, level=0.4, changed={"actor_rollout_ref.actor.optim.lr": 0.1})
    for name, lr in (("a", 0.9), ("b", 0.4)):
        config = {"actor_rollout_ref": {"actor": {"optim": {"lr": lr}}}, "data": {"train_batch_size": 8}}
        (root / "demo" / name / "config.yaml").write_text(json.dumps(config))
    write_samples(root / "demo" / "a", 5, [sample(k, k % 4 != 1) for k in range(12)])
    for step, right in ((0, False), (10, False), (30, True)):
        write_samples(root / "demo" / "a", step, [sample(k, right) for k in range(4)], "val")
    hostile = write_run(root / "demo" / HOSTILE.replace("/", "_"), steps=3, state="failed", error=HOSTILE)
    write_samples(
        hostile, 1, [sample(0, False, prompt=HOSTILE, response=HOSTILE, extra={HOSTILE: HOSTILE}, error=HOSTILE)]
    )
    (hostile / "events.jsonl").write_text(
        json.dumps({"kind": "alarm", "time": 1.0, "step": 1, "name": HOSTILE, "text": HOSTILE, "look": HOSTILE}) + "\n"
    )
    tokens = write_run(root / "demo" / "tokens", steps=3)
    write_samples(tokens, 1, [token_sample(*TOKENS)])
    episodes = write_run(root / "demo" / "episodes", steps=3)
    write_samples(episodes, 1, [{**token_sample(*TOKENS), "messages": CONVERSATION}])
    return serve(root)


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Page]:
    browser.get_log("browser")
    shown = Page(browser, served.address)
    yield shown
    assert shown.problems() == []


def test_a_run_that_starts_appears_and_its_curve_moves(page: Page, served: Served) -> None:
    page.open("#runs")
    page.wait(lambda: "demo/a" in page.texts("a.name"), "the table has not appeared")
    config = Config()
    config.trainer.logger = []
    tracking = Tracking(config, RunDirectory(served.root / "live"))
    tracking.events.append("start", {"total_steps": 40, "start_step": 0})
    tracking.log(1, {"critic/score/mean": 0.1})
    tracking.log(2, {"critic/score/mean": 0.2})
    page.wait(lambda: "live" in page.texts("a.name"), "the new run has not appeared")
    assert "running" in page.texts("tr.running .state")
    page.browser.find_element("link text", "live").click()
    card = "[data-metric='critic/score/mean']"
    page.wait(lambda: page.all(f"{card} canvas"), "no curve was drawn")
    before = page.all(card)[0].get_attribute("data-points")
    for step in range(3, 9):
        tracking.log(step, {"critic/score/mean": step / 10})
    page.wait(lambda: page.all(card)[0].get_attribute("data-points") != before, "the curve has not moved")
    page.wait(lambda: page.texts(f"{card} .legend b") == ["0.8"], "its newest value is not shown")
    tracking.events.append("end", {"status": "finished"})
    tracking.close()


def test_two_runs_are_compared(page: Page, served: Served) -> None:
    page.open("#runs")
    for name in ("demo/a", "demo/b"):
        box = page.wait(lambda name=name: page.all(f"input[aria-label='choose {name}']"), f"{name} is not listed")[0]
        box.click()
    page.wait(lambda: page.texts("button.primary") == ["compare 2 runs"], "nothing is chosen")
    page.all("button.primary")[0].click()
    legend = "[data-metric='critic/score/mean'] .legend li"
    page.wait(lambda: len(page.all(legend)) == 2, "not both are in the chart")
    assert [re.sub(r"[\d.]+$", "", text) for text in page.texts(legend)] == ["demo/a", "demo/b"]
    assert page.browser.current_url.count(",") == 1, "the address holds both runs, to be shared"
    page.browser.find_element("link text", "Configuration").click()
    page.wait(lambda: page.texts("table.config tbody th"), "no configuration")
    assert [text.split("peak")[0] for text in page.texts("table.config tbody th")] == [
        "actor_rollout_ref.actor.optim.lr"
    ]
    assert page.texts("table.config tbody td")[:2] == ["0.9", "0.4"]


def test_a_wrong_sample_is_found_by_filter_and_by_text(page: Page, served: Served) -> None:
    run = served.row("demo/a")["id"]
    page.open(f"#samples?runs={run}&kind=train&step=5")
    page.wait(lambda: len(page.all(".answer")) == 12, "not all samples are shown")
    loose = (
        "[...document.querySelectorAll('.group')].flatMap(one => [...one.childNodes]).filter(one => one.nodeType === 3)"
    )
    assert page.browser.execute_script(f"return {loose}.length") == 0, (
        "a group is a header, a prompt and answers, and nothing else"
    )
    page.all("select[aria-label='which samples']")[0].send_keys("wrong")
    page.wait(lambda: len(page.all(".answer")) == 3, "the filter does not filter")
    assert set(page.texts(".answer .outcome")) == {"wrong"}
    page.all("input[aria-label='find samples']")[0].send_keys("2+1=")
    page.wait(lambda: len(page.all(".answer")) == 1, "the search does not search")


def test_one_question_is_followed_over_the_steps(page: Page, served: Served) -> None:
    run = served.row("demo/a")["id"]
    page.open(f"#samples?runs={run}&kind=val")
    page.wait(lambda: page.all(".group header button"), "no samples")[0].click()
    page.wait(lambda: "One question" in page.texts("main")[0], "no history")
    assert page.texts(".answer .facts > b") == ["step 0", "step 10", "step 30"]
    assert page.texts(".answer .outcome") == ["wrong", "wrong", "correct"]


def test_token_colours_match_the_stored_numbers(page: Page, served: Served) -> None:
    run = served.row("demo/tokens")["id"]
    texts, rollout, trainer, mask = TOKENS

    def opacities(by: str) -> list[float]:
        page.open(f"#samples?runs={run}&kind=train&by={by}")
        page.wait(lambda: len(page.all(".token")) == len(texts), "no tokens are shown")
        assert page.texts(".token") == texts
        colors = page.browser.execute_script(
            "return [...document.querySelectorAll('.token')].map(node => getComputedStyle(node).backgroundColor)"
        )
        return [float(found[1]) if (found := re.search(r", ([\d.]+)\)$", color)) else 1.0 for color in colors]

    assert opacities("log-prob") == pytest.approx([0.85 * min(-value / 6, 1) for value in rollout], abs=0.005)
    gaps = [abs(a - b) for a, b in zip(rollout, trainer)]
    assert opacities("gap") == pytest.approx([0.85 * min(gap / 0.2, 1) for gap in gaps], abs=0.005)
    assert opacities("mask") == pytest.approx([0.25 if one else 0.3 for one in mask], abs=0.005)
    from selenium.webdriver import ActionChains

    ActionChains(page.browser).move_to_element(page.all(".token")[1]).perform()
    told = page.wait(lambda: page.texts("#tip")[0], "no values on hover")
    assert "log-prob of rollout -3" in told
    assert "gap 0.1" in told


def test_an_episode_of_many_turns_reads_as_a_conversation_and_has_its_token_colours(page: Page, served: Served) -> None:
    run = served.row("demo/episodes")["id"]
    page.open(f"#samples?runs={run}&kind=train")
    page.wait(lambda: len(page.all(".turns .turn")) == len(CONVERSATION), "no conversation is shown")
    turns = page.all(".turns .turn")
    assert [turn.get_attribute("class").split()[-1] for turn in turns] == [turn["role"] for turn in CONVERSATION]
    assert '"expression": "3*4"' in turns[1].text, "the tool call cannot be read"
    assert "<img src=x" in turns[2].text, "what a tool said is not shown as it is"
    assert page.all("main img") == []
    page.open(f"#samples?runs={run}&kind=train&by=mask")
    page.wait(lambda: len(page.all(".token")) == len(TOKENS[0]), "colouring by mask shows no tokens")


def test_hostile_text_stays_text_in_every_view(page: Page, served: Served) -> None:
    name = f"demo/{HOSTILE.replace('/', '_')}"
    run = served.row(name)["id"]
    for view, selector in (
        ("runs", "a.name"),
        ("curves", ".legend .label"),
        ("samples", ".prompt"),
        ("time", "#chosen .chip"),
        ("configuration", "#chosen .chip"),
        ("alarms", ".said"),
    ):
        page.open(f"#{view}?runs={run}")
        page.wait(
            lambda selector=selector: any("<img src=x" in text for text in page.texts(selector)), f"{view}: no text"
        )
        time.sleep(0.2)
        assert page.browser.title != "owned"
        assert page.all("main img, main script, #chosen img") == []


def test_an_exported_page_opens_from_disk_without_a_server(
    page: Page, served: Served, tmp_path: Path, browser: Any
) -> None:
    exported = export_page([served.root], tmp_path / "runs.html")
    assert exported.runs >= 4
    away = Page(browser, exported.path.as_uri())
    away.open("")
    away.wait(lambda: "demo/a" in away.texts("a.name"), "the table has not appeared")
    run = served.row("demo/a")["id"]
    away.open(f"#curves?runs={run}")
    away.wait(lambda: away.all("[data-metric='critic/score/mean'] canvas"), "no curve was drawn")
    away.open(f"#samples?runs={run}&kind=train&step=5&flag=wrong")
    away.wait(lambda: len(away.all(".answer")) == 3, "no samples")
    away.open(f"#alarms?runs={served.row('demo/' + HOSTILE.replace('/', '_'))['id']}")
    away.wait(lambda: any("<img src=x" in text for text in away.texts(".said")), "no events")
    assert browser.title != "owned"


def test_the_page_says_when_a_folder_has_vanished_and_stays_up(page: Page, served: Served) -> None:
    import shutil

    write_run(served.root / "vanishing", steps=3)
    run = served.row("vanishing")["id"]
    page.open(f"#samples?runs={run}")
    page.wait(lambda: page.all("#chosen .chip"), "the run is not shown")
    shutil.rmtree(served.root / "vanishing")
    page.open(f"#samples?runs={run}")
    page.wait(
        lambda: any("gone" in text for text in page.texts("#chosen .chip")), "it does not say that the run is gone"
    )
    page.open("#runs")
    page.wait(lambda: "demo/a" in page.texts("a.name"), "the table is gone too")


def test_the_page_can_be_used_on_a_phone_and_in_the_dark(page: Page, served: Served, browser: Any) -> None:
    phone = {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    try:
        run = served.row("demo/a")["id"]
        for view in ("runs", "curves", "samples", "time", "configuration", "alarms"):
            page.open(f"#{view}?runs={run}")
            page.wait(lambda: len(page.texts("main")[0]) > 20, f"{view} is empty")
            time.sleep(0.3)
            width = browser.execute_script("return document.documentElement.scrollWidth")
            assert width <= 390, f"{view} is {width} pixels wide"
        shade = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert shade == "rgb(18, 19, 21)"
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.slow
def test_a_training_run_is_seen_from_its_first_step_to_its_end(page: Page, served: Served) -> None:
    keys = [
        "trainer.executor=local",
        "trainer.total_training_steps=8",
        f"trainer.default_local_dir={served.root / 'trained'}",
    ]
    command = [sys.executable, "-m", "quadriga", "train", "--config-name=quickstart", *keys]
    training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        page.open("#runs")
        page.wait(lambda: "trained" in page.texts("a.name"), "the run has not appeared", 240)
        page.browser.find_element("link text", "trained").click()
        card = "[data-metric='critic/score/mean']"
        page.wait(lambda: page.all(f"{card} canvas"), "no curve was drawn", 120)
        early = int(page.all(card)[0].get_attribute("data-points"))
        assert training.wait(300) == 0
        page.wait(lambda: page.all(card)[0].get_attribute("data-points") == "8", "the curve is not whole", 30)
        assert early <= 8
    finally:
        training.kill()
    row = served.row("trained")
    assert (row["state"], row["step"]) == ("finished", 8)
    page.open(f"#samples?runs={row['id']}&kind=train&by=log-prob")
    page.wait(lambda: len(page.all(".token")) > 50, "no tokens are shown")
    page.open(f"#time?runs={row['id']}")
    page.wait(lambda: page.texts(".stepper output") == ["step 8"], "no timeline")
