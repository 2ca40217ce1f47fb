"""What every worker of a run will import, imported ahead of it while the driver still reads the data."""

from __future__ import annotations

import os


def warm_up() -> None:
    """Load the libraries, and touch the device."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401  (loaded when first named)

    import quadriga.engine
    import quadriga.models.load
    import quadriga.rollout.registry
    import quadriga.workers.actor_rollout_ref

    if os.environ.get("QUADRIGA_DEVICE") == "cuda":
        import quadriga.rollout.native.cuda.runner  # noqa: F401

        torch.zeros(1, device="cuda")
