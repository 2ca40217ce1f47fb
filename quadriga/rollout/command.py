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
from quadriga.rollout.interface import Completion, Request
from quadriga.rollout.sampling import SamplingParams


def main(argv: Sequence[str]) -> int:
    """Runs the command; raises one of Quadriga's errors where it cannot."""
    options = _parser().parse_args(argv)
    params = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        max_new_tokens=options.max_new_tokens,
        ignore_eos=options.ignore_eos,
        stop_strings=tuple(options.stop),
        seed=options.seed,
    )
    prompts, where = _read_prompts(options.prompts, options.prompt_key)

    from quadriga.config.schema_models import ModelConfig
    from quadriga.data.chat import ChatEncoder
    from quadriga.data.progress import progress_bar
    from quadriga.models.load import load_policy, load_tokenizer
    from quadriga.rollout.registry import create_engine

    tokenizer = load_tokenizer(options.model)
    ids = ChatEncoder(tokenizer).encode_prompts(prompts, where)
    module = load_policy(ModelConfig(path=options.model), tokenizer, trainable=False).huggingface.to(options.device)
    engine = create_engine(
        options.engine,
        module=module,
        eos_token_ids=_end_tokens(module, tokenizer),
        tokenizer=tokenizer,
        max_num_seqs=options.max_num_seqs,
        max_model_len=max(map(len, ids)) + params.max_new_tokens,
    )
    requests = [Request(str(row), p, params, (0, row), tuple(range(options.n))) for row, p in enumerate(ids)]
    samples = len(requests) * options.n
    with _output(options.output) as output, progress_bar("samples", samples) as advance:
        for completion in engine.generate(requests):
            print(json.dumps(_line(completion, prompts, tokenizer), ensure_ascii=False), file=output, flush=True)
            advance(1)
    if options.output != "-":
        print(f"{options.output}: {samples} samples of {len(requests)} prompts")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quadriga generate",
        description="Continue every prompt of a file. Samples are written as they finish, with the log-prob of each token.",
    )
    defaults = SamplingParams()
    parser.add_argument("prompts", help=".txt (a prompt a line), .jsonl, .json or .parquet (strings or chats)")
    parser.add_argument("--model", required=True, help="Hugging Face name or folder, or builtin:arithmetic")
    parser.add_argument("--output", default="-", help="file for the samples, .jsonl (default: the terminal)")
    parser.add_argument("--prompt-key", default="prompt", help="column with the prompt (prompt)")
    parser.add_argument("--n", type=int, default=1, help="samples of each prompt (1)")
    parser.add_argument("--max-new-tokens", type=int, default=defaults.max_new_tokens, help="longest response (128)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy (1)")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this mass (1: all)")
    parser.add_argument("--top-k", type=int, default=-1, help="keep so many of the likeliest tokens (-1: all)")
    parser.add_argument("--min-p", type=float, default=0.0, help="keep tokens this likely relative to the best (0)")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: repeat less (1)")
    parser.add_argument("--stop", action="append", default=[], help="text that ends a response; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="go on to --max-new-tokens")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling (0)")
    parser.add_argument("--engine", default="native", help="generation engine (native)")
    parser.add_argument("--device", default="cpu", help="where to run (cpu)")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="samples decoded together (256)")
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


def _end_tokens(module: Any, tokenizer: Any) -> list[int]:
    """End tokens of the tokenizer and of the model's generation config."""
    ends = module.generation_config.eos_token_id if module.generation_config is not None else None
    return sorted({tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None})


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
def _output(path: str) -> Iterator[TextIO]:
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
