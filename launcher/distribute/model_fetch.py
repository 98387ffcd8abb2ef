"""Copy a model to nodes that lack it, before a server or a job needs it."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from launcher.app.session import Session
from launcher.core.domain import Node, fold
from launcher.core.plan import Plan
from launcher.distribute import model_copy, model_pull
from launcher.distribute.copy_session import CopyOptions
from launcher.distribute.model_plan import complete_nodes, plan_copy
from launcher.tools.site.snapshot import ClusterSnapshot


def ensure_model(
    session: Session,
    snapshot: ClusterSnapshot,
    model: str,
    nodes: Sequence[Node],
    plan: Callable[[], Plan],
) -> float:
    """Copy a model to those of `nodes` that lack it, from a node with a complete copy or after a
    download on one of them; returns the seconds that it took, 0 where nothing was missing. The
    gates of `plan` are checked first.

    Raises:
        RequestError: no node has the folder, the nodes' copies differ, or there is no space.
        NodeError: a node does not have the model, or the download failed.
        GateError: a gate fails that does not depend on the model.
    """
    missing_nodes = _nodes_without_model(snapshot, model, nodes)
    if not missing_nodes:
        return 0.0
    _check_gates(session, plan())
    began = time.monotonic()
    options = CopyOptions(cached=True)  # vLLM is about to read it
    programs = model_copy.start_programs(session, session.reached, model)
    stores = programs.scan_models(model, files=True)
    if complete_nodes(model, stores) or model.startswith("/"):
        copy_plan = plan_copy(model, stores, targets=missing_nodes)
        model_copy.copy_model(programs, copy_plan, options, last=False)
    else:
        model_pull.download_model(session, model, nodes, options)
    return time.monotonic() - began


def dry_run_notes(snapshot: ClusterSnapshot, model: str, nodes: Sequence[Node]) -> Iterator[str]:
    """Yield a note on the copy that a dry run leaves out, unless nothing is missing."""
    if missing_nodes := _nodes_without_model(snapshot, model, nodes):
        complete = any(store.where == "there" for store in snapshot.models.values())
        subcommand = f"copy {model}" if complete or model.startswith("/") else f"pull {model}"
        advice = f"`vlaunch model {subcommand} --dry-run` shows how"
        yield f"first, {fold(missing_nodes)} would get {model}: {advice}"


def _check_gates(session: Session, plan: Plan) -> None:
    """Check the plan's other gates before a copy that may take hours; raises GateError."""
    for stage in plan.stages:
        if stage.id == "preflight":
            gates = tuple(gate for gate in stage.gates if gate.id != "model")
            title = "Check the cluster before the copy of the model"
            reduced = replace(stage, title=title, gates=gates)
            session.apply(replace(plan, stages=(reduced,), notes=()))


def _nodes_without_model(snapshot: ClusterSnapshot, model: str, nodes: Sequence[Node]) -> list[str]:
    """Return the nodes whose scan shows missing files of a model."""
    stores = snapshot.models if model else {}
    return [node.name for node in nodes if node.name in stores and stores[node.name].absent]
