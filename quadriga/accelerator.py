"""What a device offers, asked through torch's interface that all accelerators share; "cpu" is one of them.

Nothing here, and nothing outside the kernels, names one accelerator: `torch.get_device_module("cuda")` is `torch.cuda`, and of
an accelerator that brings its own torch package (`npu`) it is that package's module of the same functions.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from quadriga.errors import ResourceError

if TYPE_CHECKING:
    import torch

CPU = "cpu"


def device_module(device: torch.device | str) -> Any:
    """The torch module of a device's functions: memory, streams, random state."""
    import torch

    return torch.get_device_module(torch.device(device).type)


def use(name: str) -> None:
    """Let this process use the device of that name, such as `cuda:1`.

    Raises:
        ResourceError: torch cannot.
    """
    import torch

    kind, _, number = name.partition(":")
    if kind == CPU:
        return
    try:
        device_module(kind).set_device(int(number or 0))
    except (AttributeError, AssertionError, RuntimeError, ValueError) as error:
        built_for = torch.accelerator.current_accelerator()
        known = built_for is not None and built_for.type == kind
        reason = str(error) if known else f"it was built without support for {kind}"
        raise ResourceError(
            f"torch {torch.__version__} cannot use {name}: {reason}",
            "`quadriga doctor` says what is missing; trainer.device=cpu (of a command: --device cpu) does without it",
        ) from error


def in_use() -> Any:
    """The module of the accelerator that this process has begun to use; None if it has not. Asking does not start it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    return module if getattr(module, "is_initialized", lambda: False)() else None


def collectives(device_type: str) -> str:
    """The torch.distributed backends of a group on such devices: gloo for what lies on the CPU, the device's own beside it."""
    import torch.distributed as dist

    if device_type == CPU:
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated on an accelerator now."""
    return int(device_module(device).mem_get_info(device)[0])


def empty_cache() -> None:
    """Give what torch's allocator keeps in reserve back to the accelerator in use, if any."""
    module = in_use()
    if module is not None:
        module.empty_cache()


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """State of the CPU's generator, and of the device's under its name."""
    import torch

    state = {CPU: torch.get_rng_state()}
    if device.type != CPU:
        state[device.type] = device_module(device).get_rng_state(device)
    return state


def restore_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """What `random_state` gave; the state of another kind of device is left alone."""
    import torch

    torch.set_rng_state(state[CPU])
    if device.type != CPU and device.type in state:
        device_module(device).set_rng_state(state[device.type], device)
