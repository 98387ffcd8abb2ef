"""`vlaunch rollback`: return to the previous server of a name that answered."""

from dataclasses import replace
from datetime import datetime

import click

from launcher.agent import state
from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.session import Session
from launcher.app.terminal import print_field
from launcher.core.errors import (
    ConnectError,
    DeadlineError,
    GateError,
    HookError,
    LockError,
    NodeError,
    RequestError,
    ServerError,
    StoppedError,
    UnreadableAnswer,
    UnwatchedError,
    VlaunchError,
)
from launcher.core.transport import run_by_node
from launcher.serving.start import (
    PendingGroup,
    PendingStart,
    StartSpec,
    begin_start,
    finish_start,
    start_options,
    supervision_policy,
)
from launcher.tools import history
from launcher.tools.history import ServerRevision
from launcher.tools.node_probes import probe_nodes
from launcher.tools.site import Site


@command(
    flags=[
        options.FETCH,
        options.PAIR_TIMEOUT,
        options.DRY_RUN,
        options.LOCK_WAIT,
        options.NO_HOOKS,
        options.JSON,
    ]
)
@start_options
@options.SERVER_OR_NAME
@click.argument("name", metavar="[NAME]", required=False)
def rollback(
    call: CommandContext,
    skip_network_check: bool,
    timeout: float | None,
    no_wait: bool,
    server: str | None,
    name: str | None,
) -> int:
    """Return to the last server that worked, and wait for its first answer.

    Model, arguments and parallelism are those of that server; the head stores the last five servers
    that answered for each NAME. The current server of this name is stopped; its replicas return one
    after another, `NAME.2` only this one. NAME can be omitted if there is one server. The hooks are
    those of `serve`.
    """
    (name,) = options.merge_names(server, [name] if name else []) or (None,)
    with call.session(hooks_of="serve") as session:
        with call.locked(session) as locked:
            spec = StartSpec(
                **_choose_previous(locked, name, of_group=True).spec_fields(),
                replace_other=True,
                skip_network_check=skip_network_check,
                pair_timeout=call.pair_timeout,
                fetch=call.fetch,
                no_wait=no_wait,
                policy=supervision_policy(call.inventory, timeout),
            )
            session.hook_values.update(spec.hook_variables(call.inventory))
            pending = begin_start(call, locked, spec)
        code, rows = finish_start(session, spec, pending)
    if not call.as_json:
        for row in rows:
            print_field(row)
    return code


def start_or_rollback(
    call: CommandContext, session: Session, spec: StartSpec
) -> tuple[int, list[str]]:
    """Start a server as `start_server` does; if it does not answer, return to the previous one.

    Changes that another operator made meanwhile stay. Raises VlaunchError if the new server did not
    answer, even if the previous one does again.
    """
    pending: PendingStart | PendingGroup | None = None
    try:
        with call.locked(session) as locked:
            pending = begin_start(call, locked, spec)
        return finish_start(session, spec, pending)
    except (RequestError, LockError, HookError):
        raise  # nothing was changed
    except (StoppedError, UnwatchedError, ConnectError, UnreadableAnswer):
        raise  # an operator stopped it, or its state is unknown
    except VlaunchError as error:
        if spec.replicas or not isinstance(pending, PendingStart | None):
            raise  # each replica has returned to its old spec
        failure = error
    session.warn("serve", f"{spec.model} failed to start: {failure.message}")
    patient_call = replace(call, lock_wait=max(call.lock_wait, 60))
    raise _roll_back(patient_call, session, spec, pending, failure) from failure


def _roll_back(
    call: CommandContext,
    session: Session,
    spec: StartSpec,
    pending: PendingStart | None,
    failure: VlaunchError,
) -> VlaunchError:
    """Return to the previous server unless another operator intervened; return the full error."""
    digest, evidence = spec.build_request(session.inventory, None).digest, [failure.evidence]
    previous: ServerRevision | None = None
    try:
        with call.locked(session) as locked:
            if conflict := _conflicting_server(locked, spec.name, digest, pending, failure):
                outcome = f"rollback skipped: {conflict}"
                hint = "run `vlaunch status` and `vlaunch audit` to see what changed"
                hint, text = _merge_hints(failure, hint), f"{failure.message}; {outcome}"
                return GateError(text, evidence=evidence, hint=hint)
            previous = _choose_previous(locked, spec.name, digest)
            retry_spec = replace(
                spec,
                **previous.spec_fields(),
                replace_other=True,
                unsupervised=False,
                planned=False,
                notes=(),
                policy=supervision_policy(session.inventory, spec.policy.start_timeout),
            )
            retry = begin_start(call, locked, retry_spec)
        code, _ = finish_start(session, retry_spec, retry)
    except VlaunchError as error:
        evidence.append(error.evidence)
        hint = _merge_hints(failure, error.hint)
        if previous is None:
            outcome = f"rollback failed too: {error.message}"
        elif isinstance(error, (StoppedError, UnwatchedError)):
            outcome = f"{previous.label} was started again, but {error.message}"
        else:
            outcome = f"the previous server failed to start too: {error.message}"
        if isinstance(error, RequestError):  # nothing was changed: the failed server still runs
            hint = f"{failure.hint}\n{error.hint}".strip()
    else:
        if code == 0:
            return GateError(
                f"{spec.model} failed to start; rolled back to {previous.label}, which is ready",
                evidence=[failure.message, failure.evidence],
                hint=_merge_hints(failure, "try again with `vlaunch serve --replace`"),
            )
        outcome, hint = f"{previous.label} was started again", _merge_hints(failure, "")  # Ctrl-C
    return GateError(f"{failure.message}; {outcome}", evidence=evidence, hint=hint)


def _conflicting_server(
    session: Session, name: str, digest: str, pending: PendingStart | None, failure: VlaunchError
) -> str:
    """Describe another operator's change to the server; empty if it may be replaced."""
    from launcher.app import servers as server

    snapshot = server.query_cluster(session, head_only=True)
    server.require_servers(session, snapshot)
    current = {server.name: server for server in snapshot.servers_state.servers}.get(name)
    if pending is None:  # no spec was written
        if current is None or not current.runs or current.id == digest:
            return ""
        return f"{current.model} is running ({current.label})"
    spec = current.desired if current is not None else None
    if spec is None:
        # After a failed network check, this command stopped the server itself (GateError).
        start_failed = isinstance(failure, (NodeError, ServerError, DeadlineError))
        return "another operator has stopped it" if start_failed else ""
    same_start = spec.asked == pending.start.spec.asked
    return "" if same_start else f"another operator has started {spec.model} there"


def _merge_hints(failure: VlaunchError, hint: str) -> str:
    """Return the hints that still apply: `vlaunch stop` would stop the replacement."""
    lines = [line for line in failure.hint.splitlines() if "`vlaunch stop" not in line]
    return "\n".join([*lines, *filter(None, [hint])])


def _choose_previous(
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
