"""Replicas of a server: their layout and their places, spread over the nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from launcher.agent.state import replica_name, replica_number
from launcher.core.domain import Inventory, ServerSpec
from launcher.core.errors import PlacementError, RequestError
from launcher.core.sizes import format_count
from launcher.tools import vllm
from launcher.tools.site import serving_judges
from launcher.tools.site.placement import Placement, choose_placement, narrow_inventory
from launcher.tools.site.servers import Server, gpus_by_node
from launcher.tools.site.serving_judges import GpuUser
from launcher.tools.site.snapshot import ClusterSnapshot

S = TypeVar("S", bound=ServerSpec)
_LAST_PORT = 65535


def list_members(snapshot: ClusterSnapshot, group: str) -> tuple[Server, ...]:
    """Return the replicas of a group that have a spec or still run, by their numbers."""
    members = [
        server
        for server in snapshot.servers_state.servers
        if server.group == group and server.state != "stopped"
    ]
    return tuple(sorted(members, key=lambda server: replica_number(server.name)))


def choose_numbers(members: Sequence[Server], count: int | None) -> tuple[int, ...]:
    """Return the numbers of `count` replicas (None: as many as exist, at least one): the lowest of
    those that exist, then the lowest free ones.
    """
    existing = [replica_number(server.name) for server in members]
    count = len(existing) or 1 if count is None else count
    free = (number for number in range(1, count + len(existing) + 1) if number not in existing)
    chosen = [*existing[:count], *(next(free) for _ in range(count - len(existing)))]
    return tuple(sorted(chosen))


def requested_sizes(
    spec: ServerSpec, inventory: Inventory
) -> tuple[int | None, int | None, int | None]:
    """Return TP, PP and DP as requested by the spec, else by the inventory."""
    if (spec.tp, spec.pp, spec.dp) != (None, None, None):  # sizes of two sources must not mix
        return spec.tp, spec.pp, spec.dp
    return inventory.serve.tp, inventory.serve.pp, inventory.serve.dp


def share_cluster(spec: S, count: int, inventory: Inventory) -> S:
    """Return a spec for the nodes and GPUs that each of `count` replicas gets by default: several
    nodes, or a part of one.
    """
    nodes = narrow_inventory(inventory, spec.nodes, spec.gpus).nodes
    names = tuple(node.name for node in nodes)
    if count == 1:
        return spec
    if count <= len(nodes):
        return replace(spec, nodes=names[: len(nodes) // count])
    smallest = min(nodes, key=lambda node: node.gpus)
    per_node = -(-count // len(nodes))
    return replace(spec, nodes=(smallest.name,), gpus=max(1, smallest.gpus // per_node))


def place_replicas(spec: S, numbers: Sequence[int], snapshot: ClusterSnapshot) -> tuple[S, ...]:
    """Return the specs of replicas, for a spec of the whole group: each has its name, its port
    (`port` for the first one) and, with `mp`, its nodes and the GPUs that it takes on each.

    A replica that exists keeps its nodes if its number of GPUs stays. A new one goes to the nodes
    with the fewest replicas, then the most free GPUs.

    Raises:
        PlacementError: the replicas do not fit beside the other servers.
        RequestError: there are not enough ports.
    """
    inventory = snapshot.site.inventory
    members = {server.name: server for server in list_members(snapshot, spec.name)}
    current = [server for server in members.values() if server.desired is not None]
    layout = _choose_layout(spec, len(numbers), inventory, current[:1], snapshot)
    others = [server for server in snapshot.servers_state.running if server.group != spec.name]
    _check_total(spec, layout, len(numbers), snapshot, others)
    if spec.port + max(numbers) - 1 > _LAST_PORT:
        text = f"replica {max(numbers)} would need port {spec.port + max(numbers) - 1}"
        raise RequestError(text, hint="choose a lower port: `--port`")
    replicas = tuple(
        replace(
            spec,
            name=replica_name(spec.name, number),
            port=spec.port + number - 1,
            tp=layout.tp,
            pp=layout.pp,
            dp=layout.dp,
        )
        for number in numbers
    )
    if spec.backend == "ray":
        return replicas
    room = _Room(narrow_inventory(inventory, spec.nodes), spec.gpus, layout)
    for server in others:
        room.take(gpus_by_node(server))
    placed: dict[str, S] = {}
    for replica in replicas:
        member = members.get(replica.name)
        if member and (place := _present_place(member, replica, layout)) is not None:
            placed[replica.name] = replace(replica, nodes=place[0], gpus=place[1])
            room.take(gpus_by_node(member), replica=True)
    for replica in replicas:
        if replica.name not in placed:
            placed[replica.name] = room.place(replica)
    return tuple(placed[replica.name] for replica in replicas)


def _choose_layout(
    spec: ServerSpec,
    count: int,
    inventory: Inventory,
    current: Sequence[Server],
    snapshot: ClusterSnapshot,
) -> Placement:
    """Return the layout of each replica: the requested one, that of the existing replicas, or the
    default for its share of the cluster.
    """
    tp, pp, dp = requested_sizes(spec, inventory)
    if tp is None and pp is None and (dp or 1) == 1:
        tp, pp, dp = _present_sizes(spec, current) or (tp, pp, dp)
    pcp = vllm.prefill_context_parallel(spec.args)
    if tp is not None:
        return Placement(tp=tp, pp=pp or 1, dp=dp or 1, pcp=pcp, why="", nodes=())
    share = share_cluster(spec, count, inventory)
    narrowed = narrow_inventory(inventory, share.nodes, share.gpus)
    return choose_placement(narrowed, tp, pp, snapshot.config, dp=dp, pcp=pcp, backend=spec.backend)


def _present_sizes(spec: ServerSpec, current: Sequence[Server]) -> tuple[int, int, int] | None:
    """Return the layout of a group that runs the same model, if it has one."""
    for server in current:
        original = server.desired.asked_for if server.desired else {}
        sizes = tuple(original.get(key) for key in ("tp", "pp", "dp"))
        same = (original.get("model"), original.get("backend")) == (spec.model, spec.backend)
        if same and all(isinstance(size, int) for size in sizes):
            return sizes  # type: ignore[return-value]
    return None


def _present_place(
    member: Server, replica: ServerSpec, layout: Placement
) -> tuple[tuple[str, ...], int | None] | None:
    """Return the nodes and the GPUs per node of a replica that exists, if it can stay on them."""
    if member.gpus != layout.world:
        return None
    original = member.desired.asked_for if member.desired else {}
    nodes, gpus = tuple(original.get("nodes") or ()), original.get("gpus")
    present = tuple(original.get(key) for key in ("backend", "tp", "pp", "dp"))
    if present != (replica.backend, layout.tp, layout.pp, layout.dp):
        # Replicas are replaced one after another: only its own GPUs are free then.
        counts = gpus_by_node(member)
        gpus = next(iter(counts.values()), 0)
        if {*counts.values()} != {gpus} or gpus % _unit(layout):
            return None
        nodes = tuple(counts)
    if replica.nodes and not (nodes and set(nodes) <= set(replica.nodes)):
        return None
    if replica.gpus is not None and (gpus is None or gpus > replica.gpus):
        return None
    return nodes, gpus


def _check_total(
    spec: ServerSpec,
    layout: Placement,
    count: int,
    snapshot: ClusterSnapshot,
    others: Sequence[Server],
) -> None:
    """Raise PlacementError if the replicas need more GPUs than others leave."""
    inventory = narrow_inventory(snapshot.site.inventory, spec.nodes)
    names = {node.name for node in inventory.nodes}
    users = [
        serving_judges.server_gpu_user(server, gpus)
        for server in others
        if (gpus := sum(n for node, n in gpus_by_node(server).items() if node in names))
    ]
    users += [] if spec.nodes else serving_judges.job_gpu_users(snapshot.payload)
    used = sum(user.gpus for user in users)
    needed = count * layout.world
    if needed + used <= inventory.gpus:
        return
    fitting = int((inventory.gpus - used) // layout.world)
    advice = [f"use `--replicas {fitting}`"] if fitting else []
    advice += ["fewer GPUs for each: `--tp`"] if layout.world > 1 else []
    hints = [" or ".join(advice), *(f"stop {u.label}: `{u.stop_command}`" for u in users)]
    size, total = format_count(layout.world, "GPU"), format_count(needed, "GPU")
    verb = "needs" if count == 1 else "need"
    place = f"{'these nodes have' if spec.nodes else 'the cluster has'} {inventory.gpus:g}"
    raise PlacementError(
        f"{format_count(count, 'replica')} of {size} ({layout.label}) {verb} {total};"
        f" {place}{_describe_users(used, users)}",
        hint="\n".join(filter(None, hints)),
    )


def _describe_users(used: float, users: Sequence[GpuUser]) -> str:
    if not users:
        return ""
    labels = [user.label if len(users) == 1 else f"{user.label} ({user.gpus:g})" for user in users]
    return f", of which {used:g} {'is' if used == 1 else 'are'} used by {', '.join(labels)}"


def _unit(layout: Placement) -> int:
    """Return the GPUs that must be on one node: those of a data-parallel rank."""
    return layout.replica_size if layout.dp > 1 else 1


@dataclass
class _Room:
    """GPUs that are free on each node, and the replicas on it."""

    inventory: Inventory
    limit: int | None
    layout: Placement

    def __post_init__(self) -> None:
        """Count all GPUs as free."""
        self.free = {node.name: node.gpus for node in self.inventory.nodes}
        self.replicas = dict.fromkeys(self.free, 0)

    def take(self, counts: Mapping[str, int], *, replica: bool = False) -> None:
        """Subtract the GPUs of a server."""
        for node in counts.keys() & self.free.keys():
            self.free[node] -= counts[node]
            self.replicas[node] += replica and counts[node] > 0

    def place(self, replica: S) -> S:
        """Place a replica on as few nodes as possible, with equal numbers of GPUs, as vLLM's `mp`
        requires (`assign_mp_ranks`). Raises PlacementError.
        """
        layout = self.layout
        for size in range(1, len(self.free) + 1):
            share, rest = divmod(layout.world, size)
            fits = share <= (share if self.limit is None else self.limit)
            nodes = [name for name, free in self.free.items() if free >= share and fits]
            if rest or share % _unit(layout) or len(nodes) < size:
                continue
            best = sorted(nodes, key=lambda name: (self.replicas[name], -self.free[name]))[:size]
            self.take(dict.fromkeys(best, share), replica=True)
            chosen = tuple(name for name in self.free if name in best)
            return replace(replica, nodes=chosen, gpus=share)
        raise PlacementError(
            f"server `{replica.name}` of {format_count(layout.world, 'GPU')} ({layout.label})"
            " fits on no nodes, which must have equal numbers of free GPUs",
            evidence="free GPUs: " + ", ".join(f"{node} {n}" for node, n in self.free.items()),
            hint="use fewer replicas, or fewer GPUs for each: `--replicas`, `--tp`",
        )
