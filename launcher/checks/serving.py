"""Judges of a server to be (cluster whole, agents connected, model on every node), and of one that
was stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.checks.batch import OVER
from launcher.checks.gpu_use import busy_gpus
from launcher.checks.shape import Finding, failed, gone, passed, skipped, warned
from launcher.model import Node, fold
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
    return [_container(site, node) or _agent(node, heard.get(node.name)) for node in nodes]


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


def _agent(node: Node, heard: float | None) -> Finding:
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
    download it. `seen` may have other nodes, too.
    """
    digests = {seen[node.name].digest for node in nodes if node.name in seen} - {""}
    whole = [each for each, found in seen.items() if found.where == "there"]
    return [
        _model_on(
            node,
            name,
            seen.get(node.name),
            offline=offline.get(node.name, False),
            alike=len(digests) <= 1,
            whole=whole,
        )
        for node in nodes
    ]


def _model_on(
    node: Node,
    name: str,
    found: ModelSeen | None,
    *,
    offline: bool,
    alike: bool,
    whole: Sequence[str],
) -> Finding:
    if found is None or found.where == "unknown":
        return skipped(node, "could not be asked whether it has the model")
    if found.absent:
        return _absent(node, name, found, offline=offline, whole=whole)
    if not alike:
        return failed(
            node,
            f"{name} is not the same model on all nodes",
            evidence=f"its config.json has sha256 {found.digest[:16] or '(none)'}…",
            fix=f"bring one of them everywhere: `vlaunch model push {name} --from {whole[0]}`",
        )
    return passed(node, "has the model")


def _absent(
    node: Node, name: str, found: ModelSeen, *, offline: bool, whole: Sequence[str]
) -> Finding:
    """Judge a node that lacks files of a model, of which a server may download those of a cache."""
    fix = bring(name, whole)
    if found.where == "begun":
        return failed(node, f"the copy of {name} is not finished there", fix=fix)
    what = f"has no {name} in its container"
    if found.where == "lacks":
        what = f"lacks {found.lacking} of {name}"
    elif found.where == "not cached":
        what = f"does not have {name} in its cache"
    if name.startswith("/") or found.where == "missing":
        return failed(node, what, fix=fix)
    if offline:
        fix = f"{fix}\nor take HF_HUB_OFFLINE out of `env:`"
        return failed(node, f"{what}, and HF_HUB_OFFLINE forbids to download it", fix=fix)
    if whole:
        text = f"{what}, and will download it, though {fold(list(whole))} has it"
        return warned(node, text, fix=fix)
    if found.where == "lacks":
        return warned(node, f"{what}, and will download the rest", fix=fix)
    return passed(node, "will download the model")


def bring(name: str, whole: Sequence[str]) -> str:
    """Say how a model gets to nodes that lack it; `whole` are those that have all of it."""
    if whole:
        return f"copy it from {whole[0]}: `vlaunch model push {name}`, or add `--fetch`"
    if name.startswith("/"):
        return (
            f"copy it from this machine: `vlaunch model push ./FOLDER --as {name}`; it must lie"
            " below `hf_home:` or one of `mounts:`"
        )
    return f"download it once for all nodes: `vlaunch model pull {name}`, or add `--fetch`"


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
