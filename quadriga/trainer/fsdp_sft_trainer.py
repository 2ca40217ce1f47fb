"""Entry point of supervised fine-tuning: `torchrun --nproc_per_node=N -m quadriga.trainer.fsdp_sft_trainer key=value …`.

Without torchrun (`python -m …`, `quadriga sft`) it is one process. `quadriga.trainer.sft_trainer` is the same module by the name
that newer scripts use.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import hydra

from quadriga.errors import run_command
from quadriga.trainer.supervised.entry import run_arguments, run_supervised


def run_sft(config: Any) -> dict[str, float]:
    """Run a whole supervised job in this process, one of torchrun's or the only one; returns the last step's metrics."""
    return run_supervised(config, "sft")


@hydra.main(config_path="config", config_name="sft_trainer", version_base=None)
def main(config: Any) -> None:
    """A Hydra application: the configuration is composed from `sys.argv`."""
    run_sft(config)


def command(arguments: list[str]) -> int:
    """A command line: exit code 0, or 1 after printing what went wrong (with the stack under `--debug`)."""
    return run_command(partial(run_arguments, "sft"), arguments)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
