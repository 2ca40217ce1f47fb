"""Ray on this machine: does it import, who may talk to it, and (deep) does a local one start and run a task?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quadriga.doctor.check import Finding, Options
from quadriga.doctor.probe import run_probe

OLDEST_RAY = (2, 41)
START_DEADLINE_S = 60.0


def check_ray(options: Options) -> list[Finding]:
    result = run_probe("ray_info", env=options.env, deadline_s=options.deadline_s)
    if result.failure:
        return [Finding("ray", "fail", f"import ray: {result.failure}", 'pip install "ray[default]>=2.41"')]
    facts = result.facts
    return [
        judge_version(facts["version"]),
        judge_authentication(
            options.env, Path.home(), supported=facts["tokens"], by_default=facts["tokens_by_default"]
        ),
    ]


def judge_version(version: str) -> Finding:
    major_minor = tuple(int(part) for part in version.split(".")[:2])
    if major_minor < OLDEST_RAY:
        return Finding("ray", "fail", f"{version}: too old", 'pip install --upgrade "ray[default]>=2.41"')
    return Finding("ray", "ok", version)


def judge_authentication(env: Mapping[str, str], home: Path, *, supported: bool, by_default: bool) -> Finding:
    """Whether the Rays started from here demand a token, and whether that token is there and private.

    Args:
        supported: this Ray knows token authentication.
        by_default: this Ray switches it on by itself for clusters it starts.
    """
    name = "ray token"
    if not supported:
        what = "this Ray has no token authentication: whoever reaches its ports can run code"
        return Finding(name, "warn", what, "upgrade Ray, or keep its ports on a private network")
    mode = env.get("RAY_AUTH_MODE", "").lower()
    path = Path(env.get("RAY_AUTH_TOKEN_PATH") or home / ".ray" / "auth_token")
    in_env = bool(env.get("RAY_AUTH_TOKEN"))
    if mode not in ("token", "") or (not mode and not by_default and not in_env and not path.is_file()):
        what = "token authentication is off: whoever reaches Ray's ports can run code"
        return Finding(
            name, "warn", what, "export RAY_AUTH_MODE=token, and let Ray make one: ray get-auth-token --generate"
        )
    if in_env:
        return Finding(name, "ok", "token authentication is on, token from RAY_AUTH_TOKEN")
    if not path.is_file():
        if "RAY_AUTH_TOKEN_PATH" in env:
            what = f"RAY_AUTH_TOKEN_PATH={path} is no file"
            return Finding(name, "fail", what, "write the token there, or unset RAY_AUTH_TOKEN_PATH")
        return Finding(name, "ok", "token authentication is on; Ray makes a token at its first start")
    if _others_can_read(path):
        return Finding(name, "warn", f"every user of this machine can read the token {path}", f"chmod 600 {path}")
    return Finding(name, "ok", f"token authentication is on, token from {path}")


def _others_can_read(path: Path) -> bool:
    readable = path.stat().st_mode & 0o004
    return bool(readable) and all(folder.stat().st_mode & 0o001 for folder in path.resolve().parents)


def check_ray_start(options: Options) -> list[Finding]:
    result = run_probe("ray_start", env=options.env, deadline_s=START_DEADLINE_S)
    if result.failure:
        fix = "read the newest logs in /tmp/ray/session_latest/logs; often /tmp or /dev/shm is full or not writable"
        return [Finding("ray start", "fail", f"a local Ray did not run a task: {result.failure}", fix)]
    return [Finding("ray start", "ok", f"a local Ray started and ran a task in {result.facts['seconds']:.1f} s")]
