"""`--fetch` of `serve` and `batch`: a model that nodes lack is brought to them first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.model import Inventory, Node, fold
from launcher.placement import narrow

if TYPE_CHECKING:
    from launcher.batch.shape import Job
    from launcher.cli.command import Call
    from launcher.cli.session import Session
    from launcher.cli.start import Asked
    from launcher.plan.batch import Start
    from launcher.plan.shape import Plan
    from launcher.state.snapshot import ClusterSnapshot


def for_server(
    session: Session, asked: Asked, seen: ClusterSnapshot, *, dry_run: bool
) -> tuple[Asked, ClusterSnapshot, float]:
    """Bring a server's model to its nodes where that is wished, and look again; a dry run only
    notes it. Returns the seconds that it took besides; raises what `bring` does, and, before
    anything is copied, what would refuse the server afterwards.
    """
    from launcher.cli import server

    # One that runs has its model, and is watched, refused or, with --replace, made room for.
    runs = any(each.name == asked.name for each in seen.kept.running) and not asked.replace_other
    if runs or not wanted(session.inventory, asked.fetch):
        return asked, seen, 0.0
    nodes = _loading(session.inventory, asked, seen)
    if dry_run:
        told = note(seen, asked.model, nodes)
        return replace(asked, told=(*asked.told, *filter(None, [told]))), seen, 0.0
    if lacking(seen, asked.model, nodes):
        _, start = _known(asked, seen).plan(session.inventory, seen)
        _judge(session, start.plan)
    seconds = bring(session, seen, asked.model, nodes)
    if seconds:
        seen = server.look(session, model=asked.model, planning=True)
    return asked, seen, seconds


def for_batch(call: Call, session: Session, seen: ClusterSnapshot, job: Job, start: Start) -> bool:
    """Bring the model of a job that is to begin to all nodes, where that is wished and this is no
    dry run; True when something was brought. Raises what `bring` does, and, before anything is
    copied, what would refuse the job afterwards.
    """
    begins = not (start.attached or start.finished or call.dry_run) and job.mode != "predict"
    if not begins or not wanted(session.inventory, call.fetch):
        return False
    nodes = session.inventory.nodes
    if lacking(seen, job.model, nodes):
        _judge(session, start.plan)
    return bring(session, seen, job.model, nodes) > 0


def _known(asked: Asked, seen: ClusterSnapshot) -> Asked:
    """Return what can be judged of a server before its model is there: where the plan shall choose
    its split, and nobody knows the model yet, that it takes a GPU and a port. Raises RequestError.
    """
    from launcher.cli import serve_plan

    if not asked.planned:
        return asked
    if seen.config is None or not seen.weight_bytes:
        return replace(asked, planned=False, tp=1, pp=1, dp=1)
    return serve_plan.settled(asked, seen)


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


def _loading(inventory: Inventory, asked: Asked, seen: ClusterSnapshot) -> Sequence[Node]:
    """Return the nodes that will load a server's model, or may."""
    if asked.backend == "ray":
        return inventory.nodes
    if asked.planned:
        return narrow(inventory, asked.nodes).nodes
    return asked.request(inventory, seen.config).nodes_with_ranks(inventory)


def wanted(inventory: Inventory, flag: bool) -> bool:
    """True when models are to be brought: by a flag, or by `models: {spread: auto}`."""
    return flag or inventory.models.spread == "auto"


def lacking(seen: ClusterSnapshot, model: str, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that are known to lack files of a model."""
    found = seen.models if model else {}
    return [node for node in nodes if node.name in found and found[node.name].absent]


def note(seen: ClusterSnapshot, model: str, nodes: Sequence[Node]) -> str:
    """Say what a dry run would bring; empty where nothing is missing."""
    lack = lacking(seen, model, nodes)
    if not lack:
        return ""
    whole = [name for name, found in seen.models.items() if found.where == "there"]
    how = f"copy {model}" if whole or model.startswith("/") else f"pull {model}"
    names = fold([node.name for node in lack])
    return f"first, {names} would be given {model}: `vlaunch model {how} --dry-run` says how"


def bring(session: Session, seen: ClusterSnapshot, model: str, nodes: Sequence[Node]) -> float:
    """Bring a model to those of `nodes` that lack it, from a node that has all of it, else by a
    download on one of them; returns the seconds that it took, 0 where nothing was missing.

    Raises:
        RequestError: nobody has a folder, nodes that have the model differ, or there is no room.
        NodeError: a node does not have it, or the download failed.
    """
    from launcher.cli import model_copy, model_pull
    from launcher.cli.copying import Options
    from launcher.plan.copying import plan_copy, whole_on

    lack = lacking(seen, model, nodes)
    if not lack:
        return 0.0
    began = time.monotonic()
    given = Options(cached=True)  # vLLM is about to read it
    programs = model_copy.look(session, session.reached, model)
    found = programs.look(model, files=True)
    if whole_on(model, found) or model.startswith("/"):
        copying = plan_copy(model, found, targets=[node.name for node in lack])
        model_copy.bring(programs, copying, given, last=False)
    else:
        model_pull.download(session, model, nodes, given)
    return time.monotonic() - began
