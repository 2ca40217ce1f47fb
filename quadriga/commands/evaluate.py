"""The command `quadriga eval DATA --model MODEL`: answers to a dataset's prompts, scored."""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quadriga.commands.generate import open_output
from quadriga.commands.generation_flags import add_generation_flags, open_engine, sampling_params
from quadriga.errors import ConfigError, DataError
from quadriga.rollout.interface import Completion, Request

if TYPE_CHECKING:
    from quadriga.commands.evaluation_figures import EvaluationRecord

NO_LIMIT = 1 << 30


def main(argv: Sequence[str]) -> int:
    """Runs the command; raises one of Quadriga's errors where it cannot."""
    options = command_parser().parse_args(argv)
    if options.n < 1:
        raise ConfigError(f"--n {options.n} leaves nothing to score", "ask for at least 1 sample")
    params = sampling_params(options)

    from quadriga.checkpoint.huggingface import model_path
    from quadriga.commands.evaluation_figures import figures_of, print_table
    from quadriga.data import RLDataset
    from quadriga.data.files import progress_bar
    from quadriga.models.load import load_tokenizer
    from quadriga.rewards import RewardPool

    path = model_path(options.model)
    tokenizer = load_tokenizer(path)
    function, source = _scorer(options.scorer)
    dataset = RLDataset(
        options.data,
        tokenizer,
        max_prompt_length=NO_LIMIT,
        prompt_key=options.prompt_key,
        max_samples=options.max_samples,
        default_source="custom" if function else source,
        chat_template=options.chat_template,
    )
    rows = [dataset[position] for position in range(len(dataset))]
    _check_rows(rows, dataset, function is None, source, not options.no_isolation)
    requests = [
        Request(str(at), row["input_ids"].tolist(), params, (0, row["index"]), tuple(range(options.n)))
        for at, row in enumerate(rows)
    ]
    total = len(requests) * options.n
    samples = []
    with (
        open_output(options.output) as output,
        _recorded(options, total) as record,
        RewardPool(
            function,
            num_workers=options.num_workers,
            timeout_s=options.timeout_s,
            require_isolation=not options.no_isolation,
        ) as pool,
    ):
        pool.check_row(rows[0])
        longest = max(len(r.prompt_ids) for r in requests)
        engine = open_engine(options, path, tokenizer, longest + options.max_new_tokens)
        with progress_bar("samples", total) as advance:
            for line in _scored(engine.generate(requests), rows, tokenizer, pool, source):
                samples.append(line)
                if options.output != "-":
                    print(json.dumps(line, ensure_ascii=False), file=output, flush=True)
                if record is not None:
                    record.add(line)
                advance(1)
        figures = figures_of(samples, options.n)
        if record is not None:
            record.conclude(figures)
    if options.json:
        print(json.dumps([figure.as_dict() for figure in figures], indent=1))
    else:
        print(f"{options.model} on {options.data}: {len(rows)} prompts, {options.n} each")
        print_table(figures)
        if options.output != "-":
            print(f"{options.output}: {len(samples)} samples")
    return 0


@contextmanager
def _recorded(options: argparse.Namespace, total: int) -> Iterator[EvaluationRecord | None]:
    """The run directory that the evaluation writes as it goes on, if one is asked for."""
    if not options.run_dir:
        yield None
        return
    from quadriga.commands.evaluation_figures import EvaluationRecord

    with EvaluationRecord(Path(options.run_dir), vars(options), total) as record:
        yield record


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quadriga eval",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Let a model answer a dataset's prompts and score the answers.",
        epilog="""examples:
  quadriga eval builtin:arithmetic/test --model builtin:arithmetic
  quadriga eval ~/data/gsm8k/test.parquet --model outputs/quadriga/gsm8k --max-new-tokens 512
  quadriga eval test.jsonl --model my_model --scorer my_reward.py:score --n 8 --temperature 1 --output samples.jsonl

figures, each a mean over prompts:
  acc/mean@n   right answers among the n samples of a prompt
  acc/best@n   prompts with at least one right answer among n (pass@n)
  acc/maj@n    prompts whose most frequent answer is right
  score/…      the same of the score
  unparsed, errors, cut off: samples without an answer, whose scoring failed, that reached --max-new-tokens
The interval is where the figure would lie for other prompts of the same kind, 95 times in 100. The last digits of two
models differ by chance: look at the intervals first.

exit code: 0 done, 1 an error that is named, 2 wrong usage, 130 interrupted.""",
    )
    parser.add_argument(
        "data", help=".parquet, .jsonl or .json in the format of docs/data.md, or builtin:arithmetic/test"
    )
    parser.add_argument("--output", default="-", help="file for the samples, .jsonl (default: none is written)")
    parser.add_argument(
        "--run-dir",
        help="folder for samples and figures, which `quadriga dash` shows while they are made (default: none)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of a table")
    parser.add_argument("--prompt-key", default="prompt", help="column with the prompt (prompt)")
    parser.add_argument("--max-samples", type=int, default=-1, help="use only the first so many rows (-1: all)")
    add_generation_flags(parser, temperature=0.0)
    scoring = parser.add_argument_group("scoring")
    scoring.add_argument(
        "--scorer",
        help="a built-in scorer or data source (gsm8k, math, exact, …), file.py:function or pkg.mod:function "
        "(default: by each row's data_source)",
    )
    scoring.add_argument("--num-workers", type=int, default=2, help="scoring processes (2)")
    scoring.add_argument(
        "--timeout-s", type=float, default=30.0, help="a sample's scoring is killed after so long (30)"
    )
    scoring.add_argument(
        "--no-isolation", action="store_true", help="run programs the model writes though they cannot be shut in here"
    )
    return parser


def _scorer(name: str | None) -> tuple[Any, str | None]:
    """The user's reward function, or the data source that every row is scored as; neither: each row's own."""
    from quadriga.rewards import known_sources, reward_function

    if name is None:
        return None, None
    if ":" in name or name.endswith(".py"):
        return reward_function(name), None
    if name.lower() not in known_sources():
        raise ConfigError(
            f"--scorer {name}: there is no such scorer", f"use file.py:function, or one of {', '.join(known_sources())}"
        )
    return None, name


def _check_rows(
    rows: Sequence[dict[str, Any]], dataset: Any, built_in: bool, source: str | None, require_isolation: bool
) -> None:
    """What scoring will need is there: before a model is loaded."""
    if not built_in:
        return
    from quadriga.rewards.scorers import check_machine

    missing = [row["index"] for row in rows if row["reward_model"].get("ground_truth") is None]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(rows)} rows have no reward_model.ground_truth, so their answers cannot be judged: "
            + "; ".join(dataset.rows.where(index) for index in missing[:5]),
            "give every row a reward_model.ground_truth, or judge without one by --scorer file.py:function",
        )
    known = {str(source or row["data_source"]) for row in rows}
    check_machine(sorted(known), {"code": {"require_isolation": require_isolation}})


def _scored(
    completions: Iterator[Completion], rows: Sequence[dict[str, Any]], tokenizer: Any, pool: Any, source: str | None
) -> Iterator[dict[str, Any]]:
    """Every sample with its score. Samples are scored while others are being generated; those done come out in order."""
    from quadriga.rewards import RewardSample
    from quadriga.rewards.functions import with_columns

    waiting: deque[tuple[dict[str, Any], Future[Any]]] = deque()
    handles = []
    for completion in completions:
        row = rows[int(completion.request_id)]
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        truth = row["reward_model"].get("ground_truth", row.get("ground_truth"))
        extra = row["extra_info"] if pool.function.is_default else with_columns(row, row["extra_info"])
        sample = RewardSample(source or row["data_source"], text, truth, dict(extra))
        (handle,) = pool.submit([sample])
        handles.append(handle)
        line = {
            "row": row["index"],
            "sample": completion.sample_index,
            "data_source": row["data_source"],
            "prompt": row["raw_prompt"],
            "response": text,
            "ground_truth": truth,
            "finish_reason": completion.finish_reason,
            "response_tokens": len(completion.token_ids),
        }
        waiting.append((line, handle))
        while waiting and waiting[0][1].done():
            yield _with_result(*waiting.popleft())
    while waiting:
        yield _with_result(*waiting.popleft())
    pool.collect(handles)  # too many failures are an error


def _with_result(line: dict[str, Any], handle: Future[Any]) -> dict[str, Any]:
    result = handle.result()
    result_fields = {
        "score": result.score,
        "acc": 0.0 if result.failed else result.acc,
        "pred": result.pred,
        "outcome": result.outcome,
        "extra": result.extra,
    }
    return {**line, **result_fields, **({"error": result.error} if result.error else {})}
