"""Copy a model to nodes that lack it, before a server or a job needs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from launcher.app.session import Session
from launcher.core.domain import Node, fold
from launcher.core.plan import Plan
from launcher.distribute import model_copy, model_pull
from launcher.distribute.copying import Options
from launcher.distribute.model_plan import plan_copy, whole_on
from launcher.tools.snapshot import ClusterSnapshot


def ensure_model(
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


def notes(snapshot: ClusterSnapshot, model: str, nodes: Sequence[Node]) -> Iterator[str]:
    """Say what a dry run would copy, unless nothing is missing."""
    if lack := _lacking(snapshot, model, nodes):
        whole = any(store.where == "there" for store in snapshot.models.values())
        how = f"copy {model}" if whole or model.startswith("/") else f"pull {model}"
        advice = f"`vlaunch model {how} --dry-run` says how"
        yield f"first, {fold(lack)} would be given {model}: {advice}"


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
