"""No module outside the kernels names one accelerator, so another one gets the same treatment."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "quadriga"
KERNELS = ("models/kernels", "rollout/native/cuda", "commands/doctor", "workers/profiling.py")
"""Rooms that are about one kind of device, or report on it."""

FOREIGN = """
import types, torch, torch.distributed as dist
torch.utils.rename_privateuse1_backend("npu")
drawn = []
module = types.ModuleType("torch.npu")
module.get_rng_state = lambda device: torch.tensor([7], dtype=torch.uint8)
module.set_rng_state = lambda state, device: drawn.append((int(state), str(device)))
module.mem_get_info = lambda device: (123, 456)
module.empty_cache = lambda: drawn.append("emptied")
module.is_initialized = lambda: True
module.is_available = lambda: True
module.current_device = lambda: 0
torch._register_device_module("npu", module)
dist.Backend.register_backend("hccl", lambda *args: None, devices=["npu"])

from quadriga import accelerator
device = torch.device("npu:0")
assert accelerator.collectives("npu") == "cpu:gloo,npu:hccl"
state = accelerator.random_state(device)
assert set(state) == {"cpu", "npu"} and int(state["npu"]) == 7
accelerator.restore_random_state(state, device)
assert drawn == [(7, "npu:0")]
assert accelerator.free_memory(device) == 123
print("as well as any")
"""


def test_an_accelerator_that_brings_its_own_package_is_asked_like_any_other():
    done = subprocess.run([sys.executable, "-c", FOREIGN], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "as well as any", done.stderr


def test_only_the_kernels_name_a_kind_of_accelerator():
    """`torch.cuda` and the names of its collectives: `quadriga.accelerator` asks for whichever is there."""
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        where = str(file.relative_to(PACKAGE))
        if where.startswith(KERNELS):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names_cuda = isinstance(node, ast.Attribute) and node.attr == "cuda" and _is_torch(node.value)
            names_nccl = isinstance(node, ast.Constant) and isinstance(node.value, str) and ":nccl" in node.value
            if names_cuda or names_nccl:
                wrong.append(f"{where}:{node.lineno}")
    assert not wrong, wrong


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"
