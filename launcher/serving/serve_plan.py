"""Plan of a start: from a request and a snapshot to the steps that create a server.

`launcher/serving/watch.py` waits for the server.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.agent.desired import Desired, Policy
from launcher.core.errors import RequestError
from launcher.core.plan import Gate, Plan, Stage
from launcher.serving import server_spec
from launcher.serving import start_gates as room
from launcher.serving.serve_request import ServeRequest
from launcher.tools.engine_flags.gates import command_gate
from launcher.tools.site.servers import OTHER_VERSION, Server
from launcher.tools.site.snapshot import ClusterSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """A plan and the server's spec: the new one, or the running one's if `attached`."""

    plan: Plan
    spec: Desired
    attached: bool = False


def plan_serve(
    snapshot: ClusterSnapshot,
    request: ServeRequest,
    *,
    requested_at: float,
    policy: Policy,
    check_stages: Sequence[Stage] = (),
    notes: Sequence[str] = (),
    replace_other: bool = False,
    require_unsupervised: bool = False,
    check_flags: bool = True,
) -> StartPlan:
    """Plan to write the server's spec, unless the same server runs already. `check_stages` come
    first; `notes` are added to the plan's. Without `check_flags`, vLLM's arguments are known to be
    valid.

    A running server with another supervision policy is watched as it is, unless it is to be
    replaced; with `require_unsupervised`, a supervised one is an error. `requested_at` is in
    seconds since 1970.

    Raises:
        RequestError: another server of this name runs, and it is not to be replaced.
    """
    running = {server.name: server for server in snapshot.servers_state.running}
    existing = running.get(request.name)
    if existing is not None:
        attached = _attach(existing, request, policy, replace_other, require_unsupervised)
        if attached is not None:
            return attached
    spec = server_spec.build_spec(snapshot, request, requested_at=requested_at, policy=policy)
    gates: tuple[Gate, ...] = ()
    if snapshot.site.facts:
        first, site = spec.processes[0], snapshot.site
        node = site.inventory.node(first.node)
        gates = room.start_gates(snapshot, request, existing)
        if check_flags:
            gates = (*gates, command_gate(site, node, first.argv, request.env))
    write = server_spec.write_spec(snapshot.site, spec)
    stages = (
        Stage(id="preflight", title="Check the cluster and the model", gates=gates),
        *check_stages,
        Stage(id="server", title="Create the server", steps=(write,)),
    )
    plan = Plan(verb="serve", stages=stages, notes=(*_start_notes(request, existing), *notes))
    return StartPlan(plan=plan, spec=spec)


def _attach(
    existing: Server,
    request: ServeRequest,
    policy: Policy,
    replace: bool,
    require_unsupervised: bool,
) -> StartPlan | None:
    """Return the plan to watch the running server of this name; `None` if a new one is to replace
    it.

    Raises RequestError if it is another server, of another version of vlaunch, or a supervised one
    despite `require_unsupervised`, and is not to be replaced.
    """
    if existing.unreadable and not replace:
        raise RequestError(
            f"{existing.label} may be running: {OTHER_VERSION}",
            hint="stop it and take its place: add `--replace`",
        )
    if existing.desired is None:
        return None
    if existing.id != request.digest:
        if replace:
            return None
        raise RequestError(
            f"{existing.label} is already running {existing.model}",
            hint=(
                "start this one beside it: `--name NAME`; or stop the running one and take its"
                " place: `--replace`"
            ),
        )
    difference = _supervision_difference(existing.desired.policy, policy)
    if difference and replace:
        return None
    if difference and require_unsupervised and existing.desired.policy.restarts != 0:
        raise RequestError(
            f"{request.model} is already running ({existing.label}), and {difference}",
            hint=(
                "stop it and start it unsupervised: add `--replace`\nwatch it as it is:"
                " omit `--no-supervise`"
            ),
        )
    notes = (f"{difference}; `--replace` restarts it with the new settings",) if difference else ()
    plan = Plan(verb="serve", stages=(), notes=notes)
    return StartPlan(plan=plan, spec=existing.desired, attached=True)


def _supervision_difference(current: Policy, requested: Policy) -> str:
    """Describe how a running server's supervision differs; its start timeout does not count."""
    if current.restarts == requested.restarts == 0:
        return ""
    if requested.restarts == 0:
        return "it is supervised"
    if current.restarts == 0:
        return "supervision is off: it will not restart after a failure"
    differences = [
        f"{name} {_format_limit(old)} instead of {_format_limit(new)}"
        for name in ("restarts", "canary", "stuck")
        if (old := getattr(current, name)) != (new := getattr(requested, name))
    ]
    return f"it was started with {', '.join(differences)}" if differences else ""


def _format_limit(value: float | None) -> str:
    return "unlimited" if value is None else f"{value:g}"


def _start_notes(request: ServeRequest, existing: Server | None) -> tuple[str, ...]:
    """Describe the placement, and the server that is stopped for it."""
    placement = request.placement
    expected = ", ".join(f"{count} on {name}" for name, count in placement.nodes)
    return (
        *(
            [f"{existing.label} ({existing.model}) will be stopped once all checks have passed"]
            if existing
            else []
        ),
        f"{placement.label} ({placement.why}): ranks expected {expected}",
        *_replica_notes(request),
        *placement.warnings,
    )


def _replica_notes(request: ServeRequest) -> Iterator[str]:
    """Describe the load balancing between replicas, if there are several."""
    placement = request.placement
    if placement.dp == 1:
        return
    counts = ", ".join(f"{count} on {name}" for name, count in placement.replicas if count)
    if request.balancing == "internal" or len(placement.nodes) == 1:
        balanced = "behind one endpoint; vLLM balances the requests"
        yield f"{placement.dp} replicas ({counts}) {balanced}"
        return
    yield (
        f"{placement.dp} replicas ({counts}) with one endpoint per node: balance requests with"
        " your own load balancer"
    )
    if placement.experts == 0:
        yield (
            "replicas of a dense model are independent: with one server per node"
            " (`--name`, `--nodes`), one restarts without the others"
        )
