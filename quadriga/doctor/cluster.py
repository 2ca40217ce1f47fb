"""A Ray cluster, if one is named: reachable, of the same versions, and what it offers. Never waits for ever."""

from __future__ import annotations

from collections import Counter
from typing import Any

from quadriga.doctor.check import Finding, Options
from quadriga.doctor.probe import ProbeResult, run_probe

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
