"""How fast the dashboard's first view is with many runs, and what memory it takes.

    python bench/dash.py --runs 1000 --steps 1000

Writes run directories as runs write them (60 metrics a step, samples, a status), starts `quadriga dash` as a user would, and
measures from outside: time to the address, time to the first answer (nothing read before), resident memory then and after
twenty runs were overlaid; with --browser, the time until Chromium shows the table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

NAMES = [
    *(f"critic/{k}/{s}" for k in ("score", "rewards", "advantages", "returns") for s in ("mean", "max", "min")),
    *(
        f"reward/{k}"
        for k in ("correct", "wrong", "unparsed", "errors", "timeouts", "score", "seconds_mean", "seconds_max")
    ),
    *(f"actor/{k}" for k in ("loss", "grad_norm", "lr", "skipped", "pg_loss", "pg_clipfrac", "ppo_kl", "entropy")),
    *(f"timing_s/{k}" for k in ("gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights", "step")),
    *(
        f"memory/host_gb/{k}"
        for k in ("driver", "generate_sequences", "update_actor", "update_weights", "compute_log_prob")
    ),
    *(f"{k}_length/{s}" for k in ("response", "prompt") for s in ("mean", "max", "min", "clip_ratio")),
    *(f"perf/{k}" for k in ("throughput", "total_num_tokens", "time_per_step", "max_memory_gb")),
    *(f"training/{k}" for k in ("global_step", "epoch", "restarts")),
]


def write_runs(root: Path, runs: int, steps: int) -> int:
    """So many run directories; returns the bytes of their metrics."""
    draw = random.Random(0)
    lines = []
    for step in range(1, steps + 1):
        values = {name: round(draw.random(), 16) for name in NAMES}
        lines.append(json.dumps({"step": step, "time": 1.7e9 + step, **values}) + "\n")
    text, total = "".join(lines), 0
    for k in range(runs):
        folder = root / f"project{k % 20}" / f"run{k}"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(text)
        changed = {"actor_rollout_ref.actor.optim.lr": draw.random(), "data.train_batch_size": draw.randrange(1024)}
        status = {
            "kind": "train",
            "state": "finished",
            "step": steps,
            "total_steps": steps,
            "changed": changed,
            "updated": 1.7e9 + k,
        }
        (folder / "status.json").write_text(json.dumps(status))
        total += len(text)
    return total


def resident_mb(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def cpu_s(pid: int) -> float:
    """Processor time of the process so far: what a busy machine does not hide."""
    parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def ask(address: str, path: str) -> tuple[Any, float]:
    began = time.perf_counter()
    with urllib.request.urlopen(address + path, timeout=120) as answer:
        body = json.loads(answer.read())
    return body, time.perf_counter() - began


def time_in_browser(address: str) -> float:
    """Until Chromium shows the first row of the table; the browser itself is up before."""
    import shutil

    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("headless=new", "no-sandbox", "disable-gpu"):
        options.add_argument(f"--{flag}")
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver") or ""))
    try:
        browser.get("about:blank")
        began = time.perf_counter()
        browser.get(address)
        while not browser.find_elements("css selector", "a.name"):
            time.sleep(0.01)
        return time.perf_counter() - began
    finally:
        browser.quit()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--browser", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        size = write_runs(root, options.runs, options.steps)
        print(f"{options.runs} runs x {options.steps} steps x {len(NAMES)} metrics: {size / 2**30:.2f} GiB of metrics")
        began = time.perf_counter()
        command = [sys.executable, "-m", "quadriga", "dash", folder, "--no-browser", "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found is not None
            address = found[0]
            print(f"start of the command to its address   {time.perf_counter() - began:.2f} s")
            before = cpu_s(server.pid)
            if options.browser:
                seconds = time_in_browser(address)
                table, _ = ask(address, "api/runs?limit=100")
                view = "first view in Chromium"
            else:
                table, seconds = ask(address, "api/runs?limit=100")
                view = "first table"
            cpu = cpu_s(server.pid) - before
            print(f"{view}, nothing read before   {seconds:.2f} s ({cpu:.2f} s of processor time in the server)")
            assert table["total"] == options.runs
            print(f"memory after it   {resident_mb(server.pid):.0f} MB")
            time.sleep(1.5)
            print(f"the table again   {ask(address, 'api/runs?limit=100')[1]:.2f} s")
            began = time.perf_counter()
            for row in table["rows"][:20]:
                ask(address, f"api/series?run={row['id']}&metric=critic/score/mean&metric=actor/entropy")
            print(f"curves of 20 runs   {time.perf_counter() - began:.2f} s")
            for row in table["rows"]:
                ask(address, f"api/metrics?run={row['id']}")
            print(f"memory after the metrics of 100 runs   {resident_mb(server.pid):.0f} MB")
        finally:
            server.terminate()
            server.wait(20)


if __name__ == "__main__":
    main()
