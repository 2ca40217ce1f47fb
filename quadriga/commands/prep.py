"""The command `quadriga prep NAME --output FOLDER`: writes train.parquet and test.parquet."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from quadriga.data.files import Row, expand_path, progress_bar
from quadriga.data.prep.arithmetic import STYLES, generate_arithmetic
from quadriga.data.prep.converters import CONVERTERS, Converter
from quadriga.data.prep.reasoning_gym import INSTRUCTION, generate_reasoning_gym, task_names
from quadriga.data.prep.sources import read_splits, write_parquet
from quadriga.errors import DataError


def main(argv: Sequence[str]) -> int:
    """Runs the command; raises DataError where it cannot."""
    options = command_parser().parse_args(argv)
    splits = _GENERATED.get(options.dataset, _public)(options)
    folder = expand_path(options.output)
    for split, rows in splits.items():
        write_parquet(rows, folder / f"{split}.parquet")
        print(f"{folder / split}.parquet: {len(rows)} rows")
    return 0


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quadriga prep",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write train.parquet and test.parquet of a dataset.",
        epilog="""examples:
  quadriga prep gsm8k --input gsm8k/ --output ~/data/gsm8k     a folder with train.* and test.* files
  quadriga prep arithmetic --output ~/data/sums --digits 2     generated: needs no input
  quadriga prep reasoning_gym --task chain_sum,gcd --output ~/data/gym
`quadriga prep DATASET --help` lists the flags of one.""",
    )
    datasets = parser.add_subparsers(dest="dataset", required=True, metavar="DATASET")
    for name, converter in CONVERTERS.items():
        public = datasets.add_parser(name, help=converter.about)
        public.add_argument(
            "--input",
            default=converter.hub_name,
            required=converter.hub_name is None,
            help="file, folder with train and test files, or hub name"
            + (f" (default: {converter.hub_name})" if converter.hub_name else ""),
        )
        public.add_argument("--test-size", type=int, help="rows to hold out of a single file (default: a tenth)")
        _common(public)
    own = datasets.add_parser("arithmetic", help="generated sums; needs no input")
    own.add_argument("--operands", type=int, default=2, help="numbers in a problem (2)")
    size = own.add_mutually_exclusive_group()
    size.add_argument("--digits", type=int, help="digits of the largest operand (2)")
    size.add_argument("--max-value", type=int, help="largest operand (99)")
    own.add_argument("--ops", default="+-", help="operators to draw from, of + - * (+-)")
    own.add_argument("--train-size", type=int, default=4096, help="training rows (4096)")
    own.add_argument("--test-size", type=int, default=512, help="test rows (512)")
    own.add_argument(
        "--style", choices=STYLES, default="plain", help='prompt "12+7=" as plain text, or as a chat (plain)'
    )
    _common(own)
    gym = datasets.add_parser("reasoning_gym", help="generated problems of many kinds, with verifiers; needs no input")
    gym.add_argument("--task", required=True, help="names with commas between them, or `all`")
    gym.add_argument("--train-size", type=int, default=4096, help="training rows of all tasks together (4096)")
    gym.add_argument("--test-size", type=int, default=512, help="test rows of all tasks together (512)")
    gym.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TASK.FIELD=VALUE",
        help="a field of a task's configuration in reasoning-gym, the value as JSON; may be given often",
    )
    gym.add_argument("--instruction", help="what follows every question (asks for <answer>…</answer>); '' for nothing")
    _common(gym)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything drawn (0)")


def _arithmetic(options: argparse.Namespace) -> dict[str, list[Row]]:
    if options.digits is not None and options.digits < 1:
        raise DataError(f"--digits {options.digits} makes no dataset", "use at least 1")
    max_value = 10 ** (options.digits or 2) - 1 if options.max_value is None else options.max_value
    train, test = generate_arithmetic(
        operands=options.operands,
        max_value=max_value,
        ops=options.ops,
        train_size=options.train_size,
        test_size=options.test_size,
        seed=options.seed,
        style=options.style,
    )
    return {"train": train, "test": test}


def _reasoning_gym(options: argparse.Namespace) -> dict[str, list[Row]]:
    named = [name.strip() for name in options.task.split(",")]
    train, test = generate_reasoning_gym(
        task_names() if named == ["all"] else named,
        train_size=options.train_size,
        test_size=options.test_size,
        seed=options.seed,
        configs=_configs(options.set),
        instruction=INSTRUCTION if options.instruction is None else options.instruction,
    )
    return {"train": train, "test": test}


def _configs(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    configs: dict[str, dict[str, Any]] = {}
    for setting in settings:
        place, equals, text = setting.partition("=")
        task, dot, name = place.partition(".")
        if not (equals and dot and task and name):
            raise DataError(f"--set {setting!r} is not TASK.FIELD=VALUE", "write such as chain_sum.max_terms=3")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        configs.setdefault(task, {})[name] = value
    return configs


def _public(options: argparse.Namespace) -> dict[str, list[Row]]:
    converter = CONVERTERS[options.dataset]
    hub_config = converter.hub_config if options.input == converter.hub_name else None
    splits = read_splits(options.input, hub_config=hub_config, test_size=options.test_size, seed=options.seed)
    return {split: _convert(converter, examples, split, options.input) for split, examples in splits.items()}


def _convert(converter: Converter, examples: Sequence[Row], split: str, source: str) -> list[Row]:
    rows = []
    with progress_bar(f"{split} rows", len(examples)) as advance:
        for index, example in enumerate(examples):
            try:
                rows.append(converter.convert(example, split, index))
            except DataError as error:
                raise DataError(f"{source}, {split} row {index}: {error.what}", error.fix) from error
            advance(1)
    return rows


_GENERATED = {"arithmetic": _arithmetic, "reasoning_gym": _reasoning_gym}
