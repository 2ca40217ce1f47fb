"""DataProto to bytes and back, against raw memory copies of the same bytes.

    python bench/protocol.py [--mib 256] [--repeats 9]

The data is a rollout batch: token ids, masks, log-probs, values (int64, int32, bool, float32, bfloat16), numeric and
string arrays, and object columns (prompts as chat messages, reward and extra dicts, ragged lists of token ids).

The peer is ONE raw copy of the same bytes into memory that did not exist before, single-threaded: by numpy or by
bytes(), whichever is faster in this run (numpy asks the kernel for huge pages, which is mostly faster, but not while
memory is fragmented). The goal is to_bytes + from_bytes <= 2 x the peer. All jobs take turns within one process.
"""

from __future__ import annotations

import argparse
import gc
import io
import pickle
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


def timed_in_turn(jobs: dict[str, Callable[[], object]], repeats: int) -> dict[str, np.ndarray]:
    """Seconds of each job and round; the jobs take turns, so that a slow moment of the machine meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats + 1):
        for name, job in jobs.items():
            gc.collect()
            start = time.perf_counter()
            result = job()
            times[name].append(time.perf_counter() - start)
            del result
    return {name: np.array(values[1:]) for name, values in times.items()}  # the first round warms up


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
    read_only = [memoryview(bytes(buffer.raw())) for buffer in out_of_band]  # as Ray's object store gives them
    writable = [bytearray(buffer.raw()) for buffer in out_of_band]
    pickled, torch_saved = pickle.dumps(plain, protocol=5), torch_save(data)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        file = Path(folder) / "batch.dp"
        data.save_to_disk(file)
        seconds = timed_in_turn(
            {
                "raw copy by numpy": raw.copy,
                "raw copy by bytes()": lambda: bytes(packed),
                "to_bytes": data.to_bytes,
                "from_bytes": lambda: DataProto.from_bytes(packed),
                "save_to_disk (memory file system)": lambda: data.save_to_disk(file),
                "load_from_disk (memory file system)": lambda: DataProto.load_from_disk(file),
                "Ray: pickle 5, buffers out of band": lambda: pickle.dumps(
                    data, protocol=5, buffer_callback=lambda _: None
                ),
                "Ray: receive, copied (what we do)": lambda: pickle.loads(frame, buffers=read_only),
                "Ray: receive as views (unsafe)": lambda: pickle.loads(frame, buffers=writable),
                "pickle.dumps of plain dicts": lambda: pickle.dumps(plain, protocol=5),
                "pickle.loads": lambda: pickle.loads(pickled),
                "torch.save to memory": lambda: torch_save(data),
                "torch.load": lambda: torch.load(io.BytesIO(torch_saved), weights_only=False),
            },
            args.repeats,
        )

    seconds["to_bytes + from_bytes"] = seconds["to_bytes"] + seconds["from_bytes"]
    seconds["pickle.dumps + loads"] = seconds["pickle.dumps of plain dicts"] + seconds["pickle.loads"]
    seconds["torch.save + load"] = seconds["torch.save to memory"] + seconds["torch.load"]
    medians = {name: float(np.median(times)) for name, times in seconds.items()}
    peer = min(medians["raw copy by numpy"], medians["raw copy by bytes()"])
    print(f"{raw.size / 2**20:.0f} MiB, {len(data)} rows, {torch.get_num_threads()} threads, medians of {args.repeats}")
    print(f"{'':38}{'ms':>8}{'GB/s':>7}{'x peer':>8}")
    for name, median in medians.items():
        print(f"{name:38}{median * 1e3:8.1f}{raw.size / 1e9 / median:7.1f}{median / peer:8.2f}")
    ratio = medians["to_bytes + from_bytes"] / peer
    print(f"goal: to_bytes + from_bytes <= 2 x one raw copy: {ratio:.2f} ({'met' if ratio <= 2 else 'MISSED'})")


if __name__ == "__main__":
    main()
