"""Probe: import torch, say what it was built for, and use every device once."""

from __future__ import annotations

import json
from typing import Any

import torch


def built_for() -> str | None:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else None


def npu_module() -> Any:
    """`torch.npu`, which importing torch_npu adds; None where that package is absent or broken."""
    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError):
        return None
    return getattr(torch, "npu", None)


def try_device(kind: str, module: Any, index: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"device": f"{kind}:{index}", "name": "unknown", "error": None}
    try:
        facts["name"] = module.get_device_name(index)
        facts["free_bytes"], facts["total_bytes"] = module.mem_get_info(index)
        ones = torch.ones(64, 64, device=f"{kind}:{index}")
        if (ones @ ones)[0, 0].item() != 64:
            facts["error"] = "wrong result"
    except Exception as error:  # reported to the doctor, which decides
        facts["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return facts


def why_no_cuda() -> str | None:
    if torch.cuda.is_available() or not built_for():
        return None
    try:
        torch.cuda.init()
    except Exception as error:  # reported to the doctor, which decides
        return str(error).splitlines()[0]
    return None


def main() -> None:
    print(
        json.dumps({"version": torch.__version__, "built_for": built_for(), "threads": torch.get_num_threads()}),
        flush=True,
    )
    devices = [try_device("cuda", torch.cuda, index) for index in range(torch.cuda.device_count())]
    npu = npu_module()
    if npu is not None:
        devices += [try_device("npu", npu, index) for index in range(npu.device_count())]
    print(json.dumps({"devices": devices, "accelerator_error": why_no_cuda()}), flush=True)


if __name__ == "__main__":
    main()
