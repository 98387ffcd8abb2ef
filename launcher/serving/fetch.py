"""`serve --fetch`: copy the model to the nodes of a server first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from launcher.app import servers
from launcher.core.domain import Inventory, Node
from launcher.distribute import model_fetch
from launcher.serving import serve_forecast
from launcher.tools.placement import narrow

if TYPE_CHECKING:
    from launcher.app.session import Session
    from launcher.core.plan import Plan
    from launcher.serving.start import StartSpec
    from launcher.tools.snapshot import ClusterSnapshot


def fetch_model(
    session: Session, spec: StartSpec, snapshot: ClusterSnapshot, *, dry_run: bool
) -> tuple[StartSpec, ClusterSnapshot, float]:
    """Bring a server's model to its nodes where it is asked for, and look again; a dry run only
    notes it. Also returns the seconds that it took; raises what `ensure_model` does.
    """
    inventory = session.inventory
    # One that runs has its model, and is watched, refused or, with --replace, made room for.
    running = [known.name for known in snapshot.kept.running]
    runs = spec.name in running and not spec.replace_other
    if runs or not (spec.fetch or inventory.models.spread == "auto"):
        return spec, snapshot, 0.0
    nodes: Sequence[Node] = inventory.nodes
    if spec.backend == "mp":
        nodes = (
            narrow(inventory, spec.nodes).nodes
            if spec.planned
            else spec.request(inventory, snapshot.config).nodes_with_ranks(inventory)
        )
    if dry_run:
        notes = (*spec.notes, *model_fetch.notes(snapshot, spec.model, nodes))
        return replace(spec, notes=notes), snapshot, 0.0
    plan = partial(_early_plan, inventory, spec, snapshot)
    seconds = model_fetch.ensure_model(session, snapshot, spec.model, nodes, plan)
    if seconds:
        snapshot = servers.look(session, model=spec.model, planning=True)
    return spec, snapshot, seconds


def _early_plan(inventory: Inventory, spec: StartSpec, snapshot: ClusterSnapshot) -> Plan:
    """Return the plan of a server before its model is there. Where the planner is to choose the
    split of a model that no node has yet, a server takes at least a GPU and a port. Raises
    RequestError.
    """
    if spec.planned and (snapshot.config is None or not snapshot.weight_bytes):
        spec = replace(spec, planned=False, tp=1, pp=1, dp=1)
    elif spec.planned:
        spec = serve_forecast.settled(spec, snapshot)
    return spec.plan(inventory, snapshot)[1].plan
