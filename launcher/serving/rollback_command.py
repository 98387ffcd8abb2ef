"""`vlaunch rollback`: return to the server that answered before the present one of its name."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import click

from launcher.app import options
from launcher.app.command import Call, command
from launcher.app.session import Session
from launcher.app.terminal import field
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
from launcher.core.transport import by_node
from launcher.serving.start import Begun, StartSpec, begin, finish, flags, policy
from launcher.tools import history
from launcher.tools.history import Answered
from launcher.tools.observe import observe
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
@flags
@click.argument("name", metavar="[NAME]", required=False)
def rollback(
    call: Call, skip_network_check: bool, timeout: float | None, no_wait: bool, name: str | None
) -> int:
    """Start the server that answered last, other than the one that is wanted now, and wait until it
    has answered again.

    Model, arguments and split are those of then; of each NAME the head keeps them of the last five
    that have answered. What runs now under that name is stopped; with one server, none need be
    named. The hooks are those of `serve`.
    """
    with call.session(hooks_of="serve") as session:
        with call.locked(session) as ours:
            spec = StartSpec(
                **_choose(ours, name).spec_fields(),
                replace_other=True,
                skip_network_check=skip_network_check,
                pair_timeout=call.pair_timeout,
                fetch=call.fetch,
                no_wait=no_wait,
                policy=policy(call.inventory, timeout),
            )
            session.told.update(spec.about(call.inventory))
            begun = begin(call, ours, spec)
        code, rows = finish(session, spec, begun)
    if not call.as_json:
        for row in rows:
            field(row)
    return code


def or_back(call: Call, session: Session, spec: StartSpec) -> tuple[int, list[str]]:
    """Start a server as `start` does; when it does not answer, return to the one that answered
    before.

    What another operator stopped or started meanwhile stays.

    Raises VlaunchError when it did not answer, whether the other one does again or not.
    """
    begun: Begun | None = None
    try:
        with call.locked(session) as ours:
            begun = begin(call, ours, spec)
        return finish(session, spec, begun)
    except (RequestError, LockError, HookError):
        raise  # nothing was touched
    except (StoppedError, UnwatchedError, ConnectError, UnreadableAnswer):
        raise  # an operator stopped it, or its state is not known
    except VlaunchError as error:
        failed = error
    session.warn("serve", f"{spec.model} does not answer: {failed.message}")
    patient = replace(call, lock_wait=max(call.lock_wait, 60))
    raise _back(patient, session, spec, begun, failed) from failed


def _back(
    call: Call, session: Session, spec: StartSpec, begun: Begun | None, failed: VlaunchError
) -> VlaunchError:
    """Return to the server before, unless another operator changed what runs; returns the error
    that reports both.
    """
    digest, evidence = spec.request(session.inventory, None).digest, [failed.evidence]
    before: Answered | None = None
    try:
        with call.locked(session) as ours:
            if other := _another(ours, spec.name, digest, begun, failed):
                then = f"nothing was rolled back, for {other}"
                hint = "see what runs, and who did what: `vlaunch status`, `vlaunch audit`"
                return GateError(
                    f"{failed.message}; {then}", evidence=evidence, hint=_hint(failed, hint)
                )
            before = _choose(ours, spec.name, digest)
            again = replace(
                spec,
                **before.spec_fields(),
                replace_other=True,
                unsupervised=False,
                planned=False,
                notes=(),
                policy=policy(session.inventory, spec.policy.start_timeout),
            )
            started = begin(call, ours, again)
        code, _ = finish(session, again, started)
    except VlaunchError as error:
        evidence.append(error.evidence)
        hint = _hint(failed, error.hint)
        if before is None:
            then = f"and there was no way back: {error.message}"
        elif isinstance(error, (StoppedError, UnwatchedError)):
            then = f"{before.what} was started again, and {error.message}"
        else:
            then = f"and the server before does not answer either: {error.message}"
        if isinstance(error, RequestError):  # nothing was touched: the failed server still runs
            hint = f"{failed.hint}\n{error.hint}".strip()
    else:
        if code == 0:
            return GateError(
                f"{spec.model} did not answer, so {before.what} answers again",
                evidence=[failed.message, failed.evidence],
                hint=_hint(failed, "try again with `vlaunch serve --replace`"),
            )
        then, hint = f"{before.what} was started again", _hint(failed, "")  # Ctrl-C
    return GateError(f"{failed.message}; {then}", evidence=evidence, hint=hint)


def _another(
    session: Session, name: str, digest: str, begun: Begun | None, failed: VlaunchError
) -> str:
    """Return in words what became of the server of that name that is not ours that failed; empty
    when it may be replaced.
    """
    from launcher.app import servers as server

    snapshot = server.look(session, head_only=True)
    server.require_servers(session, snapshot)
    there = {server.name: server for server in snapshot.kept.servers}.get(name)
    if begun is None:  # nothing was written down
        if there is None or not there.runs or there.id == digest:
            return ""
        return f"{there.model} runs ({there.what})"
    wanted = there.desired if there is not None else None
    if wanted is None:
        # One whose network is below what is required was stopped by ourselves, and its error
        # is a gate's.
        broken = isinstance(failed, (NodeError, ServerError, DeadlineError))
        return "somebody has stopped it meanwhile" if broken else ""
    ours = wanted.asked == begun.start.desired.asked
    return "" if ours else f"{wanted.model} is wanted there now"


def _hint(failed: VlaunchError, then: str) -> str:
    """Return what still helps against a failure: `vlaunch stop` would end the server that runs in
    its place.
    """
    lines = [line for line in failed.hint.splitlines() if "`vlaunch stop" not in line]
    return "\n".join([*lines, *filter(None, [then])])


def _choose(session: Session, name: str | None, without: str = "") -> Answered:
    """Return the server that answered last under a name, other than the present one, or the one
    `without`. Raises RequestError.
    """
    inventory, head = session.inventory, session.inventory.head.name
    facts = observe(inventory, session.transport, [inventory.image])
    site = Site(inventory, facts)
    name = history.pick(site, name)
    answers = by_node(session.transport, [history.ask(site, name)])
    answered, present = history.read(answers[head][0])
    image = facts[head].images.get(inventory.image)
    before = history.choose(answered, without or present, image.identity if image else "")
    when = datetime.fromtimestamp(before.at).strftime("%Y-%m-%d %H:%M:%S")
    text = f"back to {before.what}, which answered last at {when}"
    session.note("rollback", text, data={"id": before.id, "at": before.at})
    return replace(before, name=name)
