"""DataProto to bytes and back, against raw memory copies of the same bytes.

    python bench/protocol.py [--mib 256] [--repeats 9]

The data is a rollout batch: token ids, masks, log-probs, values (int64, int32, bool, float32, bfloat16), numeric and
string arrays, and object columns (prompts as chat messages, reward and extra dicts, ragged lists of token ids).

The peer is the fastest single-threaded raw copy we know: one numpy memcpy of the same number of bytes into memory that
did not exist before, as for a serialiser that must produce new bytes. The goal is (to_bytes + from_bytes) <= 2 x ONE such
copy. `bytes(view)`, the plain Python copy, is shown too; it is slower because the kernel gives it small pages.
Every figure is the median of the repeats; all of them are taken in turn within one process.
"""

from __future__ import annotations

import argparse
import gc
import io
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from quadriga.protocol import DataProto


def rollout_batch(mib: int, rows: int = 1024) -> DataProto:
    """About `mib` MiB in `rows` rows."""
    length = mib * 2**20 // rows // 46  # 46 bytes a position: the sum of the dtypes below
    generator = torch.Generator().manual_seed(0)
    random = np.random.default_rng(0)
    tokens = torch.randint(0, 150_000, (rows, length), generator=generator)
    reals = torch.randn(rows, length, generator=generator)
    words = [f"word{i}" for i in range(997)]
    texts = [" ".join(random.choice(words, 60).tolist()) for _ in range(rows)]
    return DataProto.from_dict(
        tensors={
            "input_ids": tokens,
            "responses": tokens.flip(0),
            "position_ids": torch.arange(length).expand(rows, length).contiguous(),
            "segment_ids": tokens.int(),
            "attention_mask": tokens > 10,
            "response_mask": tokens > 100,
            "old_log_probs": reals,
            "advantages": reals.flip(0),
            "returns": reals.flip(1),
            "values": reals.bfloat16(),
            "ref_log_prob": reals.bfloat16(),
        },
        non_tensors={
            "index": np.arange(rows),
            "score": random.random(rows),
            "data_source": np.array(["openai/gsm8k"] * rows),
            "uid": [f"{i:032x}" for i in range(rows)],
            "raw_prompt": [[{"role": "user", "content": text}] for text in texts],
            "reward_model": [{"style": "rule", "ground_truth": str(i)} for i in range(rows)],
            "extra_info": [{"split": "train", "index": i, "answer": text} for i, text in enumerate(texts)],
            "raw_prompt_ids": [random.integers(0, 150_000, 50 + i % 100).tolist() for i in range(rows)],
        },
        meta_info={"step": 3, "temperature": 1.0, "metrics": {"loss": [0.1, 0.2]}},
    )


def medians(jobs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each job, the jobs taken in turn so that a slow moment of the machine meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats + 1):
        for name, job in jobs.items():
            gc.collect()
            start = time.perf_counter()
            result = job()
            times[name].append(time.perf_counter() - start)
            del result
    return {name: statistics.median(values[1:]) for name, values in times.items()}  # the first round warms up


def torch_save(data: DataProto) -> bytes:
    file = io.BytesIO()
    torch.save((dict(data.batch.items()), data.non_tensor_batch, data.meta_info), file)
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()

    data = rollout_batch(args.mib)
    packed = data.to_bytes()
    raw = np.frombuffer(packed, dtype=np.uint8)
    plain = (dict(data.batch.items()), data.non_tensor_batch, data.meta_info)
    if DataProto.from_bytes(packed) != data:
        raise SystemExit("the round trip changed the data")

    out_of_band: list[pickle.PickleBuffer] = []
    frame = pickle.dumps(data, protocol=5, buffer_callback=out_of_band.append)
    received = [memoryview(bytes(buffer.raw())) for buffer in out_of_band]  # read-only, as Ray's object store gives it
    pickled, torch_saved = pickle.dumps(plain, protocol=5), torch_save(data)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        file = Path(folder) / "batch.dp"
        data.save_to_disk(file)
        seconds = medians(
            {
                "numpy copy": raw.copy,
                "bytes copy": lambda: bytes(packed),
                "to_bytes": data.to_bytes,
                "from_bytes": lambda: DataProto.from_bytes(packed),
                "save_to_disk": lambda: data.save_to_disk(file),
                "load_from_disk": lambda: DataProto.load_from_disk(file),
                "ray pickle": lambda: pickle.dumps(data, protocol=5, buffer_callback=lambda _: None),
                "ray unpickle": lambda: pickle.loads(frame, buffers=received),
                "pickle.dumps": lambda: pickle.dumps(plain, protocol=5),
                "pickle.loads": lambda: pickle.loads(pickled),
                "torch.save": lambda: torch_save(data),
                "torch.load": lambda: torch.load(io.BytesIO(torch_saved), weights_only=False),
            },
            args.repeats,
        )

    size = raw.size / 2**20
    copy = seconds["numpy copy"]
    print(f"{size:.0f} MiB in {len(data)} rows, torch threads {torch.get_num_threads()}, median of {args.repeats}")
    print(f"{'':34}{'ms':>8}{'x one numpy copy':>18}")
    for name, parts in {
        "one copy by numpy (the peer)": ["numpy copy"],
        "one copy by bytes()": ["bytes copy"],
        "to_bytes": ["to_bytes"],
        "from_bytes": ["from_bytes"],
        "to_bytes + from_bytes": ["to_bytes", "from_bytes"],
        "save + load, /dev/shm": ["save_to_disk", "load_from_disk"],
        "Ray: pickle 5 + receive": ["ray pickle", "ray unpickle"],
        "pickle.dumps + loads": ["pickle.dumps", "pickle.loads"],
        "torch.save + load": ["torch.save", "torch.load"],
    }.items():
        total = sum(seconds[part] for part in parts)
        print(f"{name:34}{total * 1e3:8.1f}{total / copy:18.2f}")
    ratio = (seconds["to_bytes"] + seconds["from_bytes"]) / copy
    print(f"goal: to_bytes + from_bytes <= 2 x one numpy copy: {ratio:.2f} ({'met' if ratio <= 2 else 'MISSED'})")


if __name__ == "__main__":
    main()
