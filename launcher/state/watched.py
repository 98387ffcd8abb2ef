"""What is asked of a server that starts, again and again, and how its answers read: its keeper's
word, its log and its API.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from launcher.checks import ray as ray_checks
from launcher.errors import ServerError, UnreadableAnswer
from launcher.model import Answer, Inventory
from launcher.payload.agent.desired import Desired
from launcher.payload.agent.observed import OVER, Observed
from launcher.site import Site
from launcher.state import servers
from launcher.state.servers import Server
from launcher.tools import payload, symptoms, untrusted, vllm
from launcher.transport import Answers, Command

_PROMPT, _TOKENS = "Say hello.", 8
_PATIENCE = 5.0  # seconds in which an API that starts may begin to listen
_NOT_YET = "the head's agent has not taken it up yet"
# characters of an exception in the first line of an error; all of it is in the evidence
_LINE = 160
# symptoms that only say that something failed; what did is in the exception
_VAGUE = frozenset({"engine-failed", "rank-died"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSnapshot:
    """A server as one look found it.

    `ended` is a sentence on how the server ended, `cause` its engine's first error, `evidence` what
    showed it.

    `stopped` means that somebody ended it, so that nothing has gone wrong; `doing` is what is done
    or waited for before its engine starts, `recovering` that one has died before. With `anew`,
    another engine has begun: what was seen before is of one that is gone. `ranks` is which node
    holds what: as the keeper found it (`known`), else as it was meant.
    """

    lines: tuple[str, ...] = ()
    offset: int = 0
    ended: str = ""
    cause: str = ""
    evidence: str = ""
    stopped: bool = False
    server: Mapping[str, Any] = field(default_factory=dict)
    doing: str = ""
    recovering: bool = False
    anew: bool = False
    ranks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    known: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A server to wait for.

    `ask(offset)` and `read(answers, offset)` belong together; `complete` asks for a completion.
    """

    name: str
    endpoint: str
    ask: Callable[[int], Sequence[Command]]
    read: Callable[[Answers, int], ServerSnapshot]
    complete: Callable[[float], Command]

    @property
    def what(self) -> str:
        """Name it for people."""
        return f"server `{self.name}`"


def watched(site: Site, wanted: Desired) -> Watched:
    """Watch a server: through the head what its keeper says, through the node with its API its log
    and its answers.
    """
    inventory, node = site.inventory, site.inventory.node(wanted.api_node)
    host, ports = payload.api_host(wanted.host), replace(inventory.ports, api=wanted.port)
    return Watched(
        name=wanted.name,
        endpoint=endpoint(inventory, wanted.host, wanted.port, wanted.api_node),
        ask=lambda offset: [
            *([] if node.head else [servers.ask(site)]),
            site.inside(
                node,
                # the first look tells at once how it is
                payload.watch(ports, host, wanted.name, offset, _PATIENCE if offset else 0.0),
            ),
        ],
        read=partial(_read, site, wanted),
        complete=lambda timeout: site.inside(
            node,
            payload.complete(ports, host, _PROMPT, _TOKENS, timeout, wanted.replicas),
            # For a completion, and, when it is there, for one of each replica.
            timeout=timeout * min(wanted.replicas, 2) + 30,
        ),
    )


def endpoint(inventory: Inventory, bind: str, port: int, node: str = "") -> str:
    """Return the URL that clients use: the node's address (the head's) between the nodes, or the
    only one it listens on.
    """
    at = inventory.node(node) if node else inventory.head
    host = at.ip if bind in ("0.0.0.0", "::", "") else bind  # noqa: S104 - compared, not bound
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _read(site: Site, wanted: Desired, answers: Answers, offset: int) -> ServerSnapshot:
    found = _kept(site.head.name, wanted, answers)
    if found.desired is None:
        return ServerSnapshot(offset=offset, ended="it is wanted no more", stopped=True)
    if found.desired.asked != wanted.asked:
        return ServerSnapshot(
            offset=offset, ended=f"{found.model} has taken its place", stopped=True
        )
    log = _log(answers[wanted.api_node][-1])
    seen = (
        servers.named(site.nodes, found.observed)
        if found.observed
        else Observed(name=found.name, id=found.id, asked=0.0)
    )
    look = ServerSnapshot(
        lines=_lines(log) if _begun(found) else (),
        offset=int(log.get("offset", offset)),
        anew=bool(log.get("anew")),
        ranks=_ranks(wanted, seen),
    )
    if found.state in OVER:
        cause, evidence = (
            (seen.faults[-1].cause, seen.faults[-1].evidence) if seen.faults else ("", "")
        )
        return replace(look, ended=_ended(seen), cause=cause, evidence=evidence)
    return replace(
        look,
        server=log,
        doing=_doing(found, seen),
        recovering=bool(seen.faults) and found.state != "ready",
        known=found.state == "ready" and bool(seen.ranks),
    )


def _kept(head: str, wanted: Desired, answers: Answers) -> Server:
    """Return what the head says of the server that is watched."""
    said = ray_checks.read_payload(answers[head][0])
    if "servers" not in said:
        raise UnreadableAnswer(f"{head}: {said.get('error', 'the head does not tell of servers')}")
    return next(
        (each for each in servers.read(said).servers if each.name == wanted.name),
        Server(name=wanted.name),
    )


def _begun(found: Server) -> bool:
    """True once its engine has been started: what is in the log before that is of one that is
    gone.
    """
    return (
        found.observed is not None
        and found.state not in ("waiting", "stopped")
        and found.observed.generation > 0
    )


def _lines(log: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(line for line in re.split(r"[\r\n]+", log.get("log", "")) if line.strip())


def _ranks(wanted: Desired, seen: Observed) -> Mapping[str, tuple[str, ...]]:
    if seen.ranks:
        return {node: tuple(held) for node, held in seen.ranks.items()}
    return {
        node: (f"{count} {'rank' if count == 1 else 'ranks'}",)
        for node, count in wanted.places.items()
    }


def _doing(found: Server, seen: Observed) -> str:
    """Say what is done or waited for before the engine starts."""
    if found.state in ("starting", "ready"):
        return ""
    if not found.observed:
        return _NOT_YET
    return seen.doing or seen.state


def _ended(seen: Observed) -> str:
    last = seen.faults[-1] if seen.faults else None
    how = "its keeper gave up" if seen.state == "gave-up" else ""
    return ": ".join(
        each for each in (how, last.what if last else seen.doing or "it failed") if each
    )


def _log(answer: Answer) -> Mapping[str, Any]:
    """Read the log's part; nothing while the node's container cannot be asked: the head knows how
    the server is.
    """
    try:
        return ray_checks.read_payload(answer)
    except UnreadableAnswer:
        return {}


def failure(
    watched: Watched, seen: ServerSnapshot, lines: Sequence[str], *, hung: bool
) -> ServerError:
    """Return the error of a server that ended, or is `hung`: its log, of which `lines` are the
    last, says that it cannot go on.
    """
    everything = "\n".join([seen.cause, seen.evidence, "\n".join(lines)])
    known = symptoms.first(everything)
    raised = untrusted.plain(seen.cause) or vllm.root_cause(everything)
    how = untrusted.plain(seen.ended) or f"{watched.what} still runs"
    cause = _cause(known, raised) or how
    tail = [untrusted.plain(line) for line in seen.evidence.splitlines()] or list(lines)
    hints = [known.fix if known else "look at every node: `vlaunch doctor`"]
    if hung:
        hints.append(f"end it: `vlaunch stop {watched.name}`")
    return ServerError(
        f"the server {'cannot go on' if hung else 'did not start'}: {_first_line(cause)}",
        evidence=[*_beside(cause, known, raised, how), *tail[-8:]],
        hint="\n".join(hints),
    )


def _cause(known: symptoms.Match | None, raised: str) -> str:
    """Return why a server died, as far as its log says; empty where it says nothing."""
    if known is None:
        return raised
    vague = known.id in _VAGUE and raised not in known.line
    return f"{known.cause}: {raised}" if vague else known.cause


def _first_line(cause: str) -> str:
    return cause if len(cause) <= _LINE else f"{cause[:_LINE]}…"


def _beside(cause: str, known: symptoms.Match | None, raised: str, how: str) -> list[str]:
    """Return what is known of an end beside its cause, each line once."""
    said = (known.line, raised, how) if known else (raised if len(raised) > _LINE else "", how)
    return list(dict.fromkeys(line for line in said if line and line != _first_line(cause)))
