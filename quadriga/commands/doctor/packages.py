"""Python itself, and whether every package Quadriga needs is installed, new enough and in agreement with the others."""

from __future__ import annotations

import platform
import sys
import tomllib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from quadriga.commands.doctor.check import Finding, Options
from quadriga.config import vllm as vllm_support

OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 13)


def check_python(options: Options) -> list[Finding]:
    return [
        judge_python(sys.version_info[:2], f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    ]


def judge_python(version: tuple[int, ...], description: str) -> Finding:
    """`version` is (major, minor)."""
    if version < OLDEST_PYTHON:
        return Finding(
            "python", "fail", f"{description}: too old", "make the environment with Python 3.11, 3.12 or 3.13"
        )
    if version > NEWEST_PYTHON:
        return Finding(
            "python", "warn", f"{description}: newer than tested", "prefer Python 3.11, 3.12 or 3.13 if packages break"
        )
    return Finding("python", "ok", description)


@dataclass(frozen=True)
class Installed:
    """A distribution as its metadata describes it."""

    version: str
    requires: tuple[str, ...]


@dataclass(frozen=True)
class Unmet:
    """A requirement that does not hold: `found` is the installed version, None if there is none."""

    requirement: str
    needed_by: str
    found: str | None


def check_packages(options: Options) -> list[Finding]:
    if find_installed("packaging") is None:
        return [
            Finding("packages", "fail", "packaging is not installed", 'pip install "quadriga" with its dependencies')
        ]
    return judge_packages(*audit(quadriga_requirements(), find_installed))


def quadriga_requirements() -> list[str]:
    """Quadriga's dependencies: from pyproject.toml in a checkout, else from the installed metadata."""
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    if pyproject.is_file():
        project = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == "quadriga":
            return list(project["dependencies"])
    return metadata.requires("quadriga") or []


def find_installed(name: str) -> Installed | None:
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return Installed(distribution.version, tuple(distribution.requires or ()))


def audit(roots: Iterable[str], find: Callable[[str], Installed | None]) -> tuple[int, list[Unmet]]:
    """Walk the requirements of `roots` and of everything they need, extras and markers respected.

    Returns the number of packages seen and the requirements that do not hold; "quadriga" needs the `roots`.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    todo = deque(("quadriga", "", text) for text in roots)
    seen: set[tuple[str, str]] = set()
    unmet: dict[Unmet, None] = {}
    while todo:
        needed_by, extra, text = todo.popleft()
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        installed = find(requirement.name)
        if installed is None or not requirement.specifier.contains(installed.version, prereleases=True):
            requirement.marker = None  # the reader wants `name[extra]>=1`, not the platforms it applies to
            unmet[Unmet(str(requirement), needed_by, installed.version if installed else None)] = None
        if installed is None:
            continue
        for wanted in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), wanted)
            if key not in seen:
                seen.add(key)
                todo += [(requirement.name, wanted, child) for child in installed.requires]
    return len({name for name, _ in seen}), list(unmet)


def judge_packages(count: int, unmet: list[Unmet]) -> list[Finding]:
    """What Quadriga itself needs must hold; a disagreement among other packages may still work."""
    findings = []
    for problem in unmet:
        direct = problem.needed_by == "quadriga"
        version = f"{problem.found} is installed" if problem.found else "it is not installed"
        what = f"{problem.needed_by} needs {problem.requirement}, but {version}"
        findings.append(Finding("packages", "fail" if direct else "warn", what, f'pip install "{problem.requirement}"'))
    return findings or [Finding("packages", "ok", f"{count} packages, all requirements hold")]


# ---- Which rollout engines a run could use here, by the metadata of what is installed


def check_engines(options: Options) -> list[Finding]:
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return []  # the check of the packages says so
    return [judge_vllm(vllm_support.installed(), torch, dict(options.env))]


def judge_vllm(vllm: vllm_support.Installed | None, torch: str, env: dict[str, str]) -> Finding:
    """One line: native always works, so a vLLM that cannot be used is worth a warning, one that is not there a hint."""
    if vllm is None:
        return Finding(
            "engines", "ok", "native; vLLM is not installed", f"for rollout.name=vllm: {vllm_support.tested_range()}"
        )
    if wrong := vllm_support.problem(vllm, torch, env):
        return Finding("engines", "warn", f"native; vllm not: {wrong[0]}", wrong[1])
    return Finding("engines", "ok", f"native, vllm ({vllm.package} {vllm.version})")
