"""`quadriga.trainer.fsdp_sft_trainer` by the name that newer scripts use: `torchrun … -m quadriga.trainer.sft_trainer key=value …`."""

from __future__ import annotations

import sys

from quadriga.trainer.fsdp_sft_trainer import command, main, run_sft

__all__ = ["command", "main", "run_sft"]

if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
