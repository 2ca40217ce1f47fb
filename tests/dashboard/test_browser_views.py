"""What a reader can do in each view: zoom, smooth, walk by keys, tag, sort, compare; on the server's page and on an exported one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from page import Page
from run_folders import sample, token_sample, write_run, write_samples, write_status
from served import Served

from quadriga.dashboard.export import export_page
from quadriga.tracking import Timeline

SCORE = "[data-metric='critic/score/mean']"
KEYS = {
    "actor_rollout_ref.actor.optim.lr": 0.001,
    "data.train_files": "/a/long/path/to/some/parquet/file/of/training/data.parquet",
    "algorithm.adv_estimator": "grpo",
    "trainer.total_training_steps": 2000,
    "actor_rollout_ref.rollout.n": 16,
    "actor_rollout_ref.model.path": "organisation/a-model-with-a-rather-long-name-7B-instruct",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Served]) -> Served:
    root = tmp_path_factory.mktemp("outputs")
    for name, level in (("a", 0.9), ("b", 0.3)):
        folder = write_run(root / "demo" / name, steps=40, level=level, changed=KEYS)
        for step in (0, 40):
            write_samples(folder, step, [sample(k, name == "a") for k in range(6)], "val")
    failed = write_run(root / "demo" / "a_run_with_a_name_that_says_everything_about_it_2026-11-19_05-30-00", steps=40)
    write_status(failed, state="failed", error="WorkerError: " + "something long went wrong " * 8, changed=KEYS)
    long = token_sample([f"t{k} " for k in range(40)], [-0.5] * 40, [-0.5] * 40, [1] * 40)
    long["tokens"]["left_out"] = [20, 7000]
    write_samples(root / "demo" / "a", 7, [long, sample(1, True)])
    timeline = Timeline(root / "demo" / "a" / "timeline.json")
    timeline.add("step", 1000.0, 2.0, "driver", step=30)
    timeline.add("generate", 1000.0, 0.5, "actor 0", step=30)
    timeline.flush()
    evaluation = write_run(root / "eval", steps=1, kind="eval", intervals={"arithmetic": [0.41, 0.59]})
    (evaluation / "config.yaml").write_text("model: some/model\nn: 4\nscorer: null\n")
    write_samples(evaluation, 0, [sample(0, False, finish_reason="length"), sample(1, True)], "val")
    long = {"timing_s/gen": 0.5, "timing_s/update_actor": 1.0, "timing_s/step": 1.6}
    for name, steps, timings in (("long", 3000, long), ("tuned", 60, {"timing_s/step": 1.5})):
        write_run(root / name, steps=1, kind="sft" if name == "tuned" else "train")
        with (root / name / "metrics.jsonl").open("w") as file:
            for step in range(1, steps + 1):
                tested = {"timing_s/testing": 10.0} if step % 10 == 0 else {}
                file.write(json.dumps({"step": step, "time": float(step), **timings, **tested}) + "\n")
    stillborn = write_run(
        root / "stillborn", steps=0, state="failed", error="RewardError: no scorer\nat line 3", total=8
    )
    (stillborn / "metrics.jsonl").unlink()
    told = {"kind": "end", "time": 1.0, "step": 0, "status": "failed", "error": "RewardError: no scorer\nat line 3"}
    (stillborn / "events.jsonl").write_text(json.dumps(told) + "\n")
    wordless = sample(0, True, messages=[])  # an agent that works on tokens leaves no conversation
    crashed = sample(1, False, outcome="error", error="Traceback:\n  File x\nValueError: cannot read it\n")
    write_samples(root / "demo" / "b", 3, [wordless, crashed])
    (root / "demo" / "a" / "logs").mkdir()
    (root / "demo" / "a" / "logs" / "actor_0.log").write_text("CUDA out of memory\n")
    return serve(root)


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Page]:
    browser.get_log("browser")
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    shown = Page(browser, served.address)
    yield shown
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert shown.problems() == []


def press(page: Page, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    for key in keys:
        ActionChains(page.browser).send_keys(key).perform()


def bounds(page: Page, chart: str) -> tuple[float, float]:
    node = page.all(f"{chart} .plot")[0]
    return float(node.get_attribute("data-low")), float(node.get_attribute("data-high"))


def test_curves_are_smoothed_seen_in_logs_over_tokens_and_zoomed(page: Page, served: Served) -> None:
    run = served.row("demo/a")["id"]
    page.open(f"#curves?runs={run}")
    page.wait(lambda: page.all(f"{SCORE} canvas"), "no curve was drawn")
    whole = page.all(SCORE)[0].get_attribute("data-last")
    page.browser.execute_script(
        "const slider = document.querySelector(\"input[aria-label='smoothing']\");"
        "slider.value = 0.9; slider.dispatchEvent(new Event('input'))"
    )
    page.wait(lambda: page.all(SCORE)[0].get_attribute("data-last") != whole, "it is not smoothed")
    assert "smooth=0.9" in page.browser.current_url
    page.browser.find_element("css selector", "select[aria-label='x axis']").send_keys("by tokens")
    page.wait(lambda: "x=tokens" in page.browser.current_url, "the axis has not changed")
    page.browser.find_element("css selector", ".tools input[type=checkbox]").click()
    page.wait(lambda: "log=1" in page.browser.current_url, "it is not logarithmic")
    page.open(f"#curves?runs={run}&from=10&to=20")
    page.wait(lambda: page.all(SCORE) and page.all(SCORE)[0].get_attribute("data-points") == "11", "it is not zoomed")
    page.browser.find_element("xpath", "//button[text()='whole range']").click()
    page.wait(lambda: page.all(SCORE)[0].get_attribute("data-points") == "40", "the whole range does not come back")
    low, high = bounds(page, SCORE)
    assert low <= 0.9 * (1 - math.exp(-0.1))
    assert high >= 0.88


def test_the_values_of_a_curve_are_reached_by_keys(page: Page, served: Served) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open(f"#curves?runs={served.row('demo/a')['id']}")
    page.wait(lambda: page.all(f"{SCORE} canvas"), "no curve was drawn")
    page.browser.execute_script(f'document.querySelector("{SCORE} .uplot").focus()')
    press(page, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.texts(f"{SCORE} .at") == ["step 2"]
    press(page, Keys.END)
    assert page.texts(f"{SCORE} .at") == ["step 40"]
    press(page, Keys.ARROW_LEFT)
    assert page.texts(f"{SCORE} .at") == ["step 39"]
    assert page.texts(f"{SCORE} .legend b")[0].startswith("0.88")
    press(page, Keys.ESCAPE)
    assert page.texts(f"{SCORE} .at") == [""]


def test_a_run_that_failed_before_its_first_step_has_a_page_in_every_view(page: Page, served: Served) -> None:
    run = served.row("stillborn")["id"]
    for view, said in (
        ("curves", "No step has been recorded yet"),
        ("samples", "kept no samples"),
        ("time", "This run has no timeline"),
        ("logs", "Why it failed is among its alarms"),
        ("alarms", "at line 3"),
    ):
        page.open(f"#{view}?runs={run}")
        page.wait(lambda said=said: said in page.texts("main")[0], f"{view} does not say so")
        assert not page.all("#banner")[0].is_displayed(), view
    assert page.texts(".said") == ["failed: RewardError: no scorer"], "the whole of it is in the box above"


def test_a_sample_shows_its_response_without_a_conversation_and_why_scoring_failed(page: Page, served: Served) -> None:
    page.open(f"#samples?runs={served.row('demo/b')['id']}&kind=train")
    page.wait(lambda: len(page.all(".answer")) == 2, "no samples")
    assert page.texts(".answer .text") == ["#### 0", "#### 2"]
    assert page.texts(".answer summary") == ["ValueError: cannot read it"]


def test_all_views_and_controls_are_reached_by_the_tab_key(page: Page, served: Served) -> None:
    from selenium.webdriver.common.keys import Keys

    page.open(f"#samples?runs={served.row('demo/a')['id']}")
    page.wait(lambda: page.all(".answer"), "no samples")
    page.browser.execute_script("document.body.focus()")
    reached = []
    for _ in range(40):
        press(page, Keys.TAB)
        reached.append(
            page.browser.execute_script(
                "const node = document.activeElement;"
                "return (node.getAttribute('aria-label') || node.textContent || node.tagName).trim()"
            )
        )
    wanted = {
        "skip to the content",
        "Runs",
        "Curves",
        "Logs",
        "validation",
        "step after",
        "find samples",
        "over the steps",
    }
    assert wanted <= set(reached), wanted - set(reached)


def test_stacked_phases_begin_at_zero(page: Page, served: Served) -> None:
    page.open(f"#time?runs={served.row('demo/a')['id']}")
    page.wait(lambda: page.all(".card.wide .plot[data-low]"), "nothing is drawn")
    low, high = bounds(page, ".card.wide")
    assert low == 0
    assert high == pytest.approx(1.5 * 1.06)


@pytest.mark.parametrize(("run", "highest", "names"), [("long", 1.5 + 10 / 4, 3), ("tuned", 11.5, 2)])
def test_stacked_phases_add_up_where_few_steps_validate(
    page: Page, served: Served, run: str, highest: float, names: int
) -> None:
    """3,000 steps are drawn as 800 points: 10 s of validation are spread over the four steps of theirs; 60 steps as they are."""
    page.open(f"#time?runs={served.row(run)['id']}")
    page.wait(lambda: page.all(".card.wide .plot[data-low]"), "nothing is drawn")
    assert bounds(page, ".card.wide")[1] == pytest.approx(highest * 1.06)
    assert len(page.texts(".card.wide .legend.wrap li")) == names


def test_who_waits_is_told_in_words_and_as_a_list(page: Page, served: Served) -> None:
    page.open(f"#time?runs={served.row('demo/a')['id']}")
    page.wait(lambda: "waits 75%" in page.texts(".card.wide li b"), "idle time is not told")
    page.all(".card.wide details summary")[0].click()
    page.wait(lambda: "generate" in page.texts(".card.wide td"), "no list")
    assert any("The timeline ends at step 30" in text for text in page.texts(".card.wide p")), "the run has 40 steps"


def test_runs_are_tagged_sorted_and_given_columns_of_their_own(page: Page, served: Served) -> None:
    page.open("#runs")
    page.wait(lambda: "demo/a" in page.texts("a.name"), "the table has not appeared")
    page.browser.execute_script("document.querySelector(\"button[aria-label='tag demo/a']\").click()")
    field = page.all("input[aria-label='new tag']")[0]
    field.send_keys("best one\n")
    page.wait(lambda: any("#best-one" in text for text in page.texts(".tag")), "there is no tag")
    page.all("input[aria-label='find runs']")[0].send_keys("#best-one")
    page.wait(lambda: page.texts("a.name") == ["demo/a"], "tags are not found")
    page.browser.execute_script("document.querySelector(\"button[aria-label='remove tag best-one']\").click()")
    page.wait(lambda: page.texts("a.name") == [], "the tag is not removed")
    page.open("#runs?text=demo/")
    page.wait(lambda: len(page.texts("a.name")) == 3, "no table")
    wish = page.all("input[aria-label^='add a column']")[0]
    wish.send_keys("val/arithmetic/acc/mean@1\n")
    page.wait(lambda: "val/arithmetic/acc/mean@1" in page.texts("thead th button"), "there is no column")
    page.browser.find_element("xpath", "//th/button[text()='val/arithmetic/acc/mean@1']").click()
    page.wait(lambda: "sort=metric" in page.browser.current_url, "it is not sorted by")
    page.wait(lambda: page.texts("a.name")[0] == "demo/a", "the best is not on top")
    assert page.texts("td.own") == ["88.4%", "49.1%", "29.5%"]
    assert page.browser.current_url.count("cols="), "the address has them, to be shared"


def test_the_table_of_runs_needs_no_scrolling_sideways(page: Page, served: Served) -> None:
    for width in (1280, 1100):
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        page.open("#runs")
        page.wait(lambda: "demo/a" in page.texts("a.name"), "the table has not appeared")
        room = "const node = document.querySelector('.scroll'); return [node.scrollWidth, node.clientWidth]"
        needed, there = page.browser.execute_script(room)
        assert needed <= there, f"{needed} of {there} pixels at a width of {width}"


def test_a_long_name_of_a_chosen_run_covers_nothing_on_a_phone(page: Page, served: Served) -> None:
    long = next(row for row in served.json("runs?limit=500")["rows"] if "a_name_that_says" in row["name"])
    metrics = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    page.open(f"#alarms?runs={long['id']}")
    page.wait(lambda: page.all(".alarmbox"), "no error is shown")
    for selector in (".chip", ".alarmbox"):
        inside = (
            "const node = document.querySelector(arguments[0]); return [node.scrollWidth, node.clientWidth, innerWidth]"
        )
        needed, there, screen = page.browser.execute_script(inside, selector)
        assert needed <= there <= screen, selector


def test_two_runs_answer_the_same_questions_side_by_side(page: Page, served: Served) -> None:
    runs = [served.row(name)["id"] for name in ("demo/a", "demo/b")]
    page.open(f"#samples?runs={','.join(runs)}&kind=val")
    page.wait(lambda: page.all(".answer"), "no samples")
    page.browser.find_element("xpath", "//button[text()='side by side']").click()
    page.wait(lambda: len(page.all(".answers.beside")) == 6, "they are not side by side")
    assert [text.split(" ")[0] for text in page.texts(".whose")[:2]] == ["demo/a", "demo/b"]
    assert page.texts(".answers.beside .outcome")[:4] == ["correct", "wrong"] * 2


def test_tokens_that_were_left_out_and_samples_without_any_are_told(page: Page, served: Served) -> None:
    page.open(f"#samples?runs={served.row('demo/a')['id']}&kind=train&step=7&by=log-prob")
    page.wait(lambda: len(page.all(".token")) == 40, "no tokens")
    assert "7,000 tokens were not kept" in page.texts(".gap")[0]
    assert "kept of 1 of these 2 samples" in page.texts(".legendline")[0]
    from selenium.webdriver import ActionChains

    ActionChains(page.browser).move_to_element(page.all(".token")[25]).perform()
    page.wait(lambda: "token 7,026" in page.texts("#tip")[0] or "token 7026" in page.texts("#tip")[0], "wrong number")


def test_an_evaluation_has_its_flags_its_interval_and_its_samples(page: Page, served: Served) -> None:
    run = served.row("eval")
    page.open("#runs")
    page.wait(lambda: "50.0% (41.0–59.0)" in page.texts(".held div"), "its interval is not shown")
    page.open(f"#configuration?runs={run['id']}")
    page.wait(lambda: page.texts("table.config tbody th") == ["model", "n"], "its flags are not shown")
    page.open(f"#samples?runs={run['id']}&kind=val&flag=cut off")
    page.wait(lambda: len(page.all(".answer")) == 1, "what was cut off is not found")


@pytest.fixture(scope="module")
def exported(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_page([served.root], tmp_path_factory.mktemp("exported") / "runs.html").path


def test_an_exported_page_sorts_compares_and_shows_logs(page: Page, served: Served, exported: Path) -> None:
    away = Page(page.browser, exported.as_uri())
    away.open("#runs?sort=main&order=up&text=demo")
    away.wait(lambda: away.texts("a.name"), "no table")
    assert [name[:6] for name in away.texts("a.name")] == ["demo/b", "demo/a", "demo/a"]
    away.open("#runs?sort=main&order=down&text=demo&cols=actor/entropy")
    away.wait(lambda: away.texts("a.name") and away.texts("a.name")[0] == "demo/a", "it does not sort")
    assert away.texts("td.own") == ["0.025"] * 3
    runs = [served.row(name)["id"] for name in ("demo/a", "demo/b")]
    away.open(f"#samples?runs={','.join(runs)}&kind=val&beside=1")
    away.wait(lambda: len(away.all(".answers.beside")) == 6, "not side by side")
    away.open(f"#samples?runs={runs[0]}&kind=val&at=40&over=0")
    away.wait(lambda: away.texts(".answer .facts > b") == ["step 0", "step 40"], "no history")
    away.open(f"#logs?runs={runs[0]}")
    away.wait(lambda: "CUDA out of memory" in away.texts(".log")[0], "no log")
    away.open(f"#configuration?runs={served.row('eval')['id']}")
    away.wait(lambda: "some/model" in away.texts("table.config td"), "no configuration of an evaluation")


def test_an_exported_page_says_what_it_leaves_out(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for k in range(3):
        folder = write_run(tmp_path / f"run{k}", steps=30)
        for step in range(1, 31):
            write_samples(folder, step, [sample(n, True) for n in range(6)])
    monkeypatch.setattr("quadriga.dashboard.export.MOST_RUNS", 2)
    monkeypatch.setattr("quadriga.dashboard.export.SAMPLES_OF_A_STEP", 4)
    written = export_page([tmp_path], tmp_path / "out" / "runs.html")
    assert written.left_out[0] == "2 newest of 3 runs"
    assert "samples of 12 of 30 training steps, the first 4 of a step" in written.left_out[1]
    away = Page(page.browser, written.path.as_uri())
    away.open("#runs")
    away.wait(lambda: any("2 newest of 3 runs" in text for text in away.texts(".tools .muted")), "it does not say so")
    held = json.loads(away.browser.execute_script("return document.getElementById('exported').textContent"))
    away.open(f"#samples?runs={held['table']['rows'][0]['id']}")
    away.wait(lambda: any("samples of 12 of 30" in text for text in away.texts("main p.muted")), "not of the samples")
