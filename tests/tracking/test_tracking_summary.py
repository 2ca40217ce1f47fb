from __future__ import annotations

import importlib.util
import io
import json
import math
import sys
import tracemalloc
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from recorded_run import STEPS, record_run
from rich.console import Console

from quadriga.tracking import RunDirectory
from quadriga.tracking.before_after import choose_before_after
from quadriga.tracking.curves import Curve, Panel, run_panels, ticks
from quadriga.tracking.figures import clock, in_words
from quadriga.tracking.plots import HEIGHT, WIDTH, render_svg
from quadriga.tracking.summary import report, show_summary, summarize, write_page
from quadriga.tracking.terminal_chart import draw_chart

SVG = "{http://www.w3.org/2000/svg}"


def test_summary_says_what_the_run_achieved(finished_run: RunDirectory) -> None:
    summary = summarize(finished_run, "exported")
    assert summary.steps == 40
    assert summary.seconds == pytest.approx(42.0)
    assert summary.tokens_per_second == pytest.approx(12000)
    assert summary.accuracies["arithmetic"] == pytest.approx((0.41, 0.82))
    assert summary.reward == pytest.approx((0.425, 0.785))
    assert summary.headline == "held-out accuracy 41.0% → 82.0% · 40 steps in 42 s"


def test_report_prints_curve_numbers_paths_and_three_questions(finished_run: RunDirectory) -> None:
    output = io.StringIO()
    report(finished_run, finished_run.checkpoints / "huggingface", Console(file=output, width=100))
    text = output.getvalue()
    for expected in (
        "held-out accuracy   41.0% → 82.0%  (+41.0 points)",
        "40 in 42 s · 12,000 tokens/s",
        str(finished_run.checkpoints / "huggingface"),
        str(finished_run.path / "summary.html"),
        "100% ┤",
        "step 40",
        "12+7*3=",
        "✗ #### <b>7</b>",
        "✓ #### 33",
    ):
        assert expected in text, f"{expected!r} is not in\n{text}"
    assert "1+1=" not in text, "the three that it had wrong come first"


def test_a_run_without_any_step_has_a_summary_and_no_pictures(tmp_path: Path) -> None:
    output = io.StringIO()
    run = RunDirectory(tmp_path)
    summary = report(run, console=Console(file=output))
    assert summary.pictures == ()
    assert "0 in 0 s" in output.getvalue()


class TagChecker(HTMLParser):
    """Checks that tags are closed in order, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_page_is_well_formed_self_contained_and_escapes_what_the_model_said(finished_run: RunDirectory) -> None:
    summary = report(finished_run, console=Console(file=io.StringIO()))
    page = (finished_run.path / "summary.html").read_text(encoding="utf-8")
    assert summary.pictures[0] == finished_run.path / "summary.html"
    checker = TagChecker()
    checker.feed(page)
    assert checker.open == []
    assert "#### <b>7</b>" in checker.text
    assert "41.0% → 82.0%" in checker.text
    for outside in ("<script", "src=", "href=", "url("):
        assert outside not in page
    assert page.count("http") == 1, "only the name of the SVG vocabulary"


def test_svg_is_valid_and_its_curves_lie_inside_and_rise(finished_run: RunDirectory) -> None:
    report(finished_run, console=Console(file=io.StringIO()))
    root = ElementTree.parse(finished_run.path / "curves.svg").getroot()
    assert root.tag == f"{SVG}svg"
    texts = [element.text for element in root.iter(f"{SVG}text")]
    for expected in ("Accuracy", "Reward", "step", "held-out", "training", "100%", "82.0%", "40"):
        assert expected in texts
    markers = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]
    assert len(markers) == 5
    assert markers == sorted(markers)
    assert markers[0][1] > markers[-1][1], "higher accuracy is higher on the page"
    for path in root.iter(f"{SVG}path"):
        if "line" in path.attrib["class"].split():
            for pair in path.attrib["d"].removeprefix("M").split("L"):
                x, y = map(float, pair.split(","))
                assert 0 < x < WIDTH
                assert 0 < y < HEIGHT


def test_labels_at_the_ends_of_close_curves_do_not_touch() -> None:
    curves = [Curve(name, [(0, 0.0), (10, 0.01 * i)], i, is_sparse=True) for i, name in enumerate("abcd")]
    root = ElementTree.fromstring(render_svg([Panel("Accuracy", curves, (0, 10), is_share=True)], "t"))
    places = [float(e.attrib["y"]) for e in root.iter(f"{SVG}text") if e.attrib.get("class", "").startswith("value")]
    assert len(places) == 4
    assert all(abs(a - b) >= 30 for i, a in enumerate(places) for b in places[:i])
    assert max(places) < HEIGHT


def test_a_title_with_markup_stays_text() -> None:
    root = ElementTree.fromstring(render_svg([], "a < b & c", "<x>"))
    assert "a < b & c" in [element.text for element in root.iter(f"{SVG}text")]


def test_png_is_drawn_where_matplotlib_is_installed(finished_run: RunDirectory) -> None:
    pytest.importorskip("matplotlib", reason="needs the package matplotlib")
    summary = report(finished_run, console=Console(file=io.StringIO()))
    png = finished_run.path / "curves.png"
    assert png in summary.pictures
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.stat().st_size > 10_000


def test_without_matplotlib_there_is_still_a_picture(
    finished_run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    summary = report(finished_run, console=Console(file=io.StringIO()))
    assert [path.name for path in summary.pictures] == ["summary.html", "curves.svg"]


def test_a_long_run_makes_a_small_picture() -> None:
    lines = [{"step": step, "critic/score/mean": math.sin(step / 900)} for step in range(1, 50_001)]
    (panel,) = run_panels(lines)
    assert len(panel.curves[0].points) <= 600
    assert len(render_svg([panel], "long")) < 100_000


def test_the_page_of_a_long_run_takes_little_of_the_drivers_memory(tmp_path: Path) -> None:
    """It is renewed while the run goes on: what it reads of the metrics must not grow the driver as they grow."""
    run = record_run(tmp_path / "run")
    others = {f"other/metric_{n}": n / 7 for n in range(100)}
    with run.metrics_file.open("a") as file:
        for step in range(STEPS + 1, 3000):
            file.write(json.dumps({"step": step, "time": 1.0, "critic/score/mean": step / 3000, **others}) + "\n")
    write_page(run)  # whatever is imported or kept once
    tracemalloc.start()
    try:
        write_page(run)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < run.metrics_file.stat().st_size / 2, f"{peak / 1e6:.1f} MB"
    assert run.recorded_steps() == set(range(3000))


def test_several_data_sources_have_a_curve_each_and_names_with_slashes_work() -> None:
    lines = [
        {
            "step": step,
            "val/openai/gsm8k/acc/mean@1": 0.1,
            "val/openai/gsm8k/acc/mean@4": 0.2,
            "val/math/acc/mean@1": 0.3,
        }
        for step in (0, 10)
    ]
    (panel,) = run_panels(lines)
    assert {curve.label: curve.points[-1] for curve in panel.curves} == {"openai/gsm8k": (10, 0.2), "math": (10, 0.3)}


@pytest.mark.parametrize("low_high", [(0.0, 1.0), (-3.7, 12.2), (1e-6, 3e-6), (0.4, 0.4001), (0, 50_000)])
def test_ticks_are_round_few_and_inside(low_high: tuple[float, float]) -> None:
    low, high = low_high
    marks = ticks(low, high, about=5)
    assert 2 <= len(marks) <= 11
    assert low - 1e-9 <= marks[0]
    assert marks[-1] <= high + 1e-9
    assert all(len(f"{mark:g}") <= 8 for mark in marks)


def test_ticks_of_steps_are_whole_numbers() -> None:
    assert ticks(0, 3, about=6, smallest=1) == [0, 1, 2, 3]


def chart_lines(points: list[tuple[float, float]], height: int) -> list[str]:
    panel = Panel("Accuracy", [Curve("held-out", points, 0, is_sparse=True)], (0, 10), is_share=True)
    return draw_chart(panel, width=40, height=height).plain.splitlines()


def test_chart_for_the_terminal_has_the_size_asked_for_and_rises() -> None:
    lines = chart_lines([(0, 0.0), (10, 1.0)], height=8)
    assert len(lines) == 8 + 3
    body = [line.split("┤")[-1].split("│")[-1] for line in lines[1:9]]
    assert body[0].index(body[0].strip()) > 30, "ends at the top right"
    assert body[-1][0] != " ", "begins at the bottom left"


def test_a_value_is_drawn_on_the_line_of_its_label() -> None:
    lines = chart_lines([(0, 0.6), (10, 0.6)], height=11)
    (drawn,) = [line for line in lines[1:12] if line.split("┤")[-1].split("│")[-1].strip()]
    assert drawn.startswith(" 60% ┤")


def test_questions_are_chosen_without_looking_at_the_answers_after_training() -> None:
    before = [{"prompt": f"q{i}", "response": "a", "score": float(i == 0), "ground_truth": "t"} for i in range(5)]
    after = [{"prompt": f"q{i}", "response": "b", "score": float(i == 4)} for i in range(5)]
    chosen = choose_before_after(before, after)
    assert [pair.question for pair in chosen] == ["q1", "q2", "q3"]
    assert [pair.after_is_right for pair in chosen] == [False, False, False]


def test_an_accuracy_beside_the_score_decides_what_is_right() -> None:
    before = [{"prompt": "q", "response": "a", "score": 0.1, "acc": 0.0}]
    after = [{"prompt": "q", "response": "b", "score": -0.5, "acc": 1.0}]
    (pair,) = choose_before_after(before, after)
    assert (pair.before_is_right, pair.after_is_right) == (False, True)


def test_of_pairs_it_says_which_answer_is_preferred_and_unjudged_rows_are_passed_over(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.begin()
    (run.samples / "val_of_mine.jsonl").write_text("{}\n")
    for step, reward in ((20, -0.5), (40, 0.25)):
        run.append_metrics(step, {"train/loss": 1.0 / step})
        pair = {"prompt": "44+30=", "chosen": "74", "rejected": "84", "chosen_reward": reward, "rejected_reward": 0.0}
        target = {"prompt": "1+1=", "response": "2", "extra": {"loss": 0.1}}
        run.write_samples(step, [{**pair, "acc": float(reward > 0)}, target], kind="val")
    output = io.StringIO()
    with (run.samples / "val_00000040.jsonl").open("a") as file:
        file.write('{"half a li')
    report(run, console=Console(file=output, width=120))
    (row,) = [line for line in output.getvalue().splitlines() if "44+30=" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "44+30=",
        "74",
        "✗ prefers the rejected one by 0.5",
        "✓ prefers this answer by 0.25",
    ]
    assert "after step 20" in output.getvalue(), "it was not validated before training"
    assert "after step 40</th>" in (tmp_path / "summary.html").read_text()
    assert "1+1=" not in output.getvalue(), "nobody has judged it"


def test_durations_read_well() -> None:
    assert [clock(42), clock(61), clock(4062), clock(-3)] == ["0:42", "1:01", "1:07:42", "0:00"]
    assert [in_words(s) for s in (0.42, 42.4, 59.9, 91, 11220)] == [
        "0.42 s",
        "42 s",
        "1 min 00 s",
        "1 min 31 s",
        "3 h 07 min",
    ]


def test_looking_at_runs_needs_no_heavy_import() -> None:
    import subprocess

    code = (
        "import sys, quadriga.tracking.summary, quadriga.tracking.console\n"
        "heavy = {'torch', 'ray', 'transformers', 'tensorboard', 'matplotlib', 'wandb', 'mlflow'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "figures",
    [
        {"val/arithmetic/acc/mean@1": 0.887, "critic/score/mean": 0.5},
        {"val/loss": 2.286, "val/accuracy": 0.5},
    ],
)
def test_a_single_figure_is_compared_with_nothing(tmp_path, figures):
    directory = RunDirectory(tmp_path / "run")
    directory.begin()
    directory.append_metrics(1, figures)
    summary = summarize(directory)
    directory.close()
    console = Console(record=True, width=120)
    show_summary(summary, [], console)
    for told in (summary.headline, console.export_text()):
        assert "88.7%" in told or "held-out loss" in told
        assert "→" not in told
