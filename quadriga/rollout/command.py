"""The command `quadriga generate`: a file of prompts in, a line of JSON for every sample out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import numpy as np

from quadriga.errors import DataError
from quadriga.rollout.flags import add_generation_flags, open_engine, sampling_params
from quadriga.rollout.interface import Completion, Request


def main(argv: Sequence[str]) -> int:
    """Runs the command; raises one of Quadriga's errors where it cannot."""
    options = command_parser().parse_args(argv)
    params = sampling_params(options)
    prompts, where = _read_prompts(options.prompts, options.prompt_key)

    from quadriga.checkpoint.model_path import model_path
    from quadriga.data.chat import ChatEncoder
    from quadriga.data.progress import progress_bar
    from quadriga.models.load import load_tokenizer

    path = model_path(options.model)
    tokenizer = load_tokenizer(path)
    ids = ChatEncoder(tokenizer).encode_prompts(prompts, where)
    engine = open_engine(options, path, tokenizer, max(map(len, ids)))
    requests = [Request(str(row), p, params, (0, row), tuple(range(options.n))) for row, p in enumerate(ids)]
    samples = len(requests) * options.n
    with open_output(options.output) as output, progress_bar("samples", samples) as advance:
        for completion in engine.generate(requests):
            print(json.dumps(_line(completion, prompts, tokenizer), ensure_ascii=False), file=output, flush=True)
            advance(1)
    if options.output != "-":
        print(f"{options.output}: {samples} samples of {len(requests)} prompts")
    return 0


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quadriga generate",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Continue every prompt of a file. Samples are written as they finish, with the log-prob of each token.",
        epilog="""examples:
  quadriga generate prompts.txt --model Qwen/Qwen2.5-0.5B-Instruct --max-new-tokens 256
  quadriga generate test.parquet --model outputs/quadriga/my_run --n 8 --output samples.jsonl

A line of output: row, sample, prompt, response, finish_reason, token_ids, log_probs (under the distribution that was
sampled from), full_log_probs (under softmax(logits / temperature), as the trainer defines it).""",
    )
    parser.add_argument("prompts", help=".txt (a prompt a line), .jsonl, .json or .parquet (strings or chats)")
    parser.add_argument("--output", default="-", help="file for the samples, .jsonl (default: the terminal)")
    parser.add_argument("--prompt-key", default="prompt", help="column with the prompt (prompt)")
    add_generation_flags(parser, temperature=1.0)
    return parser


def _read_prompts(path: str, key: str) -> tuple[list[Any], Any]:
    """The prompts, and a function that names the place of one."""
    from quadriga.data.files import expand_path, load_rows
    from quadriga.data.messages import check_messages

    file = expand_path(path)
    if file.suffix == ".txt" and file.is_file():
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not lines:
            raise DataError(f"no prompts in {path}", "write one prompt a line")
        return lines, lambda row: f"{path}, prompt {row}"
    rows = load_rows(path)
    prompts = []
    for number, row in enumerate(rows.read(np.arange(len(rows)))):
        if key not in row:
            raise DataError(f"{rows.where(number)} has no column {key!r}, only {', '.join(row)}", "set --prompt-key")
        prompts.append(row[key] if isinstance(row[key], str) else check_messages(row[key], rows.where(number)))
    return prompts, rows.where


def _line(completion: Completion, prompts: list[Any], tokenizer: Any) -> dict[str, Any]:
    row = completion.uid[1]
    return {
        "row": row,
        "sample": completion.sample_index,
        "prompt": prompts[row],
        "response": tokenizer.decode(completion.token_ids, skip_special_tokens=True),
        "finish_reason": completion.finish_reason,
        "token_ids": completion.token_ids,
        "log_probs": completion.log_probs,
        "full_log_probs": completion.full_log_probs,
    }


@contextmanager
def open_output(path: str) -> Iterator[TextIO]:
    """The file, or the terminal for "-"."""
    if path == "-":
        yield sys.stdout
        return
    from quadriga.data.files import expand_path

    try:
        file = expand_path(path).open("w", encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror}", "give --output a file in a folder that exists"
        ) from error
    with file:
        yield file
