"""All H200 benchmarks in one go: rollout, update, and whole steps through `run_ppo` on Ray.

    python bench/h200/all.py --tokenizer FOLDER --data FOLDER --json FILE [--only rollout update step] [--case grpo]

Prints a short table with the bars, and writes every figure with date, versions and commit as JSON. See `step.py` for the two
folders. About eight minutes; each part is a program of its own that can be run alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
PARTS = ("rollout", "update", "step")


def run_part(part: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, str(HERE / f"{part}.py"), "--json", str(folder / f"{part}.json")]
    if part == "update":
        command += ["--budget", "65536"]
    if part == "step":
        command += ["--tokenizer", options.tokenizer, "--data", options.data, "--work", str(folder)]
        command += ["--case", *options.case] if options.case else []
    subprocess.run(command, check=True)
    return json.loads((folder / f"{part}.json").read_text())


def rows_of(results: dict[str, list[dict[str, Any]]]) -> list[tuple[str, float, str, bool | None]]:
    """`(what, figure, bar, whether it is met)`; no bar: reported only."""
    rows: list[tuple[str, float, str, bool | None]] = []
    for r in results.get("rollout", []):
        bar = 100_000 if r["case"] == "1024 sequences" else None
        speed = r["tokens_per_s"]
        rows.append(
            (f"rollout, {r['case']}: tokens/s", speed, f"≥ {bar}" if bar else "", speed >= bar if bar else None)
        )
    for r in results.get("update", []):
        rows.append(("update: tokens/s", r["tokens_per_s"], "≥ 130000", r["tokens_per_s"] >= 130_000))
        rows.append(("update: share of 989 TFLOP/s", r["mfu"], "≥ 0.4", r["mfu"] >= 0.4))
    for r in results.get("step", []):
        is_job = r["case"] == "grpo"
        bars = {
            "step: s": (r["seconds"]["step"], 15.0),
            "first step done: s": (r["first_step_done_s"], 60.0),
            "weights: s": (r["seconds"]["update_weights"], 0.2),
        }
        for name, (figure, bar) in bars.items():
            met = figure <= bar if is_job else None
            rows.append((f"{r['case']}, {name}", figure, f"≤ {bar:g}" if is_job else "", met))
        rows.append((f"{r['case']}, peak: GiB", r["peak_gib"], "", None))
    return rows


def circumstances() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers", "ray")}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "python": sys.version.split()[0],
        "commit": commit.stdout.strip() or "unknown",
    } | versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--json", required=True)
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--case", nargs="*", help="whole steps of these cases only; see step.py")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here: run this on a GPU machine")
    with tempfile.TemporaryDirectory() as folder:
        results = {part: run_part(part, options, Path(folder)) for part in options.only}
    Path(options.json).write_text(json.dumps(circumstances() | results, indent=2))
    for what, figure, bar, met in rows_of(results):
        verdict = "" if met is None else "met" if met else "MISSED"
        print(f"{what:48} {figure:>12,.3f} {bar:>10} {verdict}")


if __name__ == "__main__":
    main()
