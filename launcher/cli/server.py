"""What `serve`, `batch`, `chat` and `stop` begin with: look at the nodes, and ask the head which server and which jobs run."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from launcher.checks.ray import read_payload
from launcher.errors import NodeError, RequestError, UnreadableAnswer
from launcher.plan import attached, rollback, running, verdict
from launcher.plan.observe import observe
from launcher.plan.serve import Seen, ask_model
from launcher.tools import model as models
from launcher.watch import by_node

if TYPE_CHECKING:
    from launcher.cli.session import Session
    from launcher.plan.batches import BatchStatus
    from launcher.plan.running import Running


def look(
    session: Session, *, model: str = "", host: str = "", port: int = 0, head_only: bool = False, supervision: bool = False
) -> Seen:
    """Observe every node (or `head_only`), then ask the head about Ray and, when a model is named, every node for it.

    The API is looked for at `host`:`port`, or where the inventory puts it. With `supervision`, the head's folder is looked into
    for what a supervisor is told.
    """
    inventory = session.inventory
    asked_nodes = replace(inventory, nodes=(inventory.head,)) if head_only else inventory
    facts = observe(asked_nodes, session.transport, [inventory.image])
    asked = ask_model(inventory, facts, model) if model else []
    jobs = [running.ask_jobs(inventory, host or inventory.serve.bind, port or inventory.ports.api)]
    if not running.head_runs(inventory, facts):
        jobs = []
    wanted = [rollback.ask(inventory, facts)] if supervision else []
    answers = by_node(session.transport, [*jobs, verdict.ask_record(inventory, facts), *wanted, *asked])
    of_head = answers[inventory.head.name]
    said: dict[str, Any] = {}
    if jobs:
        try:
            said = read_payload(of_head.pop(0))
        except UnreadableAnswer as error:
            said = {"error": error.message}
    kept = verdict.parse_record(of_head.pop(0))
    keeps = attached.read(of_head.pop(0)) if wanted else None
    seen = {node: models.parse_look(each[0]) for node, each in answers.items() if each}
    return Seen(facts=facts, said=said, models=seen, network=kept, wanted=keeps)


def the_server(session: Session, seen: Seen) -> Running:
    """Return the one server that runs; raises RequestError when there is none, and NodeError when nobody could say."""
    found = running.find(session.inventory, seen.facts, seen.said)
    if not found:
        if "error" in seen.said:
            raise silent(session, seen)
        raise RequestError("no server runs on this cluster", hint="start one: `vlaunch serve --model MODEL`")
    return found[0]


def the_batch(found: Sequence[BatchStatus], name: str) -> BatchStatus:
    """Return the batch job called `name`; raises RequestError when there is none."""
    for each in found:
        if each.name == name:
            return each
    near = difflib.get_close_matches(name, [each.name for each in found], n=1)
    raise RequestError(
        f"no batch job `{name}`" + (f"; did you mean `{near[0]}`?" if near else ""), hint="see which there are: `vlaunch jobs`"
    )


def silent(session: Session, seen: Seen, *, forgotten: bool = False) -> NodeError:
    """Return the error that the head could not be asked which servers run; what was wanted may be forgotten all the same."""
    text = "Ray does not say which jobs run" + (
        "; a server that runs goes on, and does not come back any more" if forgotten else ""
    )
    return NodeError(
        session.inventory.head.name, text, evidence=str(seen.said["error"]),
        hint="look at `vlaunch status`; `vlaunch down` ends everything",
    )  # fmt: skip
