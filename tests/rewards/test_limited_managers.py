"""Scores that come over the network: a limited pace, and a judge behind an endpoint."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quadriga.config import load_config
from quadriga.errors import ConfigError
from quadriga.rewards import RewardSample, open_pool
from quadriga.rewards.paced import Pace, ask_judge


def test_pace_spreads_requests_evenly() -> None:
    now = 100.0
    pace = Pace(per_minute=120, now=lambda: now)
    assert [pace.reserve() for _ in range(3)] == [0.0, 0.5, 1.0]
    assert pace.reserve(4) == 1.5
    now = 200.0
    assert pace.reserve() == 0.0, "time that passed unused is not saved up"


class Judge(BaseHTTPRequestHandler):
    """Says 1 where the answer is in the question's reference, and nothing of use where it is told to be silent."""

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        reply = (
            "I cannot say." if "silence" in question else "The score is 1" if "Answer: 4" in question else "Score: 0.0"
        )
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": reply}}]}).encode())

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def config(manager: str, options: dict[str, Any], **pool: Any) -> Any:
    return load_config(
        {
            "reward_model": {"reward_manager": manager, "reward_kwargs": options},
            "reward": {"num_workers": 1, "max_concurrent": 2, **pool},
        }
    )


def test_a_judge_scores_and_an_answer_it_cannot_judge_is_unparsed(endpoint: str) -> None:
    with open_pool(config("judge", {"url": endpoint, "model": "m", "max_rpm": 6000})) as pool:
        right, wrong, silent = pool.score_all([RewardSample("any", text, "4") for text in ("4", "5", "silence")])
    assert (right.score, wrong.score, silent.score) == (1.0, 0.0, 0.0)
    assert silent.outcome == "unparsed"
    assert right.extra["reply"] == "The score is 1"


def test_an_endpoint_that_is_not_there_is_an_error_of_the_sample() -> None:
    with pytest.raises(Exception, match="gave no answer"):
        ask_judge("s", "a", "b", {}, url="http://127.0.0.1:9/v1", model="m", request_timeout_s=2)


def test_rate_limited_scores_with_the_usual_function() -> None:
    with open_pool(config("rate_limited", {"max_rpm": 60000, "max_tpm": 10**9})) as pool:
        (result,) = pool.score_all([RewardSample("openai/gsm8k", "#### 4", "4")])
    assert result.score == 1.0


@pytest.mark.parametrize(
    ("manager", "options", "what"),
    [
        ("rate_limited", {"max_rpm": 1}, "wait up to 120 s"),
        ("rate_limited", {"max_rpm": 0}, "above 0"),
        ("rate_limited", {"rpm": 5}, "unknown key 'rpm'"),
        ("judge", {"model": "m"}, "no url"),
        ("judge", {"url": "host:80", "model": "m"}, "no http address"),
        ("judge", {"url": "http://h", "model": "m", "score_pattern": "("}, "cannot be read"),
    ],
)
def test_what_cannot_work_is_told_before_the_first_sample(manager: str, options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        open_pool(config(manager, options))
