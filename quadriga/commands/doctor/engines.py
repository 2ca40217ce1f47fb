"""Which rollout engines a run could use here, by the metadata of what is installed."""

from __future__ import annotations

from importlib import metadata

from quadriga.commands.doctor.check import Finding, Options
from quadriga.config.installed_vllm import Installed, installed, problem, tested_range


def check_engines(options: Options) -> list[Finding]:
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return []  # the check of the packages says so
    return [judge_vllm(installed(), torch, dict(options.env))]


def judge_vllm(vllm: Installed | None, torch: str, env: dict[str, str]) -> Finding:
    """One line: native always works, so a vLLM that cannot be used is worth a warning, one that is not there a hint."""
    if vllm is None:
        return Finding("engines", "ok", "native; vLLM is not installed", f"for rollout.name=vllm: {tested_range()}")
    if wrong := problem(vllm, torch, env):
        return Finding("engines", "warn", f"native; vllm not: {wrong[0]}", wrong[1])
    return Finding("engines", "ok", f"native, vllm ({vllm.package} {vllm.version})")
