"""Ray: does it import, who may talk to it, does a local one start (deep), and the cluster, if one is named. Never waits for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quadriga.commands.doctor.check import Finding, Options
from quadriga.commands.doctor.probe import ProbeResult, run_probe

# ---- Ray on this machine: does it import, who may talk to it, and (deep) does a local one start and run a task?


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


# ---- A Ray cluster, if one is named: reachable, of the same versions, and what it offers. Never waits for ever


NAME = "cluster"


def check_cluster(options: Options) -> list[Finding]:
    address = options.address or options.env.get("RAY_ADDRESS") or "local"
    if address == "local":
        return [Finding(NAME, "ok", "none named (--address, RAY_ADDRESS): Ray starts on this machine alone")]
    if address.startswith(("http://", "https://")):
        what = f"{address} is a dashboard address, which only job submission understands"
        return [Finding(NAME, "fail", what, "use the head's host:6379 (or ray://host:10001), or unset RAY_ADDRESS")]
    result = _connect(address, options, {})
    refused = "Unauthenticated" in str(result.facts.get("error"))
    # Ray does not look for a token when it is given an address, unless RAY_AUTH_MODE tells it to.
    if refused and _connect(address, options, {"RAY_AUTH_MODE": "token"}).failure is None:
        what = f"{address}: asks for a token, which Ray does not send by itself to a named address"
        return [Finding(NAME, "fail", what, "export RAY_AUTH_MODE=token (tried: it connects)")]
    return judge_cluster(address, result)


def _connect(address: str, options: Options, extra_env: dict[str, str]) -> ProbeResult:
    mode = ["deep"] if options.deep else []
    env = {**options.env, **extra_env}
    return run_probe("ray_cluster", address, *mode, env=env, deadline_s=options.cluster_deadline_s)


def judge_cluster(address: str, result: ProbeResult) -> list[Finding]:
    facts = result.facts
    if "nodes" not in facts:
        return [_unreachable(address, facts, result.failure or "it said nothing")]
    nodes = [node for node in facts["nodes"] if node["alive"]]
    if not nodes:
        return [Finding(NAME, "fail", f"{address}: no node is alive", "start nodes: ray start --address=<head>:6379")]
    totals = {kind: sum(node[kind] for node in nodes) for kind in ("CPU", "GPU")}
    each = ", ".join(f"{node['name']} {node['CPU']:g} CPU {node['GPU']:g} GPU" for node in nodes[:8])
    more = f", and {len(nodes) - 8} more" if len(nodes) > 8 else ""
    dead = len(facts["nodes"]) - len(nodes)
    what = (
        f"{address}: {len(nodes)} node(s), {totals['CPU']:g} CPU, {totals['GPU']:g} GPU ({each}{more})"
        f"; Ray {facts['ray']} and Python {facts['python']} as here"
    )
    findings = [Finding(NAME, "ok", what + (f"; {dead} dead node(s) on record" if dead else ""))]
    if result.failure:
        what = f"the cluster was listed, but then: {result.failure}"
        findings.append(Finding(NAME, "warn", what, "look for nodes that are full or stuck: ray status"))
    return findings + _compare_nodes(facts.get("software", {}))


def _unreachable(address: str, facts: dict[str, Any], failure: str) -> Finding:
    """`stage` is how far the probe came: it names each step before it takes it."""
    error = facts.get("error") or failure
    if "Version mismatch" in error:
        fix = "use the same Ray and Python versions here and on the cluster, down to the patch release"
    elif "authenticat" in error.lower():
        fix = "export RAY_AUTH_MODE=token and bring the cluster's token: its ~/.ray/auth_token, or RAY_AUTH_TOKEN"
    elif address == "auto":
        fix = "start one here (ray start --head), name its host:6379, or unset RAY_ADDRESS"
    elif facts.get("stage") == "tcp":
        fix = "check host, port (ray start --head prints it) and firewall, and that the head runs; or unset RAY_ADDRESS"
    else:
        fix = (
            "something else may own that port: use the head's host:6379 from a cluster node, ray://host:10001 otherwise"
        )
    return Finding(NAME, "fail", f"{address}: {error}", fix)


def _compare_nodes(software: dict[str, dict[str, str | None]]) -> list[Finding]:
    """`software`: node name -> package -> version; one finding per package on which the nodes disagree."""
    findings = []
    for package in sorted({package for versions in software.values() for package in versions}):
        seen = Counter(str(versions[package]) for versions in software.values())
        if len(seen) > 1:
            usual = seen.most_common(1)[0][0]
            odd = [
                f"{node} has {versions[package]}" for node, versions in software.items() if versions[package] != usual
            ]
            what = f"{package} differs between nodes: most have {usual}, but {', '.join(odd)}"
            findings.append(Finding(NAME, "warn", what, f"install the same {package} on every node"))
    return findings
