"""Log-probs of given tokens from a server with OpenAI's completions that returns `prompt_logprobs`, as vLLM does."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from quadriga.config.distillation import Teacher
from quadriga.errors import ConfigError, WorkerError

TRIES = 3
"""Requests that are not answered in time."""
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Between requests that did not get through: long enough for a server to be restarted."""


class TokenLogProbs(NamedTuple):
    """Of one row's response tokens: the log-prob of each, and ids and log-probs of the k likeliest."""

    log_probs: list[float]
    top_ids: list[list[int]]
    top_log_probs: list[list[float]]


class TeacherEndpoint:
    """Asks a server. One request a row, `max_concurrent` at a time, each with a deadline; what fails in passing is asked again.

    Args:
        teacher: its address, model and where its key is.
        timeout_s: deadline of a try.
        max_concurrent: requests at the same time.
    """

    def __init__(self, teacher: Teacher, timeout_s: float, max_concurrent: int) -> None:
        self.teacher, self.timeout_s, self.max_concurrent = teacher, timeout_s, max_concurrent
        self.headers = {"Content-Type": "application/json"}
        if teacher.api_key_env:
            key = os.environ.get(teacher.api_key_env)
            if not key:
                raise ConfigError(
                    f"distillation.teacher_models.{teacher.name}.api_key_env={teacher.api_key_env} is not set in the environment",
                    f"export {teacher.api_key_env}=<the key>, where the run starts",
                )
            self.headers["Authorization"] = f"Bearer {key}"

    def score(self, rows: Sequence[tuple[list[int], int]], top_k: int) -> list[TokenLogProbs]:
        """What the server says of rows given as `(ids of prompt and response, length of the response)`."""
        with ThreadPoolExecutor(self.max_concurrent) as pool:
            return list(pool.map(lambda row: self._one(row[0], row[1], top_k), rows))

    def _one(self, ids: list[int], response: int, top_k: int) -> TokenLogProbs:
        if not response:
            return TokenLogProbs([], [], [])
        body = {
            "model": self.teacher.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": max(top_k, 1),
        }
        answer = self._post(body)
        try:
            told = answer["choices"][0]["prompt_logprobs"]
            return _read(told, ids, response, top_k)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise WorkerError(
                f"{self._where()} answered without usable prompt_logprobs ({type(error).__name__}: {error})",
                "use a server that returns prompt_logprobs for completions of token ids, such as vLLM, and allow "
                f"as many as {max(top_k, 1)} (vllm serve --max-logprobs)",
            ) from error

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.teacher.endpoint.rstrip("/") + "/completions", json.dumps(body).encode(), self.headers
        )
        late = 0
        for attempt, pause in enumerate((*PAUSES_S, None), 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                    return json.load(reply)
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:  # URLError is an OSError
                refused = isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500 and error.code != 429
                late += isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError)
                if refused or pause is None or late == TRIES:
                    raise WorkerError(
                        f"{self._where()} did not answer in {attempt} tries: {error}",
                        "look at the server's log; distillation.timeout_s and distillation.max_concurrent bound the requests",
                    ) from error
            time.sleep(pause)
        raise AssertionError("unreachable")

    def _where(self) -> str:
        return f"the teacher {self.teacher.name} at {self.teacher.endpoint}"


def _read(told: list[Any], ids: list[int], response: int, top_k: int) -> TokenLogProbs:
    """`told[i]` maps token ids (as text) to what is said of them at position i; the first position has nothing before it."""
    if len(told) != len(ids):
        raise ValueError(f"{len(told)} positions for {len(ids)} tokens")
    log_probs, top_ids, top_log_probs = [], [], []
    for position in range(len(ids) - response, len(ids)):
        here = {int(token): float(said["logprob"]) for token, said in told[position].items()}
        log_probs.append(here[ids[position]])
        best = sorted(here.items(), key=lambda item: (-item[1], item[0]))[:top_k]
        if len(best) < top_k:
            raise ValueError(f"{len(best)} of {top_k} likeliest tokens")
        top_ids.append([token for token, _ in best])
        top_log_probs.append([value for _, value in best])
    return TokenLogProbs(log_probs, top_ids, top_log_probs)
