"""Samples of a run, a page at a time: a file of gigabytes is never read as a whole for one answer."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from quadriga.dashboard.catalog import Run
from quadriga.dashboard.files import Unreadable, encodable, finite, open_inside, parse_line, plain, read_lines

KINDS = ("train", "val")
FLAGS = ("right", "wrong", "unparsed", "cut off", "crashed", "timed out")
"""What a filter can ask for. A sample may be several of them."""
PAGE_SECONDS, PAGE_BYTES = 1.5, 256 << 20
"""A search gives up after so long, or so much, and says where to go on."""
MAX_TEXT = 200_000
_FILE = re.compile(r"(train|val)_(\d{1,12})\.jsonl")
_SHOWN = {
    "step", "uid", "sample_index", "sample", "row", "data_source", "prompt", "response", "ground_truth", "score", "acc", "pred",
    "outcome", "advantage", "tokens", "response_tokens", "finish_reason", "error", "extra", "messages",
    "chosen", "rejected", "chosen_reward", "rejected_reward",
}  # fmt: skip


@dataclass(frozen=True)
class Query:
    """Which samples: of a step, from a byte of its file on, that contain a text and carry a flag."""

    kind: str = "train"
    step: int = 0
    offset: int = 0
    limit: int = 50
    text: str = ""
    flag: str = ""


def sample_steps(run: Run) -> dict[str, list[int]]:
    """Kind → steps that have samples, in order."""
    found: dict[str, set[int]] = {kind: set() for kind in KINDS}
    try:
        for name in os.listdir(run.path / "samples"):
            if match := _FILE.fullmatch(name):
                found[match[1]].add(int(match[2]))
    except OSError:
        pass
    return {kind: sorted(steps) for kind, steps in found.items()}


def sample_page(run: Run, query: Query, max_response_length: int | None = None) -> dict[str, Any]:
    """The next samples that fit, with `next`, the byte where the page after it begins (None: this is the last).

    Raises:
        Unreadable: there is no such file.
    """
    deadline = time.monotonic() + PAGE_SECONDS
    rows: list[dict[str, Any]] = []
    damaged = 0
    needle = query.text.casefold()
    with _open(run, query.kind, query.step) as file:
        size = os.fstat(file.fileno()).st_size
        start = _line_start(file, min(max(query.offset, 0), size))
        file.seek(start)
        end: int | None = None
        for offset, raw in read_lines(file):
            is_late = time.monotonic() > deadline or offset - start > PAGE_BYTES
            if len(rows) >= query.limit or (is_late and offset > start):  # at least one line, so that it gets on
                end = offset
                break
            row = parse_line(raw)
            if row is None:
                damaged += 1
                continue
            shown = shown_sample(row, offset, max_response_length)
            if query.flag and query.flag not in shown["flags"]:
                continue
            if needle and not _contains(shown, needle):
                continue
            rows.append(shown)
    return {"rows": rows, "next": end, "size": size, "damaged": damaged, "searched": (end or size) - start}


def sample_history(
    run: Run, kind: str, step: int, offset: int, max_response_length: int | None = None, first_step: int = 0
) -> dict[str, Any]:
    """The same question at every step from `first_step` on: the samples whose prompt and sample number are those of the one at
    `offset` of `step`. `next` is where a search that took too long goes on, None where it is done.

    Raises:
        Unreadable: there is no such sample.
    """
    deadline = time.monotonic() + 2 * PAGE_SECONDS
    with _open(run, kind, step) as file:
        file.seek(_line_start(file, max(offset, 0)))
        first = next((row for _, raw in read_lines(file) if (row := parse_line(raw)) is not None), None)
    if first is None:
        raise Unreadable("there is no sample at this place")
    asked = json.dumps(first.get("prompt"), ensure_ascii=False).encode(errors="replace")
    found: list[dict[str, Any]] = []
    steps = [other for other in sample_steps(run)[kind] if other >= first_step]
    for k, other in enumerate(steps):
        if k and time.monotonic() > deadline:  # at least one step, so that it gets on
            return {"rows": found, "next": other}
        for row, at in _with_prompt(run, kind, other, asked):
            if row.get("prompt") == first.get("prompt") and _number(row) == _number(first):
                found.append(shown_sample(row, at, max_response_length) | {"step": other})
                break
    return {"rows": found, "next": None}


def same_questions(
    run: Run, kind: str, step: int, rows: list[dict[str, Any]], max_response_length: int | None = None
) -> dict[str, Any]:
    """What another run answered to the same questions, at its step nearest to `step`: a sample for each of `rows`, or None."""
    steps = sample_steps(run)[kind]
    nearest = min(steps, key=lambda own: (abs(own - step), own), default=None)
    wanted = {(row["prompt"], row["sample"]) for row in rows}
    found: dict[tuple[str | None, float | None], dict[str, Any]] = {}
    if nearest is not None:
        deadline = time.monotonic() + PAGE_SECONDS
        with _open(run, kind, nearest) as file:
            for offset, raw in read_lines(file, PAGE_BYTES):
                if len(found) == len(wanted) or time.monotonic() > deadline:
                    break
                row = parse_line(raw) or {}
                question = (_text(row.get("prompt")), _number(row))
                if question in wanted:
                    found.setdefault(question, shown_sample(row, offset, max_response_length))
    return {"step": nearest, "rows": [found.get((row["prompt"], row["sample"])) for row in rows]}


def shown_sample(row: dict[str, Any], offset: int, max_response_length: int | None = None) -> dict[str, Any]:
    """A sample as a viewer takes it: known fields by name, everything else under `extras`, its flags told."""
    tokens = row.get("tokens")
    length = finite(row.get("response_tokens"))
    extras = {str(k): v for k, v in row.items() if k not in _SHOWN}
    if isinstance(row.get("extra"), dict):
        extras |= row["extra"]
    shown = {
        "offset": offset,
        "uid": _text(row.get("uid", row.get("row"))),
        "sample": _number(row),
        "data_source": _text(row.get("data_source")),
        "prompt": _text(row.get("prompt")),
        "response": _text(row.get("response")),
        "ground_truth": _text(row.get("ground_truth")),
        "pred": _text(row.get("pred")),
        "score": finite(row.get("score")),
        "advantage": finite(row.get("advantage")),
        "length": length,
        "outcome": outcome_of(row),
        "error": _text(row.get("error")),
        "flags": flags_of(row, max_response_length),
        "extras": plain(extras),
        "tokens": _token_columns(tokens) if isinstance(tokens, dict) else None,
        "messages": _messages(row.get("messages")),
    }
    for name in ("chosen", "rejected"):
        if name in row:
            shown[name] = {"text": _text(row[name]), "reward": finite(row.get(f"{name}_reward"))}
    return shown


def _number(row: dict[str, Any]) -> float | None:
    """Which of the samples of its prompt it is."""
    return finite(row.get("sample_index", row.get("sample")))


def outcome_of(row: dict[str, Any]) -> str:
    """correct, wrong, unparsed, error or timeout, as the reward told; else by accuracy, else by score; "" if unknown."""
    told = row.get("outcome")
    if isinstance(told, str) and told:
        return told
    accuracy, score = finite(row.get("acc")), finite(row.get("score"))
    if accuracy is None and score is None:
        return ""
    return "correct" if (accuracy > 0.5 if accuracy is not None else score > 0) else "wrong"  # type: ignore[operator]


def flags_of(row: dict[str, Any], max_response_length: int | None) -> list[str]:
    """Those of `FLAGS` that the sample carries."""
    outcome, length = outcome_of(row), finite(row.get("response_tokens"))
    names = {"correct": "right", "wrong": "wrong", "unparsed": "unparsed", "error": "crashed", "timeout": "timed out"}
    flags = [names[outcome]] if outcome in names else []
    is_full = length is not None and max_response_length is not None and length >= max_response_length
    return [*flags, *(["cut off"] if is_full or row.get("finish_reason") == "length" else [])]


def _contains(shown: dict[str, Any], needle: str) -> bool:
    fields: Iterable[Any] = (
        shown[name] for name in ("prompt", "response", "ground_truth", "pred", "uid", "data_source")
    )
    pairs = (shown[name]["text"] for name in ("chosen", "rejected") if name in shown)
    return any(needle in str(field).casefold() for field in (*fields, *pairs) if field)


def _token_columns(tokens: dict[str, Any]) -> dict[str, list[Any]] | None:
    """Lists over the tokens of the response, all of one length; what does not fit is left out."""
    texts = tokens.get("texts")
    if not isinstance(texts, list):
        return None
    found: dict[str, list[Any]] = {"texts": [str(text)[:1000] for text in texts]}
    for name in ("ids", "rollout_log_probs", "trainer_log_probs", "mask", "advantages", "versions"):
        values = tokens.get(name)
        if isinstance(values, list) and len(values) == len(texts):
            found[name] = [finite(value) for value in values]
    gap = tokens.get("left_out")
    if isinstance(gap, list) and len(gap) == 2 and None not in (place := [finite(value) for value in gap]):
        found["left_out"] = place
    return found


def _messages(value: Any) -> list[dict[str, str]] | None:
    """A conversation: who said what, with the tool calls as text; None where an agent has left none."""
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        return None
    return [
        {
            "role": _text(turn.get("role")) or "?",
            "content": _text(turn.get("content")) or "",
            "calls": _text(turn.get("tool_calls")) or "",
        }
        for turn in value[:500]
    ]


def _text(value: Any) -> str | None:
    """Any JSON as text of bounded length; a list of chat messages reads as a conversation."""
    if value is None or value == []:
        return None
    if isinstance(value, list) and all(isinstance(turn, dict) and "content" in turn for turn in value):
        value = "\n\n".join(f"[{turn.get('role', '?')}] {turn['content']}" for turn in value)
    text = encodable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}\n… {len(text) - MAX_TEXT:,} characters more"


def _with_prompt(run: Run, kind: str, step: int, asked: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    try:
        with _open(run, kind, step) as file:
            for offset, raw in read_lines(file, PAGE_BYTES):
                if asked in raw and (row := parse_line(raw)) is not None:
                    yield row, offset
    except (Unreadable, OSError):
        return


def _open(run: Run, kind: str, step: int) -> Any:
    if kind not in KINDS or not 0 <= step < 10**12:
        raise Unreadable(f"there are no samples of {kind} {step}")
    return open_inside(run.path, "samples", f"{kind}_{step:08d}.jsonl")


def _line_start(file: Any, offset: int) -> int:
    """The beginning of the next line at or after `offset`, so that any number is a place to begin."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    if file.read(1) == b"\n":
        return offset
    place = offset
    while piece := file.readline(1 << 20):  # in pieces: a damaged file may be one line of gigabytes
        place += len(piece)
        if piece.endswith(b"\n") or place - offset > PAGE_BYTES:
            break
    return place
