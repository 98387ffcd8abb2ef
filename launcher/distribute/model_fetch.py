"""`--fetch` of `serve` and `batch`: a model that nodes lack is brought to them first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from launcher.core.domain import Inventory, Node, fold
from launcher.tools.placement import narrow

if TYPE_CHECKING:
    from launcher.app.command import Call
    from launcher.app.session import Session
    from launcher.batch.batch_plan import Start
    from launcher.batch.shape import Job
    from launcher.core.plan import Plan
    from launcher.serving.start import StartSpec
    from launcher.tools.snapshot import ClusterSnapshot


def for_server(
    session: Session, spec: StartSpec, snapshot: ClusterSnapshot, *, dry_run: bool
) -> tuple[StartSpec, ClusterSnapshot, float]:
    """Bring a server's model to its nodes where that is wished, and look again; a dry run only
    notes it. Also returns the seconds that it took; raises what `_copy` does.
    """
    from launcher.app import servers

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
        notes = (*spec.notes, *_note(snapshot, spec.model, nodes))
        return replace(spec, notes=notes), snapshot, 0.0
    plan = partial(_early_plan, inventory, spec, snapshot)
    seconds = _copy(session, snapshot, spec.model, nodes, plan)
    if seconds:
        snapshot = servers.look(session, model=spec.model, planning=True)
    return spec, snapshot, seconds


def for_batch(call: Call, session: Session, seen: ClusterSnapshot, job: Job, start: Start) -> bool:
    """Bring the model of a job that is to begin to all nodes, where that is wished and this is no
    dry run; True when something was brought. Raises what `_copy` does.
    """
    begins = not (start.attached or start.finished or call.dry_run) and job.mode != "predict"
    if not begins or not (call.fetch or session.inventory.models.spread == "auto"):
        return False
    return _copy(session, seen, job.model, session.inventory.nodes, lambda: start.plan) > 0


def _early_plan(inventory: Inventory, spec: StartSpec, snapshot: ClusterSnapshot) -> Plan:
    """Return the plan of a server before its model is there. Where the planner is to choose the
    split of a model that no node has yet, a server takes at least a GPU and a port. Raises
    RequestError.
    """
    from launcher.serving import serve_forecast

    if spec.planned and (snapshot.config is None or not snapshot.weight_bytes):
        spec = replace(spec, planned=False, tp=1, pp=1, dp=1)
    elif spec.planned:
        spec = serve_forecast.settled(spec, snapshot)
    return spec.plan(inventory, snapshot)[1].plan


def _judge(session: Session, plan: Plan) -> None:
    """Have refused now what would be refused when the model has come, which may take hours; raises
    GateError.
    """
    for stage in plan.stages:
        if stage.id == "preflight":
            gates = tuple(gate for gate in stage.gates if gate.id != "model")
            title = "Look at the cluster, before the model is brought"
            first = replace(stage, title=title, gates=gates)
            session.apply(replace(plan, stages=(first,), notes=()))


def _lacking(snapshot: ClusterSnapshot, model: str, nodes: Sequence[Node]) -> list[str]:
    """Return the nodes that are known to lack files of a model."""
    stores = snapshot.models if model else {}
    return [node.name for node in nodes if node.name in stores and stores[node.name].absent]


def _note(snapshot: ClusterSnapshot, model: str, nodes: Sequence[Node]) -> Iterator[str]:
    """Say what a dry run would copy, unless nothing is missing."""
    if lack := _lacking(snapshot, model, nodes):
        whole = any(store.where == "there" for store in snapshot.models.values())
        how = f"copy {model}" if whole or model.startswith("/") else f"pull {model}"
        advice = f"`vlaunch model {how} --dry-run` says how"
        yield f"first, {fold(lack)} would be given {model}: {advice}"


def _copy(
    session: Session,
    snapshot: ClusterSnapshot,
    model: str,
    nodes: Sequence[Node],
    plan: Callable[[], Plan],
) -> float:
    """Copy a model to those of `nodes` that lack it, from a node that has all of it, else by a
    download on one of them; returns the seconds that it took, 0 where nothing was missing. Gates of
    `plan` are checked before.

    Raises:
        RequestError: no node has a folder, nodes that have the model differ, or there is no room.
        NodeError: a node does not have it, or the download failed.
        GateError: a gate fails that does not depend on the model.
    """
    from launcher.distribute import model_copy, model_pull
    from launcher.distribute.copying import Options
    from launcher.distribute.model_plan import plan_copy, whole_on

    lack = _lacking(snapshot, model, nodes)
    if not lack:
        return 0.0
    _judge(session, plan())
    began = time.monotonic()
    given = Options(cached=True)  # vLLM is about to read it
    programs = model_copy.look(session, session.reached, model)
    stores = programs.look(model, files=True)
    if whole_on(model, stores) or model.startswith("/"):
        model_copy.bring(programs, plan_copy(model, stores, targets=lack), given, last=False)
    else:
        model_pull.download(session, model, nodes, given)
    return time.monotonic() - began
