"""Probe: start a small local Ray and run one task on it."""

from __future__ import annotations

import json
import logging
import time

import ray

OBJECT_STORE_BYTES = 100 * 2**20


def main() -> None:
    started = time.monotonic()
    ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    answer = ray.get(ray.remote(lambda: 6 * 7).remote())
    print(json.dumps({"seconds": time.monotonic() - started}), flush=True)
    ray.shutdown()
    if answer != 42:
        raise SystemExit(f"the task answered {answer}")


if __name__ == "__main__":
    main()
