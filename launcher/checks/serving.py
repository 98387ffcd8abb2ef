"""Judges of a server to be (cluster whole, agents connected, model on every node), and of one that
was stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.checks.batch import OVER
from launcher.checks.gpu_use import busy_gpus
from launcher.checks.shape import Finding, failed, gone, passed, skipped
from launcher.model import Node
from launcher.site import Site
from launcher.tools import ray
from launcher.tools.host import HostFacts
from launcher.tools.model import ModelSeen

_HEARD = 60.0  # seconds for which the word of an agent counts
_LONG = 10 * 365 * 86400.0  # seconds; more is no age


def cluster(site: Site, said: Mapping[str, Any]) -> list[Finding]:
    """Judge that every node's container runs and that every node is in Ray; `said` is what the head
    container said about Ray, or its `error`.
    """
    if findings := [each for node in site.nodes if (each := _container(site, node))]:
        return findings
    if "nodes" not in said:
        why = str(said.get("error", "no reason given"))
        fix = (
            "it may be busy: run the same command again"
            if "timed out" in why
            else "run `vlaunch up`"
        )
        return [failed(site.head, f"Ray does not answer: {why}", fix=fix)]
    alive = {each.ip for each in ray.parse_nodes(said["nodes"]) if each.alive}
    return [
        (
            passed(node)
            if node.ip in alive
            else failed(
                node, "is not in Ray", fix="run `vlaunch up`, then look at `vlaunch status`"
            )
        )
        for node in site.nodes
    ]


def agents(site: Site, nodes: Sequence[Node], heard: Mapping[str, float]) -> list[Finding]:
    """Judge that the agents in the nodes' containers are of this vlaunch and connected; `heard` is
    how many seconds ago.
    """
    return [_container(site, node) or _agent(site, node, heard.get(node.name)) for node in nodes]


def _container(site: Site, node: Node) -> Finding | None:
    """Return what is wrong with a node's container, if anything is."""
    container = site.container(node)
    if container is None:
        return failed(node, "has no container of this cluster", fix="run `vlaunch up` first")
    if not container.running:
        return failed(
            node,
            f"its container is {container.status}",
            fix="run `vlaunch up`, which starts it again",
        )
    return None


def _agent(site: Site, node: Node, heard: float | None) -> Finding:
    container = site.container(node)
    if container is not None and container.argv[1:2] != ("agent",):
        return failed(
            node,
            "its container was started by an older vlaunch",
            fix="run `vlaunch up`, which renews it",
        )
    if heard is not None and heard < _HEARD:
        return passed(node)
    when = (
        f"was last heard {heard:.0f}s ago"
        if heard is not None and heard < _LONG
        else "was never heard"
    )
    fix = (
        f"look at its log: `vlaunch logs {node.name}`; `vlaunch check` says whether the nodes reach"
        " each other"
    )
    return failed(node, f"its agent {when}, so that nothing can be started there", fix=fix)


def model(
    nodes: Sequence[Node], name: str, seen: Mapping[str, ModelSeen], offline: Mapping[str, bool]
) -> list[Finding]:
    """Judge that the model is the same on every node that will load it; `offline` nodes may not
    download it.
    """
    digests = {seen[node.name].digest for node in nodes if node.name in seen} - {""}
    return [
        _model_on(
            node,
            name,
            seen.get(node.name),
            offline=offline.get(node.name, False),
            alike=len(digests) <= 1,
        )
        for node in nodes
    ]


def _model_on(
    node: Node, name: str, found: ModelSeen | None, *, offline: bool, alike: bool
) -> Finding:
    if found is None or found.where == "unknown":
        return skipped(node, "could not be asked whether it has the model")
    if found.where == "missing":
        return failed(
            node,
            f"has no {name} in its container",
            fix=(
                f"copy the model to {name} on every node; it must lie below `hf_home:` or one of"
                " `mounts:`"
            ),
        )
    if found.where == "not cached" and offline:
        return failed(
            node,
            f"does not have {name} in its cache, and HF_HUB_OFFLINE forbids to download it",
            fix="copy it to `hf_home:` on every node, or take HF_HUB_OFFLINE out of `env:`",
        )
    if found.where == "not cached":
        return passed(node, "will download the model")
    if not alike:
        return failed(
            node,
            f"{name} is not the same model on all nodes",
            evidence=f"its config.json has sha256 {found.digest[:16] or '(none)'}…",
            fix="copy the model again to every node",
        )
    return passed(node, "has the model")


def port(node: Node, number: int, use: str, facts: HostFacts) -> Finding:
    """Judge that nobody listens on a port of a node."""
    if facts.listening is None:
        return skipped(node, "neither `ss` nor `netstat` is installed; ports were not looked at")
    if all(each != number for _, each in facts.listening):
        return passed(node)
    return failed(
        node,
        f"port {number} ({use}) is taken",
        fix=(
            f"see who has it with `sudo ss -ltnp 'sport = :{number}'` on {node.name}, or choose"
            " another with `--port`"
        ),
    )


def stopped(
    alive: Sequence[str], ports: Sequence[str], said: Mapping[str, Any] | None, others: float
) -> list[Finding]:
    """Judge that servers are over, their ports closed, and their GPUs free in Ray.

    Args:
        alive: the states of those that are not over yet, in words.
        ports: the ports that are still open, in words.
        said: what the head said about Ray, or its `error`; None where they took nothing from Ray.
        others: the GPUs of servers that go on.
    """
    left = [*alive, *(f"{each} is still open" for each in ports)]
    if said is not None and "jobs" not in said:
        left.append(f"Ray cannot be asked: {said.get('error', 'no answer')}")
    # What other work holds, a batch job say, is not ours to wait for.
    elif (
        said is not None
        and all(job["status"] in OVER for job in said["jobs"])
        and (busy := busy_gpus(said) - others) > 0
    ):
        left.append(f"{busy:g} GPUs are still reserved in Ray")
    return [gone(left, "the server is gone, what it held is free, and its port is closed")]
