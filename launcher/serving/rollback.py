"""The server to return to, and the outcome of a return that follows a failed start."""

from dataclasses import replace
from datetime import datetime

from launcher.agent import state
from launcher.app.session import Session
from launcher.core.errors import (
    DeadlineError,
    GateError,
    NodeError,
    RequestError,
    ServerError,
    StoppedError,
    UnwatchedError,
    VlaunchError,
)
from launcher.core.transport import run_by_node
from launcher.tools.host.node_probes import probe_nodes
from launcher.tools.site import Site, history
from launcher.tools.site.history import ServerRevision
from launcher.tools.site.servers import Server


class RollbackSkipped(GateError):
    """Another operator has changed the server meanwhile."""


def choose_previous(
    session: Session, name: str | None, excluded_id: str = "", *, of_group: bool = False
) -> ServerRevision:
    """Return the last other server of a name that answered, or with `of_group` of all replicas
    behind it. Raises RequestError.
    """
    inventory, head = session.inventory, session.inventory.head.name
    facts = probe_nodes(inventory, session.transport, [inventory.image])
    site = Site(inventory, facts)
    name = history.choose_name(site, name)
    members = history.servers_with_file(site, state.DESIRED) if of_group else []
    members = sorted((m for m in members if state.group_of(m) == name), key=state.replica_number)
    names = members if len(members) > 1 else [name]
    answers = run_by_node(session.transport, [history.query_history(site, n) for n in names])
    histories = dict(zip(names, map(history.parse_history, answers[head]), strict=True))
    image = facts[head].images.get(inventory.image)
    identity = image.identity if image else ""
    if len(names) > 1:
        previous = history.choose_previous_of_group(histories, identity)
    else:
        revisions, current_id = histories[name]
        previous = history.choose_previous(revisions, excluded_id or current_id, identity)
    answered_at = datetime.fromtimestamp(previous.at).strftime("%Y-%m-%d %H:%M:%S")
    text = f"rolling back to {previous.label}, last ready at {answered_at}"
    session.note("rollback", text, data={"id": previous.id, "at": previous.at})
    return replace(previous, name=name)


def check_unchanged(
    current: Server | None, digest: str, requested_at: float | None, failure: VlaunchError
) -> None:
    """Raise RollbackSkipped if another operator has changed the server that failed to start.

    `current` is the server of its name now; `digest` is the id of the one that failed, and
    `requested_at` the time in its spec, None if none was written.
    """
    conflict, spec = "", current.desired if current is not None else None
    if requested_at is None:
        if current is not None and current.runs and current.id != digest:
            conflict = f"{current.model} is running ({current.label})"
    elif spec is None:
        # After a failed network check, this command stopped the server itself (GateError).
        if isinstance(failure, NodeError | ServerError | DeadlineError):
            conflict = "another operator has stopped it"
    elif spec.asked != requested_at:
        conflict = f"another operator has started {spec.model} there"
    if conflict:
        hint = "run `vlaunch status` and `vlaunch audit` to see what changed"
        raise RollbackSkipped(f"rollback skipped: {conflict}", hint=hint)


def rollback_error(
    failure: VlaunchError, previous: ServerRevision | None, error: VlaunchError
) -> GateError:
    """Return the error for a start that failed, and for its rollback, which failed too."""
    evidence, hint = [failure.evidence, error.evidence], _merge_hints(failure, error.hint)
    if isinstance(error, RollbackSkipped):
        outcome, evidence = error.message, evidence[:1]
    elif previous is None:
        outcome = f"rollback failed too: {error.message}"
    elif isinstance(error, StoppedError | UnwatchedError):
        outcome = f"{previous.label} was started again, but {error.message}"
    else:
        outcome = f"the previous server failed to start too: {error.message}"
    if isinstance(error, RequestError):  # nothing was changed: the failed server still runs
        hint = f"{failure.hint}\n{error.hint}".strip()
    return GateError(f"{failure.message}; {outcome}", evidence=evidence, hint=hint)


def rolled_back_error(
    failure: VlaunchError, model: str, previous: ServerRevision, *, ready: bool
) -> GateError:
    """Return the error for a start that failed, after the previous server was started again."""
    if not ready:  # Ctrl-C
        text = f"{failure.message}; {previous.label} was started again"
        return GateError(text, evidence=[failure.evidence], hint=_merge_hints(failure, ""))
    return GateError(
        f"{model} failed to start; rolled back to {previous.label}, which is ready",
        evidence=[failure.message, failure.evidence],
        hint=_merge_hints(failure, "try again with `vlaunch serve --replace`"),
    )


def _merge_hints(failure: VlaunchError, hint: str) -> str:
    """Return the hints that still apply: `vlaunch stop` would stop the replacement."""
    lines = [line for line in failure.hint.splitlines() if "`vlaunch stop" not in line]
    return "\n".join([*lines, *filter(None, [hint])])
