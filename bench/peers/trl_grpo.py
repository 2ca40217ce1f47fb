"""One GRPO step at a time with TRL, timed by phase, for bench/step_cpu.py. Needs a Python with TRL, not with Quadriga.

python bench/peers/trl_grpo.py FOLDER STEPS ROWS_PER_MICRO_BATCH → one JSON line
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset


def main() -> None:
    folder, steps, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    transformers.logging.set_verbosity_error()
    job = json.loads(Path(folder, "job.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{folder}/words")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    samples = job["prompts"] * job["samples"]
    questions = [json.loads(line)["prompt"] for line in Path(folder, "prompts.jsonl").read_text().splitlines()]
    config = trl.GRPOConfig(
        output_dir=f"{folder}/trl",
        use_cpu=True,
        bf16=False,
        learning_rate=1e-6,
        beta=0.0,
        num_generations=job["samples"],
        max_completion_length=job["new_tokens"],
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=samples // rows,
        generation_batch_size=samples,
        generation_kwargs={"min_new_tokens": job["new_tokens"]},  # no end token before the last
        gradient_checkpointing=False,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        shuffle_dataset=False,
    )

    def reward(completions: list[str], **_: object) -> list[float]:
        return [float(len(set(text))) for text in completions]

    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": q} for q in questions] * steps),
        processing_class=tokenizer,
    )
    generation, ends = [], []
    generate = trainer.model.generate

    def timed(*args: object, **kwargs: object) -> object:
        start = time.perf_counter()
        output = generate(*args, **kwargs)
        generation.append(time.perf_counter() - start)
        lengths.append(int(output.shape[1]))
        return output

    lengths: list[int] = []
    trainer.model.generate = timed

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.perf_counter())

    trainer.add_callback(Clock())
    start = time.perf_counter()
    trainer.train()
    whole = [end - begin for begin, end in zip([start, *ends], ends)]
    expected = job["prompt_tokens"] + job["new_tokens"]
    if len(generation) != steps or set(lengths) != {expected}:
        raise SystemExit(f"this is not the job: {len(generation)} generations, lengths {set(lengths)}, not {expected}")
    print(json.dumps({"version": trl.__version__, "gen": generation, "step": whole}))


if __name__ == "__main__":
    main()
