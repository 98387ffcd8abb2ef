"""Plan of a start: from a spec and a snapshot to the replicas of a server. One server is a list of
one. `run_start.py` runs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.core.domain import Node
from launcher.core.plan import Plan, Stage
from launcher.serving import network_gate, serve_forecast
from launcher.serving.replicas import choose_numbers, list_members, place_replicas
from launcher.serving.serve_forecast import ServePlan
from launcher.serving.serve_plan import StartPlan, plan_serve
from launcher.serving.serve_request import ServeRequest
from launcher.serving.start_spec import StartSpec
from launcher.tools.site import Site
from launcher.tools.site.placement import narrow_inventory
from launcher.tools.site.servers import Server
from launcher.tools.site.snapshot import ClusterSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One server to start: its spec, its placement, the plan of its start, and the planner's
    forecast.

    With `runs`, it is one of several, and a server of its name runs already.
    """

    site: Site
    spec: StartSpec
    request: ServeRequest
    start: StartPlan
    forecast: ServePlan | None
    runs: bool

    @property
    def in_turn(self) -> bool:
        """True if it replaces the running server, once the replicas before it have answered."""
        return self.runs and not self.start.attached


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """All replicas that a server is to have, by their numbers, and those to remove; `spec` is that
    of the whole server, with the planner's layout. A server that is not `grouped` is a list of one.
    """

    spec: StartSpec
    listed: tuple[Replica, ...]
    removed: tuple[Server, ...] = ()
    grouped: bool

    @property
    def started(self) -> list[Replica]:
        """Replicas that do not run with this spec yet."""
        return [replica for replica in self.listed if not replica.start.attached]

    @property
    def in_turn(self) -> list[Replica]:
        """Replicas that run with another spec, and are replaced one after another."""
        return [replica for replica in self.listed if replica.in_turn]

    @property
    def site(self) -> Site:
        """The cluster."""
        return self.listed[0].site

    @property
    def nodes(self) -> Sequence[Node]:
        """Nodes on which the ranks may run."""
        inventory = self.site.inventory
        if self.spec.backend == "ray":
            return inventory.nodes
        if self.spec.planned:  # the planner has not chosen yet
            return narrow_inventory(inventory, self.spec.nodes).nodes
        names = {name for r in self.listed for name, _ in r.request.placement.nodes}
        return [node for node in inventory.nodes if node.name in names]

    def creation_plan(self) -> Plan:
        """Return one plan for all starts, with all checks first."""
        started = self.started
        network = [
            stage
            for replica in started
            # with Ray, a check covers all nodes
            if replica is started[0] or replica.spec.backend == "mp"
            for stage in replica.start.plan.stages
            if stage.id not in ("preflight", "server")
        ]
        create = [s for replica in started for s in replica.start.plan.stages if s.id == "server"]
        title = "Create the server" if len(started) == 1 else f"Create {len(started)} servers"
        steps = tuple(step for stage in create for step in stage.steps)
        last = Stage(id="server", title=title, steps=steps)
        stages = (*self._preflight(started), *network, last) if started else ()
        notes = dict.fromkeys(note for r in self.listed for note in r.start.plan.notes)
        return Plan(verb="serve", stages=stages, notes=tuple(notes))

    def waiting_checks(self) -> Plan:
        """Return the checks of all starts but the first in turn, which has its own soon after."""
        waiting = [replica for replica in self.started if replica is not self.in_turn[0]]
        return Plan(verb="serve", stages=self._preflight(waiting))

    def _preflight(self, replicas: Sequence[Replica]) -> tuple[Stage, ...]:
        return tuple(
            replace(stage, title=f"{stage.title} for {r.spec.label}") if self.grouped else stage
            for r in replicas
            for stage in r.start.plan.stages
            if stage.id == "preflight"
        )


def plan_replicas(
    spec: StartSpec, snapshot: ClusterSnapshot, *, requested_at: float, guess: bool = False
) -> Replicas:
    """Place the replicas of a server and plan their starts. `requested_at` is in seconds since
    1970. With `guess`, a server whose layout cannot be planned before its model is stored needs at
    least a GPU and a port.

    Raises:
        RequestError: the server cannot be started like this, or too little is known for a plan.
        PlacementError: the model or the replicas do not fit.
    """
    members = list_members(snapshot, spec.name)
    grouped = bool(spec.replicas) or (len(members) > 1 and not spec.partial)
    members = members if grouped else ()
    numbers = choose_numbers(members, spec.replicas)
    if spec.planned:
        spec = serve_forecast.apply_planned_layout(spec, snapshot, len(numbers), guess=guess)
    specs: tuple[StartSpec, ...] = (spec,)
    if grouped:
        specs = place_replicas(replace(spec, replicas=None, partial=True), numbers, snapshot)
    running = {server.name for server in members if server.runs}
    listed = list[Replica]()
    for placed in specs:
        checked = any(not other.start.attached for other in listed)  # the arguments are the same
        own_spec = replace(placed, check_flags=False) if checked else placed
        replica = _plan_replica(own_spec, snapshot, requested_at, runs=placed.name in running)
        listed.append(replica)
        if grouped and not replica.start.attached:
            snapshot = snapshot.with_server(replica.start.spec)
    names = {replica.name for replica in specs}
    removed = tuple(server for server in members if server.name not in names)
    return Replicas(spec=spec, listed=tuple(listed), removed=removed, grouped=grouped)


def _plan_replica(
    spec: StartSpec, snapshot: ClusterSnapshot, requested_at: float, *, runs: bool
) -> Replica:
    inventory = snapshot.site.inventory
    request = spec.build_request(inventory, snapshot.config)
    stages: tuple[Stage, ...] = ()
    notes: tuple[str, ...] = ()
    if not spec.skip_network_check:
        stages, notes = network_gate.plan_network_check(
            inventory, snapshot, request, pair_timeout=spec.pair_timeout
        )
    start = plan_serve(
        snapshot,
        request,
        requested_at=requested_at,
        policy=spec.policy,
        check_stages=stages,
        notes=(*spec.notes, *notes),
        replace_other=spec.replace_other,
        require_unsupervised=spec.unsupervised,
        check_flags=spec.check_flags,
    )
    forecast = serve_forecast.plan_memory(snapshot, request)
    return Replica(
        site=snapshot.site, spec=spec, request=request, start=start, forecast=forecast, runs=runs
    )
