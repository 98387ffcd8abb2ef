"""What is asked of a server that starts, again and again, and how its answers read: as a Ray job, or as rank containers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from launcher.checks import ray as ray_checks
from launcher.checks.serving import OVER
from launcher.errors import UnreadableAnswer
from launcher.model import Answer, Argv, Inventory, Node
from launcher.plan import containers, supervised
from launcher.plan.ranks import nodes_of
from launcher.plan.serve import Request, at_port
from launcher.plan.shape import Answers
from launcher.tools import docker, payload, ray, vllm
from launcher.transport import Command

# The whole lines that a container's log gained since so many bytes, a megabyte at most.
_LOG_SINCE = 'n=$1 o=$2; shift 2; "$@" logs "$n" 2>&1 | tail -c +"$o" | head -c 1000000'
_PROMPT, _TOKENS = "Say hello.", 8
_GONE = "is gone"  # Docker leaves a container that has ended: somebody removed this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One look. `ended` is a sentence on how the server ended, and what its end said; `culprits` are the nodes to blame.

    `stopped` means that somebody ended it, so that nothing has gone wrong; `doing` is what its supervisor does to bring a dead
    server back. With `anew`, another engine has begun: what was seen before is of one that is gone.
    """

    lines: tuple[str, ...] = ()
    offset: int = 0
    ended: str = ""
    culprits: tuple[str, ...] = ()
    stopped: bool = False
    server: Mapping[str, Any] = field(default_factory=dict)
    doing: str = ""
    anew: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A server to wait for. `ask(offset)` and `read(answers, offset)` belong together; `ranks` says which node holds what.

    `evidence` is asked, per node, only when the server has ended.
    """

    what: str
    head: str
    endpoint: str
    ask: Callable[[int], Sequence[Command]]
    read: Callable[[Answers, int], Seen]
    complete: Callable[[float], Command]
    ask_ranks: tuple[Command, ...]
    read_ranks: Callable[[Answers], Mapping[str, tuple[str, ...]]]
    evidence: tuple[Command, ...] = ()


def as_job(inventory: Inventory, request: Request, job: str) -> Watched:
    """Watch a Ray job through the head's container."""
    here = at_port(inventory, request.port)
    host = payload.api_host(request.host)
    inside = partial(_exec, inventory.head, containers.name(inventory, inventory.head))
    return Watched(
        what=f"Ray job {job}",
        head=inventory.head.name,
        endpoint=endpoint(inventory, request.host, request.port),
        ask=lambda offset: [inside(payload.watch(here.ports, host, job, offset), 60)],
        read=lambda answers, offset: _read_job(inventory, answers[inventory.head.name][0]),
        complete=partial(_complete, inside, here, host, request.placement.dp),
        ask_ranks=(inside(payload.jobs(here.ports, host), 60),),
        read_ranks=lambda answers: _read_actors(inventory, answers),
    )


def as_ranks(inventory: Inventory, request: Request) -> Watched:
    """Watch rank containers: the state of each, and the log and the API of rank 0."""
    here = at_port(inventory, request.port)
    host = payload.api_host(request.host)
    nodes = nodes_of(inventory, request.placement)
    head = nodes[0]
    inside = partial(_exec, head, containers.rank_name(inventory, head))

    def ask(offset: int) -> list[Command]:
        states = [
            Command(node=node.name, argv=docker.inspect(node.docker, containers.rank_name(inventory, node)), timeout=20)
            for node in nodes
        ]
        log = ("sh", "-c", _LOG_SINCE, "log", containers.rank_name(inventory, head), str(offset + 1), *head.docker)
        return [*states, Command(node=head.name, argv=log, timeout=60), inside(payload.server(here.ports, host), 60)]

    def log(node: Node, tail: int) -> Command:
        name = containers.rank_name(inventory, node)
        return Command(node=node.name, argv=docker.logs(node.docker, name, tail=tail), timeout=30)

    return Watched(
        what="the rank containers",
        head=head.name,
        endpoint=endpoint(inventory, request.host, request.port),
        ask=ask,
        read=lambda answers, offset: _read_ranks(inventory, nodes, answers, offset),
        complete=partial(_complete, inside, here, host, request.placement.dp),
        ask_ranks=tuple(log(node, 5000) for node in nodes),
        read_ranks=lambda answers: {
            node.name: _read_held(answers[node.name][0].out, request.placement.dp) for node in nodes
        },
        evidence=tuple(log(node, 300) for node in nodes if node is not head),
    )  # fmt: skip


def endpoint(inventory: Inventory, bind: str, port: int) -> str:
    """Return the URL that clients use: the head's address between the nodes, unless the server listens on another only."""
    host = inventory.head.ip if bind in ("0.0.0.0", "::", "") else bind  # noqa: S104 - compared, not bound
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _exec(node: Node, name: str, argv: Argv, timeout: float) -> Command:
    return Command(node=node.name, argv=docker.exec_(node.docker, name, *argv), timeout=timeout)


def _complete(inside: Callable[[Argv, float], Command], here: Inventory, host: str, replicas: int, timeout: float) -> Command:
    """Ask for a completion, and, when it is there, for one of each replica."""
    argv = payload.complete(here.ports, host, _PROMPT, _TOKENS, timeout, replicas)
    return inside(argv, timeout * min(replicas, 2) + 30)


def _read_job(inventory: Inventory, answer: Answer) -> Seen:
    said = ray_checks.read_payload(answer)
    if "job" not in said or "log" not in said or "offset" not in said:
        raise UnreadableAnswer(f"{answer.node}: {said.get('error', 'the head gave no answer')}", evidence=answer.tail)
    state, message = said["job"].get("status"), str(said["job"].get("message") or "")
    ended = ""
    if state in OVER:
        words = {"STOPPED": "was stopped", "SUCCEEDED": "ended by itself", "ABSENT": "is not known to Ray any more"}
        code = said["job"].get("driver_exit_code")
        how = words.get(str(state), "failed" + (f" with exit code {code}" if code is not None else ""))
        ended = f"Ray job {said['job'].get('submission_id') or ''} {how}".replace("  ", " ")
        # Ray repeats the last lines of the log; without a log they are all there is.
        ended += f"\n{message}" if not said["log"] and message else ""
    kept = supervised.read(inventory, said.get("supervised"))
    if kept is not None and kept.state == "gave-up" and ended:
        ended = f"its supervisor gave up: {kept.doing}\n{ended}"
    lines = [each for each in re.split(r"[\r\n]+", said["log"]) if each.strip()]
    begun = [number for number, line in enumerate(lines) if supervised.AGAIN in line]
    return Seen(
        lines=tuple(lines[begun[-1] + 1 :] if begun else lines),
        offset=int(said["offset"]),
        ended=ended,
        culprits=(answer.node,) if ended else (),
        stopped=state == "STOPPED",
        server=said,
        doing=kept.doing if kept is not None and kept.state == "recovering" and not ended else "",
        anew=bool(begun),
    )


def _read_ranks(inventory: Inventory, nodes: Sequence[Node], answers: Answers, offset: int) -> Seen:
    ended, culprits, gone = [], [], 0
    for node in nodes:
        trouble = _trouble(state := answers[node.name][0])
        gone += trouble == _GONE and "no such" in state.err.lower()
        if trouble:
            ended.append(f"the rank on {node.name} {trouble}")
            culprits.append(node.name)
    log, said = answers[nodes[0].name][1:3]
    try:
        server = {} if nodes[0].name in culprits else ray_checks.read_payload(said)
    except UnreadableAnswer:
        server = {}
    kept = supervised.read(inventory, server.get("supervised"))
    if kept is not None and kept.state == "gave-up":
        ended, culprits = [f"its supervisor gave up: {kept.doing}"], [kept.fault.node if kept.fault else nodes[0].name]
    elif kept is not None:
        ended, culprits = [], []  # Rank 0 waits for a container that has ended, and starts everything again.
    # Whole lines only, unless nothing more will come. Offsets count bytes, as `tail -c` does.
    end = len(log.out) if ended else max(log.out.rfind("\n"), log.out.rfind("\r")) + 1
    text = log.out[:end] if log.ok else ""
    lines = [each for each in re.split(r"[\r\n]+", text) if each.strip()]
    begun = [number for number, line in enumerate(lines) if supervised.AGAIN in line]
    return Seen(
        lines=tuple(lines[begun[-1] + 1 :] if begun else lines),
        offset=offset + len(text.encode()),
        ended="; ".join(ended),
        culprits=tuple(culprits),
        stopped=gone == len(nodes),
        server={} if ended else server,
        doing=kept.doing if kept is not None and kept.state == "recovering" and not ended else "",
        anew=bool(begun),
    )


def _trouble(answer: Answer) -> str:
    if answer.code == 255 or answer.timed_out:
        raise UnreadableAnswer(f"{answer.node}: does not answer", evidence=answer.tail)
    found = docker.parse_containers(answer.out) if answer.ok else ()
    if not found:
        return _GONE
    killed = " (it was killed: by hand, or for lack of memory)" if found[0].exit_code == 137 else ""
    return "" if found[0].running else f"ended with exit code {found[0].exit_code}{killed}"


def _read_held(log: str, replicas: int) -> tuple[str, ...]:
    """Read what a container holds: ranks of the one engine, or whole replicas."""
    return vllm.replicas(log) if replicas > 1 else tuple(vllm.assigned(log).values())


def _read_actors(inventory: Inventory, answers: Answers) -> Mapping[str, tuple[str, ...]]:
    said = ray_checks.read_payload(answers[inventory.head.name][0])
    by_ip = ray.parse_ranks(said.get("actors"), ray.parse_nodes(said.get("nodes")))
    names = {node.ip: node.name for node in inventory.nodes}
    return {names.get(ip, ip): ranks for ip, ranks in by_ip.items()}
