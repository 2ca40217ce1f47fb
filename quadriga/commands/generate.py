"""The command `quadriga generate`: prompts in, answers out: as text for people, or a line of JSON for every sample."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import numpy as np

from quadriga.commands.generation_flags import add_generation_flags, open_engine, sampling_params
from quadriga.errors import ConfigError, DataError, printable
from quadriga.rollout.interface import Completion, Request

STDIN = "-"
Prompts = list[Any]
"""Texts, and chats as lists of messages."""


def main(argv: Sequence[str]) -> int:
    """Runs the command; raises one of Quadriga's errors where it cannot."""
    options = command_parser().parse_args(argv)
    params = sampling_params(options)
    if options.prompt is None:
        if not options.chat:
            raise ConfigError(
                "there is no prompt",
                'give a text ("12+7="), a file, or - for standard input; --chat alone is a conversation',
            )
        return _converse(options, params)
    prompts, where = _prompts_of(options)

    from quadriga.checkpoint.huggingface import model_path
    from quadriga.data.chat import ChatEncoder
    from quadriga.data.files import progress_bar
    from quadriga.models.load import load_tokenizer

    path = model_path(options.model)
    tokenizer = load_tokenizer(path)
    ids = ChatEncoder(tokenizer, options.chat_template).encode_prompts(prompts, where)
    engine = open_engine(options, path, tokenizer, max(map(len, ids)) + params.max_new_tokens)
    requests = [Request(str(row), p, params, (0, row), tuple(range(options.n))) for row, p in enumerate(ids)]
    samples = len(requests) * options.n
    as_json = options.json or options.output != STDIN
    with open_output(options.output) as output, progress_bar("samples", samples) as advance:
        for completion in engine.generate(requests):
            line = _line(completion, prompts, tokenizer)
            text = json.dumps(line, ensure_ascii=False) if as_json else _for_people(line, samples)
            print(text, file=output, flush=True)
            advance(1)
    if options.output != STDIN:
        print(f"{options.output}: {samples} samples of {len(requests)} prompts")
    return 0


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quadriga generate",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Let a model answer a prompt, every prompt of a file, or you. Answers appear as they finish.",
        epilog="""examples:
  quadriga generate "12+7=" --model builtin:arithmetic
  quadriga generate --chat "Who are you?" --model Qwen/Qwen2.5-0.5B-Instruct
  quadriga generate --chat --model Qwen/Qwen2.5-0.5B-Instruct                 a conversation; Ctrl-D ends it
  git log -1 | quadriga generate - --model my_model
  quadriga generate test.parquet --model outputs/quadriga/my_run --n 8 --output samples.jsonl

A line of JSON: row, sample, prompt, response, finish_reason, token_ids, log_probs (under the distribution that was
sampled from), full_log_probs (under softmax(logits / temperature), as the trainer defines it).""",
    )
    parser.add_argument(
        "prompt",
        nargs="?",
        help="the text itself; - for standard input; or a file: .txt (a prompt a line), .jsonl, .json or .parquet "
        "(strings or chats)",
    )
    parser.add_argument(
        "--chat", action="store_true", help="a text is what the user says: it goes through the chat template"
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON for every sample, log-probs included")
    parser.add_argument("--output", default=STDIN, help="file for the samples, .jsonl (default: the terminal)")
    parser.add_argument("--prompt-key", default="prompt", help="column with the prompt (prompt)")
    add_generation_flags(parser, temperature=1.0)
    return parser


def _prompts_of(options: argparse.Namespace) -> tuple[Prompts, Callable[[int], str]]:
    """The prompts, and a function that names the place of one."""
    from quadriga.data.files import SUFFIXES, expand_path

    text = options.prompt
    if text == STDIN:
        piped = sys.stdin.read().rstrip("\r\n")  # a shell ends what it pipes with a line break
        prompts, where = [piped], lambda row: "standard input"
        if not prompts[0].strip():
            raise DataError("standard input is empty", "pipe a prompt into the command")
    elif expand_path(text).suffix in (".txt", *SUFFIXES) and "\n" not in text:
        prompts, where = _read_prompts(text, options.prompt_key)
    else:
        prompts, where = [text], lambda row: "the prompt"
        if not text.strip():
            raise DataError("the prompt is empty", "give some text")
    if options.chat:
        prompts = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]
    return prompts, where


def _read_prompts(path: str, key: str) -> tuple[Prompts, Callable[[int], str]]:
    from quadriga.data.chat import check_messages
    from quadriga.data.files import expand_path, load_rows

    file = expand_path(path)
    if file.suffix == ".txt":
        try:
            lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except FileNotFoundError:
            raise DataError(f"{path} does not exist", "check the path") from None
        except (OSError, UnicodeError) as error:
            raise DataError(f"{path} cannot be read: {error}", "give a file of text in UTF-8") from None
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


def _line(completion: Completion, prompts: Prompts, tokenizer: Any) -> dict[str, Any]:
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


def _for_people(line: dict[str, Any], samples: int) -> str:
    """The answer, with its prompt above it where there are several; what was cut off is marked."""
    answer = printable(line["response"]) + (" …" if line["finish_reason"] == "length" else "")
    if samples == 1:
        return answer
    prompt = line["prompt"] if isinstance(line["prompt"], str) else line["prompt"][-1]["content"]
    return f"[{line['row']}.{line['sample']}] {printable(str(prompt))}\n{answer}\n"


def _converse(options: argparse.Namespace, params: Any) -> int:
    """Questions from the terminal, answers that know what was said before, until the input ends."""
    from quadriga.checkpoint.huggingface import model_path
    from quadriga.data.chat import ChatEncoder
    from quadriga.models.load import load_tokenizer

    path = model_path(options.model)
    tokenizer = load_tokenizer(path)
    encoder = ChatEncoder(tokenizer, options.chat_template)
    said: list[dict[str, str]] = []
    engine, longest = None, 0
    shown = "> " if sys.stdin.isatty() else ""
    while True:
        print(shown, end="", flush=True)
        question = sys.stdin.readline()
        if not question:
            return 0
        if not question.strip():
            continue
        said.append({"role": "user", "content": question.strip()})
        (ids,) = encoder.encode_prompts([said], lambda row: "the conversation")
        if engine is None or len(ids) > longest:  # room for the next turns too
            longest = max(2 * len(ids), len(ids) + params.max_new_tokens)
            engine = open_engine(options, path, tokenizer, longest + params.max_new_tokens)
        (completion,) = engine.generate([Request("0", ids, params, (0, len(said)), (0,))])
        answer = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        said.append({"role": "assistant", "content": answer})
        print(printable(answer) + (" …" if completion.finish_reason == "length" else ""), flush=True)


@contextmanager
def open_output(path: str) -> Iterator[TextIO]:
    """The file, or the terminal for "-"."""
    if path == STDIN:
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
