"""How long the data path takes: load, template and tokenise an RL dataset, draw batches, and the same for SFT.

    python bench/data.py --tokenizer FOLDER --questions gsm8k/train.jsonl [--rows 100000]

The rows are the questions of a GSM8K file, repeated with a running number in front so that no two are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from quadriga.data import BatchLoader, ResumableSampler, RLDataset, SFTDataset, collate_prompts
from quadriga.data.prep.converters import gsm8k
from quadriga.data.prep.sources import write_parquet


class Watch:
    """Seconds since it was made: on the clock, and of processor time over all threads (what a busy machine hides)."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def __str__(self) -> str:
        return f"{time.perf_counter() - self.wall:.1f} s ({time.process_time() - self.cpu:.1f} s CPU)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder of a Hugging Face tokenizer with a chat template")
    parser.add_argument("--questions", required=True, help="jsonl file with question and answer")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=1024)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    lines = Path(options.questions).read_text(encoding="utf-8").splitlines()
    examples = [json.loads(line) for line in lines]
    rows = []
    for index in range(options.rows):
        example = examples[index % len(examples)]
        rows.append(gsm8k(example | {"question": f"{index}. {example['question']}"}, "train", index))
    print(f"{options.rows} rows, {os.cpu_count()} cores")

    with tempfile.TemporaryDirectory() as folder:
        parquet, jsonl = Path(folder) / "train.parquet", Path(folder) / "train.jsonl"
        write_parquet(rows, parquet)
        jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        for path in (parquet, jsonl):
            watch = Watch()
            dataset = RLDataset(path, tokenizer, max_prompt_length=1024, filter_overlong_prompts=True)
            tokens = int(dataset.tokens.lengths.sum())
            print(f"RL, {path.suffix}: {watch}, {tokens:,} prompt tokens")
            check(dataset, tokenizer)
            draw(dataset, tokenizer, options.batch_size)
        watch = Watch()
        sft = SFTDataset(
            parquet,
            tokenizer,
            max_length=2048,
            prompt_key="extra_info",
            prompt_dict_keys=["question"],
            response_key="extra_info",
            response_dict_keys=["answer"],
        )
        print(f"SFT, .parquet: {watch}, {int(sft.masks.flat.sum()):,} target tokens")


def check(dataset: RLDataset, tokenizer: Any) -> None:
    """The ids of every 997th row are those of `apply_chat_template`."""
    for position in range(0, len(dataset), 997):
        item = dataset[position]
        ids = tokenizer.apply_chat_template(item["raw_prompt"], add_generation_prompt=True, return_dict=False)
        if item["input_ids"].tolist() != ids:
            raise SystemExit(f"row {position} is tokenised differently")


def draw(dataset: RLDataset, tokenizer: Any, batch_size: int) -> None:
    collate = partial(collate_prompts, pad_token_id=tokenizer.pad_token_id)
    loader = BatchLoader(dataset, ResumableSampler(len(dataset), batch_size, True, 0), batch_size, collate)
    loader.next_batch()
    began = time.perf_counter()
    for _ in range(5):
        loader.next_batch()
    print(f"  a batch of {batch_size} prompts: {(time.perf_counter() - began) / 5 * 1000:.0f} ms")


if __name__ == "__main__":
    main()
