"""Run of a start up to the first answers, for `serve` and `rollback`."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from launcher.app import servers
from launcher.app.command import CommandContext
from launcher.app.session import Session
from launcher.app.terminal import print_field
from launcher.core.errors import (
    ConnectError,
    GateError,
    HookError,
    LockError,
    RequestError,
    StoppedError,
    UnreadableAnswer,
    UnwatchedError,
    VlaunchError,
)
from launcher.core.plan import Plan
from launcher.distribute import model_fetch
from launcher.front.update import follow_servers
from launcher.serving import network_gate, rollback, start_view
from launcher.serving.start import Replica, Replicas, plan_replicas
from launcher.serving.start_spec import StartSpec, supervision_policy
from launcher.serving.stop_plan import plan_forget, plan_stop
from launcher.serving.watch import watch_start
from launcher.tools.site.history import ServerRevision
from launcher.tools.site.snapshot import ClusterSnapshot

_GRACE = 15.0  # seconds for a removed replica to exit politely
# Nothing was changed; or an operator stopped the server, or its state is unknown.
_UNCHANGED = (RequestError, LockError, HookError)
_UNKNOWN = (StoppedError, UnwatchedError, ConnectError, UnreadableAnswer)


@dataclass(kw_only=True)
class StartRun:
    """The start of a server's replicas and its results: the rows to print for each, and the exit
    code, 130 after Ctrl-C.
    """

    call: CommandContext
    session: Session
    replicas: Replicas | None = None  # created, or to be replaced in turn; None in a dry run
    rows: dict[str, list[str]] = field(default_factory=dict)
    code: int = 0
    fetch_seconds: float = 0.0
    began: float = 0.0

    def run(self, spec: StartSpec, *, or_rollback: bool = False) -> None:
        """Check the network, start the server and wait for its first answer; print the script
        instead for a dry run.

        With `or_rollback`, a server that does not answer is replaced by the previous one, unless
        another operator has intervened; each of several replicas returns to its own. Raises
        VlaunchError if the new server did not answer, even if the previous one does again.
        """
        try:
            # The lock is released before the wait: a model may load for long.
            with self.call.locked(self.session) as locked:
                self.create(locked, spec)
            self.finish(spec)
        except VlaunchError as failure:
            several = spec.replicas or (self.replicas and self.replicas.grouped)
            if not or_rollback or several or isinstance(failure, _UNCHANGED + _UNKNOWN):
                raise
            self._roll_back(spec, failure)

    def create(self, locked: Session, spec: StartSpec) -> None:
        """Update the node programs, copy the model if required, and create the servers, in a
        session that holds the cluster's lock; print the script instead for a dry run.

        If replicas are to be replaced, their checks and those of new ones are all that is done.
        Raises VlaunchError, before any change if it can.
        """
        inventory, dry_run = locked.inventory, self.call.dry_run
        if not spec.partial:
            locked.hooks.run_pre(locked.printer, **spec.hook_variables(inventory))
        snapshot, files = servers.update_and_query(
            locked, verb="serve", dry_run=dry_run, model=spec.model, planning=True
        )
        if not dry_run:
            servers.require_servers(locked, snapshot)
        self.began = time.monotonic()
        if not spec.fetch and inventory.models.spread != "auto":
            self._start(locked, plan_replicas(spec, snapshot, requested_at=time.time()), files)
        else:
            self._start_with_model(locked, spec, snapshot, files)

    def _start_with_model(
        self, locked: Session, spec: StartSpec, snapshot: ClusterSnapshot, files: Plan
    ) -> None:
        """Copy the model to the nodes that lack it, then create the servers; a dry run notes it."""
        early = plan_replicas(spec, snapshot, requested_at=time.time(), guess=True)
        guess = False
        if self.call.dry_run:  # it shows several replicas with the guess
            notes = model_fetch.dry_run_notes(snapshot, spec.model, early.nodes)
            spec, guess = replace(spec, notes=(*spec.notes, *notes)), early.grouped
        elif early.started:  # a running server has its model
            self.fetch_seconds = model_fetch.ensure_model(
                locked, snapshot, spec.model, early.nodes, early.creation_plan
            )
            if self.fetch_seconds:
                snapshot = servers.query_cluster(locked, model=spec.model, planning=True)
        replicas = plan_replicas(spec, snapshot, requested_at=time.time(), guess=guess)
        self._start(locked, replicas, files)

    def _start(self, locked: Session, replicas: Replicas, files: Plan) -> None:
        """Create the servers, or check those to be replaced in turn; a dry run prints the script.

        Raises VlaunchError.
        """
        start_view.report_forecast(locked, replicas)
        if self.call.dry_run:
            removal = plan_stop(replicas.site, replicas.removed, _GRACE)
            self.call.print_script([files, replicas.creation_plan(), removal])
            return
        if replicas.in_turn and replicas.spec.no_wait:
            raise RequestError(
                "--no-wait cannot replace replicas: each must answer before the next one stops",
                hint="omit `--no-wait`",
            )
        for replica in replicas.listed:
            start_view.announce(locked, replica)
        if replicas.in_turn:
            locked.apply(replicas.waiting_checks())
        else:
            locked.apply(replicas.creation_plan())
            follow_servers(locked, verb="serve")
        self.replicas = replicas

    def finish(self, spec: StartSpec) -> None:
        """Replace running replicas one after another, wait for all first answers, and stop those
        that are not needed. The first that does not answer returns to its old spec.

        Raises VlaunchError.
        """
        if self.replicas is None:
            return
        if self.replicas.in_turn:
            self._replace_in_turn(spec, self.replicas)
        grouped, removed = self.replicas.grouped, self.replicas.removed
        for replica in self.replicas.listed:
            if self.code == 0 and replica.spec.name not in self.rows:
                with _naming(replica.spec if grouped else None):
                    self.await_answer(replica)
        if self.code:
            return
        if removed:
            with self.call.locked(self.session) as locked:
                _remove(locked, [server.name for server in removed])
        if grouped:
            start_view.report_group(self.session, self.replicas, time.monotonic() - self.began)
        if not spec.no_wait and not spec.partial:
            values = spec.hook_variables(self.session.inventory)
            self.session.hooks.run_post(self.session.printer, **values)

    def _replace_in_turn(self, spec: StartSpec, replicas: Replicas) -> None:
        """Replace running replicas, each after the answer of the one before, then create new ones.

        Raises VlaunchError.
        """
        running = [replica for replica in replicas.listed if replica.runs]
        for number, replica in enumerate(running):
            others = [r.spec.name for r in running[number + 1 :] if r.in_turn]
            turn = StartRun(call=self.call, session=self.session)
            with _naming(replica.spec, changed=list(self.rows), unchanged=others):
                turn.run(replica.spec, or_rollback=True)
            self.code = turn.code
            if self.code:
                return
            self.rows |= turn.rows
        with self.call.locked(self.session) as locked:
            snapshot = servers.query_cluster(locked, model=spec.model, planning=True)
            self.replicas = plan_replicas(spec, snapshot, requested_at=time.time())
            if self.replicas.in_turn:
                label = self.replicas.in_turn[0].spec.label
                text = f"another operator has changed {label} meanwhile"
                raise GateError(text, hint="see `vlaunch audit`")
            start_view.report_forecast(locked, self.replicas)
            locked.apply(self.replicas.creation_plan())
            follow_servers(locked, verb="serve")

    def await_answer(self, replica: Replica) -> None:
        """Wait for a server's first answer, and report it; raises the errors of `watch_start`."""
        session, spec, start = self.session, replica.spec, replica.start
        if spec.no_wait:
            self.rows[spec.name] = start_view.report_started(session, replica)
            return
        of_server = f" of {spec.label}" if spec.partial else ""
        session.begin("serve", f"Wait for the first answer{of_server}")
        try:
            served = session.show(
                watch_start(
                    replica.site,
                    start.spec,
                    session.transport,
                    timeout=spec.policy.start_timeout,
                    attached=start.attached,
                )
            )
        except KeyboardInterrupt:
            text = (
                f"stopped watching; server `{spec.name}` keeps running. Watch it again with the"
                f" same command, or stop it: `vlaunch stop {spec.name}`"
            )
            session.warn("serve", text)
            self.code = 130
            return
        site, allow = replica.site, spec.skip_network_check
        transport = network_gate.read_transport(session, site, replica.request, start, allow=allow)
        network_gate.enforce_transport(session, site, start, transport, allow=allow)
        fetched = 0.0 if spec.partial else self.fetch_seconds
        network = transport.summary
        self.rows[spec.name] = start_view.report_ready(session, replica, served, network, fetched)

    def _roll_back(self, spec: StartSpec, failure: VlaunchError) -> None:
        """Return to the previous server unless another operator intervened; raise the full
        error.
        """
        session, name = self.session, spec.name
        session.warn("serve", f"{spec.model} failed to start: {failure.message}")
        digest = spec.build_request(session.inventory, None).digest
        requested_at = self.replicas.listed[0].start.spec.asked if self.replicas else None
        call = replace(self.call, lock_wait=max(self.call.lock_wait, 60))
        retry = StartRun(call=call, session=session)
        previous: ServerRevision | None = None
        try:
            with call.locked(session) as locked:
                snapshot = servers.query_cluster(locked, head_only=True)
                servers.require_servers(locked, snapshot)
                listed = {server.name: server for server in snapshot.servers_state.servers}
                rollback.check_unchanged(listed.get(name), digest, requested_at, failure)
                previous = rollback.choose_previous(locked, name, digest)
                again = replace(
                    spec,
                    **previous.spec_fields(),
                    replace_other=True,
                    unsupervised=False,
                    planned=False,
                    notes=(),
                    policy=supervision_policy(session.inventory, spec.policy.start_timeout),
                )
                retry.create(locked, again)
            retry.finish(again)
        except VlaunchError as error:
            raise rollback.rollback_error(failure, previous, error) from failure
        ready = retry.code == 0
        raise rollback.rolled_back_error(failure, spec.model, previous, ready=ready) from failure

    def print_rows(self) -> None:
        """Print the rows of all servers, after the progress display has closed."""
        if self.replicas is not None and self.code == 0 and not self.call.as_json:
            order = {r.spec.name: self.rows[r.spec.name] for r in self.replicas.listed}
            for row in start_view.merge_rows(order):
                print_field(row)


@contextmanager
def _naming(
    spec: StartSpec | None, changed: Sequence[str] = (), unchanged: Sequence[str] = ()
) -> Iterator[None]:
    """Name the replica in errors, and the others that were changed already, or not yet."""
    try:
        yield
    except VlaunchError as error:
        if spec is not None and spec.label not in error.message:
            error.message = f"{spec.label}: {error.message}"
        for names, text in ((changed, "changed before"), (unchanged, "unchanged")):
            if names:
                line = f"{text}: {', '.join(f'`{name}`' for name in names)}"
                error.evidence = "\n".join(filter(None, [error.evidence, line]))
        if changed:
            error.exit_code = 1
        raise


def _remove(locked: Session, names: Sequence[str]) -> None:
    """Stop replicas, or remove the records of failed ones."""
    snapshot = servers.query_cluster(locked, head_only=True)
    site, listed = snapshot.site, snapshot.servers_state.servers
    removed = [server for server in listed if server.name in names and server.state != "stopped"]
    over = [server.name for server in removed if not server.runs]
    locked.apply(plan_forget(site, over))
    locked.apply(plan_stop(site, [server for server in removed if server.runs], _GRACE))
    follow_servers(locked, verb="serve")
