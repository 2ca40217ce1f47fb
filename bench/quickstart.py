"""The quickstart over several seeds: held-out accuracy before and after, and the seconds until the first step and in all.

python bench/quickstart.py [--seeds 5] [key=value …]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run(seed: int, changes: list[str]) -> tuple[float, float, float, float]:
    """Accuracy before and after, seconds until the first step had begun, and seconds of the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"data.seed={seed}",
            f"actor_rollout_ref.rollout.seed={seed}",
            f"trainer.default_local_dir={folder}",
            *changes,
        ]
        command = [sys.executable, "-m", "quadriga.cli", "train", "--config-name=quickstart", *overrides]
        began = time.time()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        whole = time.time() - began
        metrics = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    held_out = [v for m in metrics for k, v in m.items() if k.startswith("val/") and k.endswith("/acc/mean@1")]
    first = next(m for m in metrics if m["step"] == 1)
    return held_out[0], held_out[-1], first["time"] - first["timing_s/step"] - began, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "changes", nargs="*", help="keys of every run, e.g. actor_rollout_ref.actor.optim.name=adamw_8bit"
    )
    options = parser.parse_args()
    for seed in range(options.seeds):
        before, after, start, whole = run(seed, options.changes)
        print(
            f"seed {seed}: {before:.1%} → {after:.1%} · first step after {start:.1f} s · {whole:.1f} s in all",
            flush=True,
        )


if __name__ == "__main__":
    main()
