"""Start, change, add and remove the replicas of a server, for `serve --replicas` and `rollback`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from launcher.app import servers
from launcher.app.command import CommandContext
from launcher.app.hooks import Hooks
from launcher.app.session import Session
from launcher.core.domain import Node
from launcher.core.errors import GateError, RequestError, VlaunchError
from launcher.core.plan import Plan, Stage
from launcher.distribute import model_fetch
from launcher.front.update import follow_servers
from launcher.serving import endpoints, serve_forecast
from launcher.serving.replicas import choose_numbers, list_members, place_replicas, share_cluster
from launcher.serving.rollback_command import start_or_rollback
from launcher.serving.start import (
    PendingStart,
    StartSpec,
    announce,
    finish_start,
)
from launcher.serving.stop_plan import plan_forget, plan_stop
from launcher.tools.servers import Server
from launcher.tools.snapshot import ClusterSnapshot

_GRACE = 15.0  # seconds for a removed replica to exit politely


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """The start of one replica; `runs` means that a server of its name runs already."""

    spec: StartSpec
    pending: PendingStart
    runs: bool

    @property
    def attached(self) -> bool:
        """True if the replica stays as it is."""
        return self.pending.start.attached

    def stages(self, id: str) -> tuple[Stage, ...]:
        """Return the stages with an id, for this replica."""
        stages = (stage for stage in self.pending.start.plan.stages if stage.id == id)
        return tuple(replace(s, title=f"{s.title} for {self.spec.label}") for s in stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """All replicas that a server is to have, and those to remove."""

    starts: tuple[_Start, ...]
    removed: tuple[Server, ...]

    @property
    def new(self) -> list[_Start]:
        """Replicas that do not run yet."""
        return [start for start in self.starts if not start.runs]

    @property
    def changed(self) -> list[_Start]:
        """Replicas that run with another spec."""
        return [start for start in self.starts if start.runs and not start.attached]


def begin_replicas(
    call: CommandContext,
    session: Session,
    spec: StartSpec,
    snapshot: ClusterSnapshot,
    files: Plan,
) -> _PendingReplicas | None:
    """Start new replicas of a server, in a session that holds the cluster's lock, unless running
    ones are to be replaced first; print the script instead for a dry run.

    `files` updates the node programs. Raises VlaunchError, before any change if it can.
    """
    began, spec = time.monotonic(), replace(spec, partial=True)
    group = _plan_with_model(call, session, spec, snapshot)
    if call.dry_run:
        _print_script(call, files, group)
        return None
    if group.changed and spec.no_wait:
        raise RequestError(
            "--no-wait cannot replace replicas: each must answer before the next one stops",
            hint="omit `--no-wait`",
        )
    for start in group.starts:
        announce(
            session, start.pending.request, start.pending.start, skipped=spec.skip_network_check
        )
    if group.changed:
        for start in [*group.changed[1:], *group.new]:
            session.apply(Plan(verb="serve", stages=start.stages("preflight")))
    else:
        _create(session, group.new)
    return _PendingReplicas(call=call, spec=spec, group=group, began=began)


@dataclass(kw_only=True)
class _PendingReplicas:
    """Replicas of a server that start, or are about to be replaced."""

    call: CommandContext
    spec: StartSpec
    group: _Group
    began: float
    rows: dict[str, list[str]] = field(default_factory=dict)

    def finish(self, session: Session) -> tuple[int, list[str]]:
        """Replace running replicas one after another, start new ones, wait for all first answers,
        and stop those that are not needed; return what `start_server` returns.

        The first that does not answer returns to its old spec. Raises VlaunchError.
        """
        quiet = replace(session, hooks=Hooks(inventory=session.inventory, verb=""))
        code = self._replace_in_turn(quiet) or self._wait_for_answers(quiet)
        if code:
            return code, []
        if self.group.removed:
            with self.call.locked(session) as locked:
                _remove(locked, [server.name for server in self.group.removed])
        _report(session, self.spec, self.group, time.monotonic() - self.began)
        return 0, _merge_rows({s.spec.name: self.rows[s.spec.name] for s in self.group.starts})

    def _replace_in_turn(self, session: Session) -> int:
        """Replace running replicas, each after the answer of the one before, then start new ones.
        Returns the exit code.
        """
        if not self.group.changed:
            return 0
        running = [start for start in self.group.starts if start.runs]
        for number, start in enumerate(running):
            others = [s.spec.name for s in running[number + 1 :] if not s.attached]
            with _naming(start.spec, changed=list(self.rows), unchanged=others):
                code, rows = start_or_rollback(self.call, session, start.spec)
            if code:
                return code
            self.rows[start.spec.name] = rows
        with self.call.locked(session) as locked:
            snapshot = servers.query_cluster(locked, model=self.spec.model, planning=True)
            self.group = _plan_group(locked, self.spec, snapshot)
            if self.group.changed:
                text = f"another operator has changed {self.group.changed[0].spec.label} meanwhile"
                raise GateError(text, hint="see `vlaunch audit`")
            _create(locked, self.group.new)
        return 0

    def _wait_for_answers(self, session: Session) -> int:
        for start in self.group.starts:
            name = start.spec.name
            if name not in self.rows:
                with _naming(start.spec):
                    code, self.rows[name] = finish_start(session, start.spec, start.pending)
                if code:
                    return code
        return 0


def _plan_with_model(
    call: CommandContext,
    session: Session,
    spec: StartSpec,
    snapshot: ClusterSnapshot,
) -> _Group:
    """Plan all replicas, after copying their model to their nodes if required."""
    fetch = spec.fetch or session.inventory.models.spread == "auto"
    if not fetch:
        return _plan_group(session, spec, snapshot)
    unknown = spec.planned and (snapshot.config is None or not snapshot.weight_bytes)
    early = replace(spec, planned=False, tp=1, pp=1, dp=1) if unknown else spec
    group = _plan_group(session, early, snapshot)
    nodes = _rank_nodes(session, group)
    if call.dry_run:
        notes = (*spec.notes, *model_fetch.dry_run_notes(snapshot, spec.model, nodes))
        return _plan_group(session, replace(early, notes=notes), snapshot)
    started = [start for start in group.starts if not start.attached]
    if started and model_fetch.ensure_model(
        session, snapshot, spec.model, nodes, lambda: _plan_creation(started)
    ):
        snapshot = servers.query_cluster(session, model=spec.model, planning=True)
    return _plan_group(session, spec, snapshot)


def _rank_nodes(session: Session, group: _Group) -> Sequence[Node]:
    """Return the nodes on which the replicas may run."""
    requests = [start.pending.request for start in group.starts]
    if requests[0].backend == "ray":
        return session.inventory.nodes
    names = {name for request in requests for name, _ in request.placement.nodes}
    return [node for node in session.inventory.nodes if node.name in names]


def _plan_group(session: Session, spec: StartSpec, snapshot: ClusterSnapshot) -> _Group:
    """Place the replicas and plan their starts. Raises RequestError and PlacementError."""
    inventory, members = session.inventory, list_members(snapshot, spec.name)
    numbers = choose_numbers(members, spec.replicas)
    if spec.planned:
        share = share_cluster(spec, len(numbers), inventory)
        chosen = serve_forecast.apply_planned_layout(share, snapshot)
        tp, pp, dp = chosen.tp, chosen.pp, chosen.dp
        spec = replace(spec, planned=False, args=chosen.args, tp=tp, pp=pp, dp=dp)
    starts = list[_Start]()
    running = {server.name for server in members if server.runs}
    for placed in place_replicas(replace(spec, replicas=None), numbers, snapshot):
        checked = any(not other.attached for other in starts)  # the arguments are the same
        replica = replace(placed, check_flags=not checked)
        request, start = replica.plan_start(inventory, snapshot)
        plan = serve_forecast.plan_memory(snapshot, request)
        if plan is not None and not start.attached and not checked:
            serve_forecast.report_plan(session, plan, fixed=spec.has_fixed_layout(inventory))
        pending = PendingStart(snapshot, request, start, plan, 0.0)
        starts.append(_Start(spec=replica, pending=pending, runs=replica.name in running))
        if not start.attached:
            snapshot = snapshot.with_server(start.spec)
    names = {start.spec.name for start in starts}
    removed = tuple(server for server in members if server.name not in names)
    return _Group(starts=tuple(starts), removed=removed)


def _plan_creation(starts: Sequence[_Start]) -> Plan:
    """Return one plan for the starts of several replicas: all checks come first."""
    checks = [
        stage
        for start in starts
        # with Ray, a check covers all nodes
        if start is starts[0] or start.spec.backend == "mp"
        for stage in start.pending.start.plan.stages
        if stage.id not in ("preflight", "server")
    ]
    steps = tuple(step for start in starts for s in start.stages("server") for step in s.steps)
    title = "Create the server" if len(starts) == 1 else f"Create {len(starts)} servers"
    stages = (
        *(stage for start in starts for stage in start.stages("preflight")),
        *checks,
        Stage(id="server", title=title, steps=steps),
    )
    notes = dict.fromkeys(note for start in starts for note in start.pending.start.plan.notes)
    return Plan(verb="serve", stages=stages, notes=tuple(notes))


def _create(session: Session, starts: Sequence[_Start]) -> None:
    if starts:
        session.apply(_plan_creation(starts))
    follow_servers(session, verb="serve")


def _print_script(call: CommandContext, files: Plan, group: _Group) -> None:
    site = group.starts[0].pending.snapshot.site
    started = [start for start in group.starts if not start.attached]
    plans = [files, _plan_creation(started)] if started else [files]
    call.print_script([*plans, plan_stop(site, group.removed, _GRACE)])


@contextmanager
def _naming(
    spec: StartSpec, changed: Sequence[str] = (), unchanged: Sequence[str] = ()
) -> Iterator[None]:
    """Name the replica in errors, and the others that were changed already, or not yet."""
    try:
        yield
    except VlaunchError as error:
        if spec.label not in error.message:
            error.message = f"{spec.label}: {error.message}"
        for names, text in ((changed, "changed before"), (unchanged, "unchanged")):
            if names:
                line = f"{text}: {', '.join(f'`{name}`' for name in names)}"
                error.evidence = "\n".join(filter(None, [error.evidence, line]))
        if changed:
            error.exit_code = 1
        raise


def _remove(session: Session, names: Sequence[str]) -> None:
    """Stop replicas, or remove the records of failed ones."""
    snapshot = servers.query_cluster(session, head_only=True)
    site, listed = snapshot.site, snapshot.servers_state.servers
    removed = [server for server in listed if server.name in names and server.state != "stopped"]
    over = [server.name for server in removed if not server.runs]
    session.apply(plan_forget(site, over))
    session.apply(plan_stop(site, [server for server in removed if server.runs], _GRACE))
    follow_servers(session, verb="serve")


def _report(session: Session, spec: StartSpec, group: _Group, seconds: float) -> None:
    inventory = session.inventory
    names = [start.spec.name for start in group.starts]
    specs = [start.pending.start.spec for start in group.starts]
    urls = dict.fromkeys(url for s in specs for url in endpoints.client_urls(inventory, s))
    count = f"{len(names)} {'replica' if len(names) == 1 else 'replicas'}"
    verb = "is" if len(names) == 1 else "are"
    state = "starting; see `vlaunch status`" if spec.no_wait else "ready"
    listed = ", ".join(f"`{name}`" for name in names)
    at = f" at {next(iter(urls))}" if inventory.front else f" ({listed})"
    text = f"{count} of {spec.model} {verb} {state}{at}"
    if group.removed:
        text += f"; removed {', '.join(f'`{server.name}`' for server in group.removed)}"
    data = {
        "endpoint": next(iter(urls)),
        "endpoints": [*urls],
        "servers": names,
        "removed": [server.name for server in group.removed],
    }
    session.done(text, stage="serve", seconds=seconds, data=data)


def _merge_rows(rows: dict[str, list[str]]) -> list[str]:
    """Return all rows of the first replica, then those in which the others differ."""
    merged = list[str]()
    for name, own in rows.items():
        title = [f"{'server':<12} {name}"] if len(rows) > 1 and len(own) > 1 else []
        merged += [*title, *(row for row in own if row not in merged)]
    return merged
