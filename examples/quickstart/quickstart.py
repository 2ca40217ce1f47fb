"""The quickstart from Python: compose a configuration, change it, run it.

python examples/quickstart/quickstart.py [key=value …]
"""

from __future__ import annotations

import sys

from quadriga.config.load import compose
from quadriga.trainer.main_ppo import run_ppo


def main(overrides: list[str]) -> None:
    config = compose(overrides, config_name="quickstart")
    config.trainer.project_name = "from_python"
    run_ppo(config)


if __name__ == "__main__":
    main(sys.argv[1:])
