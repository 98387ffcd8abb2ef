"""What is asked of a server that starts, again and again, and how its answers read: its keeper's
word, and its log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from launcher.checks import ray as ray_checks
from launcher.errors import ServerError, UnreadableAnswer
from launcher.model import Answer
from launcher.payload.agent.cause import Raised
from launcher.payload.agent.desired import Desired
from launcher.payload.agent.observed import OVER, Observed
from launcher.site import Site
from launcher.state import endpoints, servers
from launcher.state.endpoints import Endpoint
from launcher.state.servers import Kept, Server
from launcher.tools import payload, symptoms, untrusted, vllm
from launcher.transport import Answers, Command

_PATIENCE = 5.0  # seconds in which an API that starts may begin to listen
# characters of an exception in the first line of an error; all of it is in the evidence
_LINE = 160
# symptoms that only say that something failed; what did is in the exception
VAGUE = frozenset({"engine-failed", "rank-died"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSnapshot:
    """A server as one look found it.

    `ended` is a sentence on how the server ended, `cause` its engine's first error, `evidence` what
    showed it, `node` where.

    `stopped` means that somebody ended it, so that nothing has gone wrong; `doing` is what is done
    or waited for before its engine starts, `recovering` that one has died before. With `anew`,
    another engine has begun: what was seen before is of one that is gone. `listening` means that
    its first API listens, `ready` that it has answered; `state` and `reason` are the keeper's
    verdict, `first` what was answered first, or how it has refused so far, and `held` what its KV
    caches hold. `ranks` is which node holds what: as the keeper found it (`known`), else as it was
    meant.
    """

    lines: tuple[str, ...] = ()
    offset: int = 0
    ended: str = ""
    cause: str = ""
    evidence: str = ""
    node: str = ""
    stopped: bool = False
    ready: bool = False
    state: str = "starting"
    reason: str = ""
    first: Mapping[str, Any] = field(default_factory=dict)
    held: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    doing: str = ""
    recovering: bool = False
    anew: bool = False
    listening: bool = False
    ranks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    known: bool = False

    @property
    def answers(self) -> bool:
        """True when it has answered, and does so still."""
        return self.ready and self.state in servers.GOOD and "model" in self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A server to wait for.

    `ask(offset)` and `read(answers, offset)` belong together.
    """

    name: str
    endpoints: tuple[Endpoint, ...]
    ask: Callable[[int], Sequence[Command]]
    read: Callable[[Answers, int], ServerSnapshot]

    @property
    def what(self) -> str:
        """Name it for people."""
        return f"server `{self.name}`"


def watched(site: Site, wanted: Desired) -> Watched:
    """Watch a server: through the head what its keeper says, through the first node with an API its
    log.
    """
    inventory, node = site.inventory, site.inventory.node(wanted.api_node)
    host, ports = payload.api_host(wanted.host), replace(inventory.ports, api=wanted.port)
    return Watched(
        name=wanted.name,
        endpoints=endpoints.of(inventory, wanted),
        ask=lambda offset: [
            *([] if node.head else [servers.ask(site)]),
            site.inside(
                node,
                # the first look tells at once how it is
                payload.watch(ports, host, wanted.name, offset, _PATIENCE if offset else 0.0),
            ),
        ],
        read=partial(_read, site, wanted),
    )


def _read(site: Site, wanted: Desired, answers: Answers, offset: int) -> ServerSnapshot:
    kept = _kept(site.head.name, answers)
    found = next(
        (each for each in kept.servers if each.name == wanted.name), Server(name=wanted.name)
    )
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
        listening=bool(log.get("listening")),
        ranks=_ranks(wanted, seen),
    )
    if found.state in OVER:
        fault = seen.last_fault
        if fault is None:
            return replace(look, ended=_ended(seen))
        return replace(
            look,
            ended=_ended(seen),
            cause=fault.cause,
            evidence=fault.evidence,
            node=fault.node or wanted.api_node,
        )
    state, reason = servers.health(
        replace(found, observed=seen if found.observed else None), kept.agent
    )
    return replace(
        look,
        ready=found.state == "ready",
        state=state,
        reason=reason,
        first=seen.first_answer if found.state in ("starting", "ready") else {},
        held=seen.held,
        doing=(reason or state) if found.state not in ("starting", "ready") else "",
        recovering=bool(seen.faults) and found.state != "ready",
        known=found.state == "ready" and bool(seen.ranks),
    )


def _kept(head: str, answers: Answers) -> Kept:
    """Return what the head's agent says; raises UnreadableAnswer where it has not looked for
    long.
    """
    said = ray_checks.read_payload(answers[head][0])
    kept = servers.read(said)
    if "servers" not in said or kept.agent > servers.OLD:
        raise UnreadableAnswer(f"{head}: {said.get('error') or servers.unheard(kept.agent)}")
    return kept


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
    kept = [untrusted.plain(line) for line in seen.evidence.splitlines()]
    log = [*kept, *lines]
    known = symptoms.first("\n".join([seen.cause, *log]))
    raised = vllm.raised("\n".join(log))
    exception = untrusted.plain(seen.cause) or (raised.text if raised else "")
    if raised and raised.text[:_LINE] != exception[:_LINE]:
        raised = None  # the keeper knows better
    how = untrusted.plain(seen.ended) or f"{watched.what} still runs"
    telling = None if known is None or (known.id in VAGUE and exception) else known
    cause = _first_line(telling.cause if telling else exception or how)
    where = _where(seen, raised)
    shown = f"{where}: {exception}" if cause != exception else f"raised on {where}"
    told = [shown if exception and where else exception]
    if telling and (not exception or exception[:_LINE] not in telling.line):
        told.append(telling.line)
    told.append(how)
    if telling is None and raised is None:
        told += (kept or list(lines))[-8:]
    hints = [known.fix if known else "look at every node: `vlaunch doctor`"]
    if hung:
        hints.append(f"end it: `vlaunch stop {watched.name}`")
    return ServerError(
        f"the server {'cannot go on' if hung else 'did not start'}: {cause}",
        evidence=[text for text in dict.fromkeys(told) if text and text != cause],
        hint="\n".join(hints),
    )


def _where(seen: ServerSnapshot, raised: Raised | None) -> str:
    """Return the node and the process that raised an exception, as far as the log says it."""
    if raised is None:
        return seen.node
    return ", ".join(part for part in (raised.address or seen.node, raised.process) if part)


def _first_line(cause: str) -> str:
    return cause if len(cause) <= _LINE else f"{cause[:_LINE]}…"
