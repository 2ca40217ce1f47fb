from __future__ import annotations

import json
import shutil
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path

import pytest
from run_folders import sample, write_run, write_samples
from served import Served

from quadriga.dashboard.server import API, STATIC


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Served]) -> Served:
    root = tmp_path_factory.mktemp("outputs")
    write_run(root / "p" / "good", steps=30)
    write_run(root / "p" / "bad", steps=10, state="failed", error="DataError: no rows", level=0.2)
    write_samples(root / "p" / "good", 5, [sample(k, k % 2 == 0) for k in range(8)])
    return serve(root)


def test_runs_are_filtered_sorted_and_paged(served: Served) -> None:
    served.row("p/good")

    def names(query: str) -> list[str]:
        return [row["name"] for row in served.json(f"runs?{query}")["rows"] if row["name"] in ("p/good", "p/bad")]

    assert names("sort=main&order=down") == ["p/good", "p/bad"]
    assert names("sort=name&order=up") == ["p/bad", "p/good"]
    assert names("state=failed") == ["p/bad"]
    assert names("text=lr%3D0.001+finished") == ["p/good"]
    assert len(served.json("runs?limit=1")["rows"]) == 1


def test_every_question_about_a_run_has_an_answer(served: Served) -> None:
    run = served.row("p/good")["id"]
    assert len(served.json(f"series?run={run}&metric=actor/entropy")["actor/entropy"]["x"]) == 30
    assert served.json(f"sample_steps?run={run}")["train"] == [5]
    assert len(served.json(f"samples?run={run}&kind=train&step=5&flag=wrong")["rows"]) == 4
    assert served.json(f"events?run={run}") == {"events": [], "stalls": []}


@pytest.mark.parametrize("name", API)
def test_an_unknown_run_a_path_or_nonsense_is_answered_with_a_problem_not_a_crash(served: Served, name: str) -> None:
    good = served.row("p/good")["id"]
    for run in ("", "nothing", "../../etc", "%00", "a" * 5000, good):
        query = f"run={run}&ids={run}&step=-1&offset=x&limit=1e9&from=a&x=b&kind=../..&file=../config.yaml&first=9e9"
        code, body, _ = served.get(f"api/{name}?{query}&metric=..%2F..&sort=zzz&state=zzz&start=-5")
        assert code in (200, 404), body
        json.loads(body)


@pytest.mark.parametrize(
    "path",
    [
        "static/../server.py",
        "static/%2e%2e/server.py",
        "static/..%2fserver.py",
        "static//etc/passwd",
        "static/js/../../catalog.py",
        "../../etc/passwd",
        "%2e%2e/%2e%2e/etc/passwd",
    ],
)
def test_no_path_leads_out_of_the_page_s_own_files(served: Served, path: str) -> None:
    code, body, _ = served.get(path)
    assert code == 404
    assert b"root:" not in body
    assert b"import" not in body


def test_the_page_may_run_only_its_own_scripts_and_talk_to_nobody(served: Served) -> None:
    _, page, headers = served.get("")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert b"http://" not in page
    assert b"https://" not in page
    assert headers["x-content-type-options"] == "nosniff"


def test_the_page_s_scripts_never_turn_text_into_markup() -> None:
    for file in (STATIC / "js").glob("*.js"):
        text = file.read_text(encoding="utf-8")
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "https:",
        ):
            assert way not in text, f"{file.name} uses {way}"
        assert ("fetch(" in text) == (file.name == "api.js")


def test_only_known_host_names_are_answered_so_that_no_other_site_can_ask(served: Served) -> None:
    code, _, _ = served.get("api/runs", Host="evil.example")
    assert code == 421


def test_nothing_can_be_written(served: Served) -> None:
    import urllib.error
    import urllib.request

    request = urllib.request.Request(served.address + "api/runs", data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(request, timeout=10)


def test_bound_wider_it_wants_the_token(tmp_path: Path, serve: Callable[..., Served]) -> None:
    write_run(tmp_path / "run")
    guarded = serve(tmp_path, hosts=None, token="sesame")
    assert guarded.get("api/runs")[0] == 401
    assert guarded.get("api/runs?token=wrong")[0] == 401
    assert guarded.get("static/js/main.js")[0] == 401
    code, _, _ = guarded.get("api/runs", Cookie="quadriga_token=sesame")
    assert code == 200
    opened, page, _ = guarded.get("?token=sesame")  # sets the cookie and leads to the page, for which it is needed
    assert opened == 401
    assert b"token" in page


def test_a_run_that_vanishes_is_said_and_the_others_stay(served: Served) -> None:
    write_run(served.root / "short lived", steps=3)
    run = served.row("short lived")["id"]
    shutil.rmtree(served.root / "short lived")
    code, body, _ = served.get(f"api/metrics?run={run}")
    assert code == 404
    assert "not here" in json.loads(body)["problem"]
    assert served.row("p/good")


def test_ten_thousand_runs_are_listed_in_seconds_and_a_page_at_a_time(
    tmp_path: Path, serve: Callable[..., Served]
) -> None:
    for k in range(10_000):
        folder = tmp_path / f"p{k // 100}" / f"r{k}"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(f'{{"step": 1, "time": {k}, "critic/score/mean": {k}}}\n')
    many = serve(tmp_path)
    began = time.monotonic()
    found = many.json("runs?sort=main&limit=100")
    assert time.monotonic() - began < 20
    assert found["total"] == 10_000
    assert [row["main"]["value"] for row in found["rows"][:2]] == [9999.0, 9998.0]
    assert many.json("runs?" + urllib.parse.urlencode({"text": "p3/r301"}))["total"] == 1
