"""`torchrun --nproc_per_node=N -m quadriga.trainer.supervised sft|rm|dpo key=value …`"""

from __future__ import annotations

import sys
from functools import partial

from quadriga.config.supervised_schema import SCHEMAS
from quadriga.errors import run_command
from quadriga.trainer.supervised.entry import run_arguments

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in SCHEMAS:
        sys.exit(f"usage: torchrun -m quadriga.trainer.supervised {'|'.join(SCHEMAS)} key=value …")
    sys.exit(run_command(partial(run_arguments, sys.argv[1]), sys.argv[2:]))
