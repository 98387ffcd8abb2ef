"""History of servers that have answered requests, as recorded by the head's agent
(`agent/state.py`), and the choice of the one for `vlaunch rollback`.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from launcher.agent import state
from launcher.core import decode, untrusted
from launcher.core.domain import Answer, ServerSpec
from launcher.core.errors import RequestError, UnreadableAnswer
from launcher.core.transport import Command
from launcher.tools.site import Site, servers

# The files do not exist before the first server, nor after `down`.
_PRINT_FILES = 'for file do cat "$file" 2>/dev/null; printf "\\n\\036\\n"; done'

_LATEST = 1e11  # seconds since 1970; no calendar goes much further


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRevision(ServerSpec):
    """Server that has answered: its spec, its image, the time of its last answer (seconds since
    1970), and the labels of vLLM's KV cache metric, if any (`held`).
    """

    id: str
    at: Annotated[float, decode.in_range(0, _LATEST)]
    tp: int
    pp: int
    dp: int
    image: str = ""
    held: Mapping[str, str] = field(default_factory=dict)

    @property
    def form(self) -> tuple[object, ...]:
        """All that the replicas of a server have in common."""
        sizes = (self.tp, self.pp, self.dp)
        return (self.model, self.backend, *sizes, self.args, tuple(sorted(self.env.items())))

    @property
    def label(self) -> str:
        """Name for display."""
        split = f"TP={self.tp} PP={self.pp}" + (f" DP={self.dp}" if self.dp > 1 else "")
        return " ".join((self.model, f"({split}, {self.backend})", *self.args))


def servers_with_file(site: Site, file: str) -> list[str]:
    """Return the names of the servers that have a file on the head; works without containers."""
    facts = site.facts_of(site.head)
    parts = [path.split("/") for path in (facts.files if facts else ())]
    return sorted(
        part[1] for part in parts if len(part) == 3 and (part[0], part[2]) == ("server", file)
    )


def query_history(site: Site, name: str) -> Command:
    """Query the history and the spec of a server; the head's container need not run."""
    folder = servers.server_dir(site, name)
    return _print_files(site, f"{folder}/{state.HISTORY}", f"{folder}/{state.DESIRED}")


def query_all_histories(site: Site) -> Command | None:
    """Query the histories of all servers; None if there are none."""
    names = servers_with_file(site, state.HISTORY)
    files = [f"{servers.server_dir(site, name)}/{state.HISTORY}" for name in names]
    return _print_files(site, *files) if files else None


def _print_files(site: Site, *files: str) -> Command:
    return Command(
        node=site.head.name, argv=("sh", "-c", _PRINT_FILES, "answered", *files), timeout=30
    )


def parse_history(answer: Answer) -> tuple[tuple[ServerRevision, ...], str]:
    """Parse the revisions of a server, newest first, and the id of its current spec, if any.

    Skips unreadable revisions.

    Raises:
        UnreadableAnswer: the query failed.
    """
    if not answer.ok:
        raise UnreadableAnswer(
            f"{answer.node}: cannot read the history of servers", evidence=answer.tail
        )
    texts = answer.out.split("\x1e")
    spec = _parse_json(texts[1] if len(texts) > 1 else "")
    current_id = spec.get("id") if isinstance(spec, Mapping) else None
    return tuple(_parse_revisions(texts[0])), current_id if isinstance(current_id, str) else ""


def parse_all_histories(answer: Answer) -> tuple[ServerRevision, ...]:
    """Parse the revisions of all servers, newest first; empty if the query failed."""
    revisions = [
        revision for text in answer.out.split("\x1e") for revision in _parse_revisions(text)
    ]
    return tuple(sorted(revisions, key=lambda revision: -revision.at)) if answer.ok else ()


def _parse_revisions(text: str) -> list[ServerRevision]:
    """Parse a history; skips unreadable entries."""
    history, revisions = _parse_json(text), list[ServerRevision]()
    for entry in history if isinstance(history, list) else ():
        with contextlib.suppress(KeyError, TypeError, AttributeError, UnreadableAnswer):
            server = entry["desired"]
            revision_fields = {
                "id": server["id"],
                "at": entry["at"],
                "image": server.get("image") or "",
                "held": entry.get("held") or {},
            }
            spec = {**server["asked_for"], **revision_fields}
            revisions.append(decode.validate(ServerRevision, spec, "a server of the history"))
    return revisions


def _parse_json(text: str) -> Any:
    try:
        return untrusted.loads(text)
    except ValueError:
        return None


def choose_name(site: Site, name: str | None) -> str:
    """Return the name of the server to roll back: the given one, else the only one with a spec, or
    with a history.

    Raises:
        RequestError: there are several.
    """
    if name is not None:
        return name
    for file in (state.DESIRED, state.HISTORY):
        names = list(dict.fromkeys(map(state.group_of, servers_with_file(site, file))))
        if len(names) == 1:
            return names[0]
        if names:
            listing = ", ".join(f"`{server_name}`" for server_name in names)
            text = f"{len(names)} servers have answered before: {listing}"
            raise RequestError(text, hint=f"choose one: `vlaunch rollback {names[0]}`")
    return servers.DEFAULT


def choose_previous(
    revisions: Sequence[ServerRevision], current_id: str, image: str
) -> ServerRevision:
    """Return the newest revision other than the current one.

    Raises:
        RequestError: there is none, or it used another image than the nodes have.
    """
    previous = next((server for server in revisions if server.id != current_id), None)
    if previous is None:
        detail = (
            f"only the current one has: {revisions[0].label}"
            if revisions
            else "the head has no record of any"
        )
        raise RequestError(
            "no other server has answered under this name",
            evidence=detail,
            hint="start one by its model: `vlaunch serve --model MODEL`",
        )
    if previous.image and image and previous.image != image:
        raise RequestError(
            f"{previous.label} ran with another image than the current `image:`",
            evidence=f"then {previous.image[:19]}, now {image[:19]}",
            hint=("restore `image:` in the inventory, run `vlaunch up`, then `vlaunch rollback`"),
        )
    return previous


def choose_previous_of_group(
    histories: Mapping[str, tuple[Sequence[ServerRevision], str]], image: str
) -> ServerRevision:
    """Return the spec to which all replicas of a server return, for replica 1; `histories` has the
    revisions and the current id of each, in order.

    Replicas that differ are those of an interrupted change, which begins with the first: of a
    rollback, which goes on, if the last one ran with the spec of the first before, else of a
    replacement.

    Raises:
        RequestError: there is none, or it used another image than the nodes have.
    """
    replicas = [_ReplicaHistory(name, *history) for name, history in histories.items()]
    source = _choose_after_interruption(replicas)
    if source is not None:
        previous = choose_previous(source.answered, "", image)
    else:
        source, older = _choose_with_other_form(replicas)
        previous = choose_previous(
            older or source.answered, "" if older else source.current_id, image
        )
    nodes = [replica.current.nodes for replica in replicas if replica.current]
    return replace(
        previous,
        port=previous.port - state.replica_number(source.name) + 1,
        nodes=tuple(dict.fromkeys(name for names in nodes for name in names)) if all(nodes) else (),
        gpus=None,
    )


class _ReplicaHistory:
    """Revisions of a replica, newest first, and its current one, if that has answered."""

    def __init__(self, name: str, revisions: Sequence[ServerRevision], current_id: str) -> None:
        self.name, self.revisions, self.current_id = name, revisions, current_id
        self.current = next((r for r in revisions if r.id == current_id), None)
        self.form = self.current.form if self.current else None

    @property
    def answered(self) -> list[ServerRevision]:
        """The current revision, if it has answered."""
        return [self.current] if self.current else []


def _choose_after_interruption(replicas: Sequence[_ReplicaHistory]) -> _ReplicaHistory | None:
    """Return the replica to whose current spec all return; None if their specs do not differ, or
    neither the first nor the last has answered.
    """
    first, *_, last = replicas
    if len({replica.form for replica in replicas}) == 1 or not (first.current or last.current):
        return None
    if first.current is None or last.current is None:
        return first if first.current else last
    continues_rollback = any(revision.form == first.form for revision in last.revisions)
    return first if continues_rollback else last


def _choose_with_other_form(
    replicas: Sequence[_ReplicaHistory],
) -> tuple[_ReplicaHistory, list[ServerRevision]]:
    """Return the first replica that ran in a form which none has now, and those revisions of it;
    else the first replica, and none.
    """
    current_forms = {replica.form for replica in replicas}
    for replica in replicas:
        if older := [r for r in replica.revisions if r.form not in current_forms]:
            return replica, older
    return replicas[0], []
